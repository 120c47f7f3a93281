// A few rows times a weight, for CPUs. few_rows.py says what it computes and fills in `Call`.
//
// Letters: B products, M rows, K numbers of a row, N results of a row.
//
// The weight is read once, as it is stored: by its columns (the K numbers of a result are neighbours, as nn.Linear
// stores them) or by its rows (the N numbers that one number of a row is multiplied by are neighbours). With AMX,
// columns are the left side of a matrix product, whose right side are the few rows, so that they are not even copied.

namespace {

using at::native::cpublas::brgemm;
using at::native::cpublas::brgemm_release;

constexpr int64_t MOST_ROWS = 16;
constexpr int64_t COLUMNS = 32;  // of one task; measured: a processor follows few streams, and they are one each
constexpr int64_t WIDE = 256;    // columns of one task where rows of the weight are read
constexpr int64_t DEEP = 256;    // rows of the weight in one product of tiles
constexpr int64_t AT_ONCE = 4;   // columns whose dot products are summed together; measured

// Strides are in elements.
struct Sizes {
  int64_t B, M, N, K, rows_b, rows_m, weight_b, weight_next;  // weight_next: to the next column, or to the next row
};

template <typename T>
struct Call {
  const T *rows, *weight;
  T* out;
  Sizes sizes;
};

// One product. `out` is [M, N].
template <typename T>
struct Product {
  const T *rows, *weight;
  T* out;
  int64_t M, N, K, rows_m, weight_next;

  Product(const Call<T>& call, int64_t b)
      : rows(call.rows + b * call.sizes.rows_b), weight(call.weight + b * call.sizes.weight_b),
        out(call.out + b * call.sizes.M * call.sizes.N), M(call.sizes.M), N(call.sizes.N), K(call.sizes.K),
        rows_m(call.sizes.rows_m), weight_next(call.sizes.weight_next) {}
};

// Calls `work(b, first, count)` for each block of at most `size` columns of each product, on all threads.
template <typename Work>
void each_block(const Sizes& z, int64_t size, Work work) {
  const int64_t blocks = (z.N + size - 1) / size;
#pragma omp for
  for (int64_t task = 0; task < z.B * blocks; ++task) {
    const int64_t first = task % blocks * size;
    work(task / blocks, first, std::min(size, z.N - first));
  }
}

// --- with AMX ------------------------------------------------------------------------------------------------------

void tiles_by_columns(const Call<BFloat16>& call) {
  const Sizes& z = call.sizes;
  const int64_t M = z.M, pairs_of_row = z.K / 2;
  Buffer<uint32_t> pairs(z.B * pairs_of_row * M);  // of neighbours in a row, [B, K / 2, M]
#pragma omp parallel
  {
#pragma omp for
    for (int64_t place = 0; place < z.B * pairs_of_row; ++place) {
      const BFloat16* from = call.rows + place / pairs_of_row * z.rows_b + 2 * (place % pairs_of_row);
      for (int64_t m = 0; m < M; ++m) std::memcpy(pairs.get() + place * M + m, from + m * z.rows_m, sizeof(uint32_t));
    }
    each_block(z, COLUMNS, [&](int64_t b, int64_t first, int64_t count) {
      const Product<BFloat16> a(call, b);
      const auto* right = reinterpret_cast<const BFloat16*>(pairs.get() + b * pairs_of_row * M);
      float sums[COLUMNS * MOST_ROWS];
      brgemm(count, M, a.K, a.weight_next, M, M, false, a.weight + first * a.weight_next, right, sums);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < count; ++n) a.out[m * a.N + first + n] = sums[n * M + m];
    });
    brgemm_release();
  }
}

void tiles_by_rows(const Call<BFloat16>& call) {
#pragma omp parallel
  {
    alignas(64) BFloat16 pairs[DEEP * WIDE];  // of neighbours in a column, [DEEP / 2, count, 2]
    each_block(call.sizes, WIDE, [&](int64_t b, int64_t first, int64_t count) {
      const Product<BFloat16> a(call, b);
      float sums[MOST_ROWS * WIDE];
      for (int64_t k = 0; k < a.K; k += DEEP) {
        const int64_t deep = std::min(DEEP, a.K - k);
        for (int64_t row = 0; row < deep; row += 2) {
          const BFloat16* even = a.weight + (k + row) * a.weight_next + first;
          pair_rows(even, even + a.weight_next, pairs + row * count, count);
        }
        brgemm(a.M, count, deep, a.rows_m, count, count, k > 0, a.rows + k, pairs, sums);
      }
      for (int64_t m = 0; m < a.M; ++m)
        for (int64_t n = 0; n < count; ++n) a.out[m * a.N + first + n] = sums[m * count + n];
    });
    brgemm_release();
  }
}

// --- without -------------------------------------------------------------------------------------------------------

// How numbers are multiplied and summed: widened to float32.
template <typename T>
struct Form {
  struct Numbers {
    Lanes low, high;
  };
  using Sum = Lanes;
  static constexpr int64_t step = 2 * Lanes::size(), rows = 2;

  static Sum zero() { return Lanes(0.0f); }
  static Numbers load(const T* from) {
    const auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from));
    return {low, high};
  }
  static Sum add(const Numbers& x, const Numbers& y, const Sum& sum) {
    return at::vec::fmadd(x.low, y.low, at::vec::fmadd(x.high, y.high, sum));
  }
  static float total(const Sum& sum) {
    return at::vec::vec_reduce_all<float>([](const Lanes& x, const Lanes& y) { return x + y; }, sum);
  }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16, which the processor multiplies and adds in one instruction.
template <>
struct Form<BFloat16> {
  using Numbers = __m512bh;
  using Sum = __m512;
  static constexpr int64_t step = 32, rows = 4;

  static Sum zero() { return _mm512_setzero_ps(); }
  static Numbers load(const BFloat16* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }
  static Sum add(const Numbers& x, const Numbers& y, const Sum& sum) { return _mm512_dpbf16_ps(sum, x, y); }
  static float total(const Sum& sum) { return _mm512_reduce_add_ps(sum); }
};
#endif

// The results of rows m, m + 1, ... and columns n, n + 1, ...
template <int64_t ROWS, int64_t COUNT, typename T>
void dot_products(const Product<T>& a, int64_t m, int64_t n) {
  using F = Form<T>;
  typename F::Sum sums[ROWS][COUNT];
  for (auto& row : sums) std::fill_n(row, COUNT, F::zero());
  for (int64_t k = 0; k < a.K; k += F::step) {
    typename F::Numbers rows[ROWS];
    for (int64_t i = 0; i < ROWS; ++i) rows[i] = F::load(a.rows + (m + i) * a.rows_m + k);
    for (int64_t j = 0; j < COUNT; ++j) {
      const auto column = F::load(a.weight + (n + j) * a.weight_next + k);
      for (int64_t i = 0; i < ROWS; ++i) sums[i][j] = F::add(rows[i], column, sums[i][j]);
    }
  }
  for (int64_t i = 0; i < ROWS; ++i)
    for (int64_t j = 0; j < COUNT; ++j) a.out[(m + i) * a.N + n + j] = F::total(sums[i][j]);
}

template <int64_t COUNT, typename T>
void columns(const Product<T>& a, int64_t n) {
  constexpr int64_t rows = Form<T>::rows;
  int64_t m = 0;
  for (; m + rows <= a.M; m += rows) dot_products<rows, COUNT>(a, m, n);
  for (; m < a.M; ++m) dot_products<1, COUNT>(a, m, n);
}

template <typename T>
void by_columns(const Call<T>& call) {
#pragma omp parallel
  each_block(call.sizes, COLUMNS, [&](int64_t b, int64_t first, int64_t count) {
    const Product<T> a(call, b);
    const int64_t end = first + count;
    int64_t n = first;
    for (; n + AT_ONCE <= end; n += AT_ONCE) columns<AT_ONCE>(a, n);
    for (; n < end; ++n) columns<1>(a, n);
  });
}

}  // namespace

extern "C" int has_tiles() { return at::native::cpublas::could_pack(at::kBFloat16) ? 1 : 0; }

extern "C" int64_t few_bfloat16_rows(const Call<BFloat16>* call, int is_by_columns) {
  return code_of([=] {
    if (!has_tiles()) by_columns(*call);
    else if (is_by_columns) tiles_by_columns(*call);
    else tiles_by_rows(*call);
  });
}

extern "C" void few_float16_rows(const Call<Half>* call) { by_columns(*call); }
