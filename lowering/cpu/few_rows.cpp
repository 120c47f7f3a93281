// A few rows times a weight, for CPUs. few_rows.py says what it computes and fills in `Call`.
//
// Letters: B products, M rows, K numbers of a row, N results of a row.
//
// The weight is read once, as it is stored: by its columns (the K numbers of a result are neighbours, as nn.Linear
// stores them) or by its rows (the N numbers that one number of a row is multiplied by are neighbours). Either is a
// line. With AMX, columns are the left side of a matrix product, whose right side are the few rows, so that they are
// not even copied. A weight may be codes of 8 bits, which become numbers in registers, or in the cache of a core.

namespace {

using at::native::cpublas::brgemm;
using at::native::cpublas::brgemm_release;

constexpr int64_t MOST_ROWS = 16;
constexpr int64_t COLUMNS = 32;  // of one task; measured: a processor follows few streams, and they are one each
constexpr int64_t WIDE = 256;    // columns of one task where rows of the weight are read
constexpr int64_t DEEP = 256;    // rows of the weight in one product of tiles
constexpr int64_t AT_ONCE = 4;   // lines of the weight that are multiplied together; measured

// Strides are in elements.
struct Sizes {
  int64_t B, M, N, K, rows_b, rows_m;
};

// `Weight` is `Plain` or `Coded`. `of(b)` is that of a product, and `line(l, at)` what a line has at a place and behind
// it; so many numbers as `run(size)` says have one scale, in a line of that size.
template <typename T, typename Weight>
struct Call {
  const T* rows;
  T* out;
  Sizes sizes;
  Weight weight;
};

// One product. `out` is [M, N].
template <typename T, typename Weight>
struct Product {
  const T* rows;
  T* out;
  int64_t M, N, K, rows_m;
  Weight weight;

  Product(const Call<T, Weight>& call, int64_t b)
      : rows(call.rows + b * call.sizes.rows_b), out(call.out + b * call.sizes.M * call.sizes.N), M(call.sizes.M),
        N(call.sizes.N), K(call.sizes.K), rows_m(call.sizes.rows_m), weight(call.weight.of(b)) {}

  // The same rows times columns that are kept elsewhere; the first one is column n.
  template <typename Other>
  Product(const Product<T, Other>& a, const Weight& weight, int64_t n)
      : rows(a.rows), out(a.out + n), M(a.M), N(a.N), K(a.K), rows_m(a.rows_m), weight(weight) {}
};

// Numbers.
template <typename T>
struct Plain {
  const T* numbers;
  int64_t b, next;  // strides of products and lines

  Plain of(int64_t product) const { return {numbers + product * b, b, next}; }
  int64_t run(int64_t size) const { return size; }
  const T* line(int64_t l, int64_t at) const { return numbers + l * next + at; }
};

// A number for each tile of a weight, and the strides of products, tiles of lines, and tiles along a line.
struct Tiles {
  const float* numbers;
  int64_t b, line, along;
};

// Codes that are multiplied as they are, or times scales, or as (codes - zeros) * scales.
enum class Kind { CODES, SCALED, SHIFTED };

template <typename Code, Kind kind>
struct CodedLine {
  const Code* codes;
  Lanes scale, zero;

  CodedLine operator+(int64_t count) const { return {codes + count, scale, zero}; }
  Pair numbers() const {
    Pair found = widened(codes);
    if constexpr (kind == Kind::SHIFTED) found = {found.low - zero, found.high - zero};
    if constexpr (kind != Kind::CODES) found = {found.low * scale, found.high * scale};
    return found;
  }
};

template <typename Code, Kind kind>
struct Coded {
  const Code* codes;
  int64_t b, next;  // strides of products and lines
  Tiles scales, zeros;
  int64_t lines, along;  // of one tile, as powers of two

  Coded of(int64_t product) const {
    Coded found = *this;
    found.codes += product * b;
    found.scales.numbers += product * scales.b;
    found.zeros.numbers += product * zeros.b;
    return found;
  }
  int64_t run(int64_t size) const { return kind == Kind::CODES ? size : std::min(size, int64_t(1) << along); }
  CodedLine<Code, kind> line(int64_t l, int64_t at) const {
    const auto number = [=](const Tiles& tiles) {
      return tiles.numbers ? tiles.numbers[(l >> lines) * tiles.line + (at >> along) * tiles.along] : 1.0f;
    };
    return {codes + l * next + at, Lanes(kind == Kind::CODES ? 1 : number(scales)),
            Lanes(kind == Kind::SHIFTED ? number(zeros) : 0)};
  }

  // Calls `work(i, pair)` for the pairs of numbers of a line from a place on; they are not rounded.
  template <typename Work>
  void each_pair(int64_t l, int64_t from, int64_t count, Work work) const {
    const int64_t length = run(from + count);
    for (int64_t at = from; at < from + count;) {
      const int64_t end = std::min(from + count, (at / length + 1) * length);
      auto some = line(l, at);
      for (; at < end; at += SOME_CODES, some = some + SOME_CODES) work(at - from, some.numbers());
    }
  }

  // Numbers that are rounded to T, kept in T or wider.
  template <typename T, typename Kept>
  void write(int64_t l, int64_t from, int64_t count, Kept* to) const {
    each_pair(l, from, count, [=](int64_t i, const Pair& numbers) {
      if constexpr (std::is_same_v<T, Kept>) {
        at::vec::convert_from_float<T>(numbers.low, numbers.high).store(to + i);
      } else {
        const auto [low, high] = kind == Kind::CODES ? numbers : rounded<T>(numbers);
        low.store(to + i);
        high.store(to + i + Lanes::size());
      }
    });
  }
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

template <typename Weight>
void tiles_by_columns(const Call<BFloat16, Weight>& call) {
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
      const Product a(call, b);
      const auto* right = reinterpret_cast<const BFloat16*>(pairs.get() + b * pairs_of_row * M);
      float sums[COLUMNS * MOST_ROWS];
      if constexpr (std::is_same_v<Weight, Plain<BFloat16>>) {
        brgemm(count, M, a.K, a.weight.next, M, M, false, a.weight.line(first, 0), right, sums);
      } else {
        BFloat16 numbers[COLUMNS * DEEP];
        for (int64_t k = 0; k < a.K; k += DEEP) {
          const int64_t deep = std::min(DEEP, a.K - k);
          for (int64_t n = 0; n < count; ++n) a.weight.template write<BFloat16>(first + n, k, deep, numbers + n * DEEP);
          brgemm(count, M, deep, DEEP, M, M, k > 0, numbers, right + k * M, sums);
        }
      }
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < count; ++n) a.out[m * a.N + first + n] = sums[n * M + m];
    });
    brgemm_release();
  }
}

void tiles_by_rows(const Call<BFloat16, Plain<BFloat16>>& call) {
#pragma omp parallel
  {
    alignas(64) BFloat16 pairs[DEEP * WIDE];  // of neighbours in a column, [DEEP / 2, count, 2]
    each_block(call.sizes, WIDE, [&](int64_t b, int64_t first, int64_t count) {
      const Product a(call, b);
      float sums[MOST_ROWS * WIDE];
      for (int64_t k = 0; k < a.K; k += DEEP) {
        const int64_t deep = std::min(DEEP, a.K - k);
        for (int64_t row = 0; row < deep; row += 2)
          pair_rows(a.weight.line(k + row, first), a.weight.line(k + row + 1, first), pairs + row * count, count);
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
  using Kept = float;  // of numbers that are written for several rows
  using Numbers = Pair;
  using Sum = Lanes;
  static constexpr int64_t step = 2 * Lanes::size(), rows = 2;

  static Sum zero() { return Lanes(0.0f); }
  static Numbers load(const T* from) {
    const auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from));
    return {low, high};
  }
  static Numbers load(const float* from) { return {Lanes::loadu(from), Lanes::loadu(from + Lanes::size())}; }
  template <typename Code, Kind kind>
  static Numbers load(const CodedLine<Code, kind>& from) {
    return kind == Kind::CODES ? from.numbers() : rounded<T>(from.numbers());
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
  using Kept = BFloat16;
  using Numbers = __m512bh;
  using Sum = __m512;
  static constexpr int64_t step = 32, rows = 4;

  static Sum zero() { return _mm512_setzero_ps(); }
  static Numbers load(const BFloat16* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }
  template <typename Code, Kind kind>
  static Numbers load(const CodedLine<Code, kind>& from) {
    const Pair numbers = from.numbers();
    return _mm512_cvtne2ps_pbh(numbers.high, numbers.low);
  }
  static Sum add(const Numbers& x, const Numbers& y, const Sum& sum) { return _mm512_dpbf16_ps(sum, x, y); }
  static float total(const Sum& sum) { return _mm512_reduce_add_ps(sum); }
};
#endif

// The results of rows m, m + 1, ... and columns n, n + 1, ...
template <int64_t ROWS, int64_t COUNT, typename T, typename Weight>
void dot_products(const Product<T, Weight>& a, int64_t m, int64_t n) {
  using F = Form<T>;
  typename F::Sum sums[ROWS][COUNT];
  for (auto& row : sums) std::fill_n(row, COUNT, F::zero());
  const int64_t run = a.weight.run(a.K);
  for (int64_t start = 0; start < a.K; start += run) {
    decltype(a.weight.line(n, start)) lines[COUNT];
    for (int64_t j = 0; j < COUNT; ++j) lines[j] = a.weight.line(n + j, start);
    const int64_t count = std::min(run, a.K - start);
    for (int64_t k = 0; k < count; k += F::step) {
      typename F::Numbers rows[ROWS];
      for (int64_t i = 0; i < ROWS; ++i) rows[i] = F::load(a.rows + (m + i) * a.rows_m + start + k);
      for (int64_t j = 0; j < COUNT; ++j) {
        const auto column = F::load(lines[j] + k);
        for (int64_t i = 0; i < ROWS; ++i) sums[i][j] = F::add(rows[i], column, sums[i][j]);
      }
    }
  }
  for (int64_t i = 0; i < ROWS; ++i)
    for (int64_t j = 0; j < COUNT; ++j) a.out[(m + i) * a.N + n + j] = F::total(sums[i][j]);
}

template <int64_t COUNT, typename T, typename Weight>
void columns(const Product<T, Weight>& a, int64_t n) {
  constexpr int64_t rows = Form<T>::rows;
  int64_t m = 0;
  for (; m + rows <= a.M; m += rows) dot_products<rows, COUNT>(a, m, n);
  for (; m < a.M; ++m) dot_products<1, COUNT>(a, m, n);
}

template <typename T, typename Weight>
void by_columns(const Call<T, Weight>& call) {
#pragma omp parallel
  each_block(call.sizes, COLUMNS, [&](int64_t b, int64_t first, int64_t count) {
    const Product a(call, b);
    const int64_t end = first + count;
    int64_t n = first;
    for (; n + AT_ONCE <= end; n += AT_ONCE) columns<AT_ONCE>(a, n);
    for (; n < end; ++n) columns<1>(a, n);
  });
}

// Codes of columns become numbers once for all rows.
template <typename T, typename Weight>
void by_written_columns(const Call<T, Weight>& call) {
  const int64_t K = call.sizes.K, of_thread = rounded_up(AT_ONCE * K, 64);
  using Kept = typename Form<T>::Kept;
  Buffer<Kept> numbers(at::get_num_threads() * of_thread);
#pragma omp parallel
  {
    Kept* own = numbers.get() + omp_get_thread_num() * of_thread;
    each_block(call.sizes, COLUMNS, [&](int64_t b, int64_t first, int64_t count) {
      const Product a(call, b);
      for (int64_t n = first; n < first + count; n += AT_ONCE) {
        const int64_t some = std::min(AT_ONCE, first + count - n);
        const Product<T, Plain<Kept>> written(a, {own, 0, K}, n);
        for (int64_t j = 0; j < some; ++j) a.weight.template write<T>(n + j, 0, K, own + j * K);
        if (some == AT_ONCE) columns<AT_ONCE>(written, 0);
        else for (int64_t j = 0; j < some; ++j) columns<1>(written, j);
      }
    });
  }
}

template <typename T, typename Weight>
void by_rows(const Call<T, Weight>& call) {
#pragma omp parallel
  each_block(call.sizes, WIDE, [&](int64_t b, int64_t first, int64_t count) {
    const Product a(call, b);
    alignas(64) float sums[MOST_ROWS * WIDE] = {}, numbers[AT_ONCE * WIDE];
    for (int64_t k = 0; k < a.K; k += AT_ONCE) {
      for (int64_t i = 0; i < AT_ONCE; ++i)
        a.weight.template write<T>(k + i, first, count, numbers + i * WIDE);
      for (int64_t m = 0; m < a.M; ++m) {
        const T* row = a.rows + m * a.rows_m + k;
        for (int64_t n = 0; n < count; n += Lanes::size()) {
          Lanes sum = Lanes::loadu(sums + m * WIDE + n);
          for (int64_t i = 0; i < AT_ONCE; ++i)
            sum = at::vec::fmadd(Lanes(float(row[i])), Lanes::loadu(numbers + i * WIDE + n), sum);
          sum.store(sums + m * WIDE + n);
        }
      }
    }
    for (int64_t m = 0; m < a.M; ++m)
      for (int64_t n = 0; n < count; ++n) a.out[m * a.N + first + n] = sums[m * WIDE + n];
  });
}

// The numbers themselves: N lines of K.
template <typename T, typename Weight>
void numbers_of(const Call<T, Weight>& call) {
  const Sizes& z = call.sizes;
#pragma omp parallel for
  for (int64_t l = 0; l < z.B * z.N; ++l)
    call.weight.of(l / z.N).template write<T>(l % z.N, 0, z.K, call.out + l * z.K);
}

enum class Way { COLUMNS, ROWS, NUMBERS };

template <typename T, typename Code, Kind kind>
void coded(const void* given, Way way) {
  const auto& call = *static_cast<const Call<T, Coded<Code, kind>>*>(given);
  if (way == Way::NUMBERS) return numbers_of(call);
  if (way == Way::ROWS) return by_rows(call);
  if (call.sizes.M <= Form<T>::rows) return by_columns(call);
  if constexpr (std::is_same_v<T, BFloat16>)
    if (at::native::cpublas::could_pack(at::kBFloat16)) return tiles_by_columns(call);
  by_written_columns(call);
}

template <typename T>
void coded_in(const void* call, int64_t code, Kind kind, Way way) {
  if (code == 1) return coded<T, Float8_e4m3fn, Kind::SCALED>(call, way);
  if (code == 2) return coded<T, Float8_e5m2, Kind::SCALED>(call, way);
  if (kind == Kind::CODES) return coded<T, int8_t, Kind::CODES>(call, way);
  if (kind == Kind::SCALED) return coded<T, int8_t, Kind::SCALED>(call, way);
  return coded<T, int8_t, Kind::SHIFTED>(call, way);
}

}  // namespace

extern "C" int has_tiles() { return at::native::cpublas::could_pack(at::kBFloat16) ? 1 : 0; }

extern "C" int64_t few_bfloat16_rows(const Call<BFloat16, Plain<BFloat16>>* call, int is_by_columns) {
  return code_of([=] {
    if (!has_tiles()) by_columns(*call);
    else if (is_by_columns) tiles_by_columns(*call);
    else tiles_by_rows(*call);
  });
}

extern "C" void few_float16_rows(const Call<Half, Plain<Half>>* call) { by_columns(*call); }

extern "C" int64_t few_coded_rows(const void* call, int is_bfloat16, int code, int kind, int way) {
  return code_of([=] {
    const auto compute = is_bfloat16 ? coded_in<BFloat16> : coded_in<Half>;
    compute(call, code, static_cast<Kind>(kind), static_cast<Way>(way));
  });
}
