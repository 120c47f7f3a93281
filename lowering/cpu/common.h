// What the C++ files of this folder share. Each is compiled after this one.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
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
using c10::Float8_e4m3fn;
using c10::Float8_e5m2;
using Lanes = at::vec::Vectorized<float>;

// Why a kernel stops: 1 for what it was given, or the bytes that the system does not give it, as a negative number.
struct Failure {
  int64_t code;
};

// 0 for work that does not fail.
template <typename Work>
int64_t code_of(Work work) {
  try {
    work();
    return 0;
  } catch (const Failure& failure) {
    return failure.code;
  }
}

template <typename T>
struct Buffer {
  explicit Buffer(int64_t count)
      : memory(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 64) / 64 * 64)), std::free) {
    if (!memory) throw Failure{-static_cast<int64_t>(count * sizeof(T))};
  }
  T* get() const { return memory.get(); }
  std::unique_ptr<T, void (*)(void*)> memory;
};

// Two rows as one row of pairs, the form in which the right side of a matrix product of bfloat16 is wanted.
inline void pair_rows(const BFloat16* even, const BFloat16* odd, BFloat16* pairs, int64_t count) {
#ifdef __AVX512BW__
  const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper = lower + _mm512_set1_epi64(4);
  for (int64_t n = 0; n < count; n += 32) {
    const __mmask32 some = count - n < 32 ? (1u << (count - n)) - 1 : ~0u;
    const __m512i left = _mm512_maskz_loadu_epi16(some, even + n), right = _mm512_maskz_loadu_epi16(some, odd + n);
    const __m512i low = _mm512_unpacklo_epi16(left, right), high = _mm512_unpackhi_epi16(left, right);
    _mm512_mask_storeu_epi32(pairs + 2 * n, some, _mm512_permutex2var_epi64(low, lower, high));
    _mm512_mask_storeu_epi32(pairs + 2 * n + 32, some >> 16, _mm512_permutex2var_epi64(low, upper, high));
  }
#else
  for (int64_t n = 0; n < count; ++n) {
    pairs[2 * n] = even[n];
    pairs[2 * n + 1] = odd[n];
  }
#endif
}

// Calls `work(next)` on each thread; `next()` is the number of a task, or none from `tasks` on. A failure of a thread may
// not leave a parallel region: PyTorch's throws it when all threads have ended.
template <typename Work>
void on_threads(Work work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) { work(next); });
}

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

inline int64_t rounded_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

template <typename From, typename To>
void copy(const From* from, To* to, int64_t count) {
  if (count == 0) return;  // there may be no memory
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, count * sizeof(To));
  } else {
    at::vec::convert<From, To>(from, to, count);
  }
}

// So many codes of 8 bits are widened at once.
constexpr int64_t SOME_CODES = 2 * Lanes::size();

struct Pair {
  Lanes low, high;
};

// Codes with their signs in 16 bits.
inline at::vec::Vectorized<int16_t> in_16_bits(const void* codes) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(codes)));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(codes)));
#else
  int16_t wide[SOME_CODES];
  std::copy_n(static_cast<const int8_t*>(codes), SOME_CODES, wide);
  return at::vec::Vectorized<int16_t>::loadu(wide);
#endif
}

// Codes of 8 bits as the numbers that they are without a scale.
template <typename Code>
Pair widened(const Code* codes) {
  if constexpr (std::is_same_v<Code, int8_t>) {
#if defined(CPU_CAPABILITY_AVX512)
    const auto* from = reinterpret_cast<const __m128i*>(codes);
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))),
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)))};
#elif defined(CPU_CAPABILITY_AVX2)
    const auto *from = reinterpret_cast<const __m128i*>(codes), *next = reinterpret_cast<const __m128i*>(codes + 8);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(next)))};
#else
    float wide[SOME_CODES];
    std::copy_n(codes, SOME_CODES, wide);
    return {Lanes::loadu(wide), Lanes::loadu(wide + Lanes::size())};
#endif
  } else {  // as float16, whose exponent has five bits, too, or one more, which counts from another number
    using Bits = at::vec::Vectorized<int16_t>;
    constexpr bool is_e4m3 = std::is_same_v<Code, Float8_e4m3fn>;
    Bits bits = in_16_bits(codes) * Bits(is_e4m3 ? 1 << 7 : 1 << 8);
    if (is_e4m3) {
      const Bits largest(0x3f80), is_nan = (bits & largest) == largest;
      bits = (bits & Bits(int16_t(0xbfff))) | (is_nan & Bits(0x4000));
    }
    at::vec::Vectorized<Half> halves;
    std::memcpy(&halves, &bits, sizeof(halves));
    const auto [low, high] = at::vec::convert_to_float<Half>(halves);
    const Lanes factor(is_e4m3 ? 256.0f : 1.0f);
    return {low * factor, high * factor};
  }
}

// Numbers in float32, rounded to T.
template <typename T>
Pair rounded(const Pair& x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto upper = [](const Lanes& number) {  // half to even, by a sum that has no room for further bits
      const Lanes power = number & Lanes(std::numeric_limits<float>::infinity());
      const Lanes large = at::vec::clamp_max(power, Lanes(0x1p110f)) * Lanes(1.5f * 0x1p16f);
      return number + large - large;
    };
    return {upper(x.low), upper(x.high)};
  } else {
    const auto [low, high] = at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(x.low, x.high));
    return {low, high};
  }
}

// As many codes as there are.
template <typename Code>
void to_float(const Code* codes, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += SOME_CODES) {
    Code last[SOME_CODES] = {};
    const int64_t n = std::min(SOME_CODES, count - i);
    if (n < SOME_CODES) std::copy_n(codes + i, n, last);
    const auto [low, high] = widened(n < SOME_CODES ? last : codes + i);
    low.store(to + i, static_cast<int>(std::min<int64_t>(n, Lanes::size())));
    if (n > Lanes::size()) high.store(to + i + Lanes::size(), static_cast<int>(n - Lanes::size()));
  }
}

// Codes of a row times their scales, one for each `tile` columns, rounded to `Stored`.
template <typename Stored, typename Code, typename To>
void dequantise(const Code* codes, const float* scales, int64_t tile, int64_t count, To* to) {
  constexpr int64_t SOME = 64;
  float some[SOME];
  Stored rounded[SOME];
  for (int64_t first = 0; first < count; first += SOME) {
    const int64_t n = std::min(SOME, count - first);
    to_float(codes + first, some, n);
    if (tile >= count || tile % SOME == 0) {
      for (int64_t i = 0; i < n; ++i) some[i] *= scales[first / tile];
    } else if (tile == 1) {
      for (int64_t i = 0; i < n; ++i) some[i] *= scales[first + i];
    } else {
      for (int64_t i = 0; i < n; ++i) some[i] *= scales[(first + i) / tile];
    }
    if constexpr (std::is_same_v<Stored, To>) {
      copy(some, to + first, n);
    } else {
      copy(some, rounded, n);
      copy(rounded, to + first, n);
    }
  }
}

// A number in a table of int32 or int64.
inline int64_t number_at(const char* table, bool is_int32, int64_t at) {
  return is_int32 ? reinterpret_cast<const int32_t*>(table)[at] : reinterpret_cast<const int64_t*>(table)[at];
}

// [rows, columns] as [columns, rows]
inline void transpose(const float* from, float* to, int64_t rows, int64_t columns) {
  at::vec::transpose_mxn<float>(from, columns, to, rows, static_cast<int>(rows), static_cast<int>(columns));
}

// Whether oneDNN multiplies pairs of bfloat16, and faster than the same numbers in float32.
inline bool multiplies_pairs() {
  if (at::native::cpublas::could_pack(at::kBFloat16)) return true;
#ifdef __AVX512BW__
  static const bool is_able = __builtin_cpu_supports("avx512bf16") && !std::getenv("ONEDNN_MAX_CPU_ISA");
  return is_able && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

// How numbers enter products: bfloat16 with the rows of a right side in pairs, or float32.
template <bool pairs>
struct ProductForm {
  using Number = std::conditional_t<pairs, BFloat16, float>;
  static constexpr int64_t width = pairs ? 2 : 1;  // a row has a multiple of so many numbers

  static void product(int64_t m, int64_t n, int64_t k, const Number* left, int64_t left_row, const Number* right,
                      int64_t right_row, float* to, int64_t to_row, bool add) {
    at::native::cpublas::brgemm(m, n, k, left_row, right_row, to_row, add, left, right, to, pairs);
  }

  // rows [m, W] as the right side of `keys @ rows.T`: moves of 32 bits.
  static void transposed(const Number* rows, Number* to, int64_t m, int64_t W) {
    transpose(reinterpret_cast<const float*>(rows), reinterpret_cast<float*>(to), m, W / width);
  }

  // weights [keys, m] as the left side of `weights.T @ values`; they are used up.
  static void left(float* weights, Number* to, int64_t keys, int64_t m) {
    if constexpr (!pairs) {
      transpose(weights, to, keys, m);
    } else {
      // Rounded, they take the first half of their memory: each ends before the next one to be read. Pairs of them take
      // the second half.
      auto *rounded = reinterpret_cast<BFloat16*>(weights), *paired = rounded + keys * m;
      copy(weights, rounded, keys * m);
      for (int64_t key = 0; key < keys; key += 2)
        pair_rows(rounded + key * m, rounded + (key + 1) * m, paired + key * m, m);
      transpose(reinterpret_cast<float*>(paired), reinterpret_cast<float*>(to), keys / 2, m);
    }
  }

  // rows[:, :R] as the right side of `weights @ rows`.
  static const Number* values(const Number* rows, Number* to, int64_t keys, int64_t W, int64_t R) {
    if constexpr (!pairs) {
      return rows;
    } else {
      for (int64_t key = 0; key < keys; key += 2) pair_rows(rows + key * W, rows + (key + 1) * W, to + key * R, R);
      return to;
    }
  }
  static int64_t values_row(int64_t W, int64_t R) { return pairs ? R : W; }
};

// Runs a kernel of rows that are stored in a dtype: 0 is float32, 1 bfloat16, 2 float16.
template <template <typename Stored, bool pairs> class Kernel, typename Call>
int64_t run_for(int64_t dtype, const Call& call) {
  return code_of([&] {
    if (dtype == 0) Kernel<float, false>(call).run();
    else if (dtype == 2) Kernel<Half, false>(call).run();
    else if (multiplies_pairs()) Kernel<BFloat16, true>(call).run();
    else Kernel<BFloat16, false>(call).run();
  });
}

}  // namespace

