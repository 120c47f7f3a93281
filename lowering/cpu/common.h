// What the C++ files of this folder share. Each is compiled after this one.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

namespace {

using at::BFloat16;
using at::Half;
using Lanes = at::vec::Vectorized<float>;

template <typename T>
struct Buffer {
  explicit Buffer(int64_t count)
      : memory(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 64) / 64 * 64)), std::free) {}
  T* get() const { return memory.get(); }
  std::unique_ptr<T, void (*)(void*)> memory;
};

// Two rows as one row of pairs, the form in which the right side of a matrix product of bfloat16 is wanted.
inline void pair_rows(const BFloat16* even, const BFloat16* odd, BFloat16* pairs, int64_t count) {
  int64_t n = 0;
#ifdef __AVX512BW__
  const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper = lower + _mm512_set1_epi64(4);
  for (; n + 32 <= count; n += 32) {
    const __m512i left = _mm512_loadu_si512(even + n), right = _mm512_loadu_si512(odd + n);
    const __m512i low = _mm512_unpacklo_epi16(left, right), high = _mm512_unpackhi_epi16(left, right);
    _mm512_storeu_si512(pairs + 2 * n, _mm512_permutex2var_epi64(low, lower, high));
    _mm512_storeu_si512(pairs + 2 * n + 32, _mm512_permutex2var_epi64(low, upper, high));
  }
#endif
  for (; n < count; ++n) {
    pairs[2 * n] = even[n];
    pairs[2 * n + 1] = odd[n];
  }
}

}  // namespace

