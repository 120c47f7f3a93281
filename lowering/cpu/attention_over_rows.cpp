// Attention over rows of a pool, for CPUs. attention_over_rows.py says what it computes and fills in `Call`.
//
// Letters: B sequences, S query tokens, N heads, T keys, R columns of a latent, W = R + Dr columns of a joined row,
// V columns of a value. H heads share their keys: all of them, whose values are the latents, or one, which has keys and
// values of its own. They are a set of heads: a sequence has N / H sets, and M = S * H query rows for each.
//
// A task is a group of query rows of one set, and a part of its keys. It takes its keys tile by tile: it gathers their
// rows from the pool once, and all its query rows use them. Scores are [keys, query rows], because keys are then the
// left side of a product, which is taken as it lies. Keys that no query row sees are never read, and a block of query
// rows skips a tile in which it sees nothing. The parts of a set are joined by their maxima and sums.

namespace {

constexpr int64_t TILE = 256;             // keys; measured, with BLOCK: both fit a core's own cache
constexpr int64_t BLOCK = 128;            // query rows of one product
constexpr int64_t GROUP_BYTES = 1 << 20;  // of the sums of one task
constexpr int64_t PART = 256;             // keys of a part, at least: they are worth the sums that it adds
constexpr int64_t FEW = 16;               // keys whose weights are added up at once
constexpr int64_t PACKED = 32;            // products take a multiple of so many keys
constexpr int64_t LANES = Lanes::size();  // and scores are of a multiple of so many query rows

// Strides are in elements, addresses 0 where there is none.
struct Call {
  const char *query, *query_rope, *kv_cache, *kr_cache, *table, *lengths, *mask, *sinks, *values;
  char *out, *lse;
  const char* starts;  // of sequences that lie one behind the other: [B + 1]; then no sequence has more than S tokens
  const char *kv_scales, *kr_scales;  // of codes
  int64_t B, S, N, T, R, Dr, V;
  int64_t query_b, query_s, query_n, rope_b, rope_s, rope_n;
  int64_t kv_page, kv_row, kv_pages, kr_page, kr_row, kr_pages;
  int64_t page, table_b, table_is_int32, lengths_b;  // page: rows of a page, or T without a table
  int64_t mask_b, mask_n, mask_s, mask_t, mask_is_bool;
  int64_t kv_n, values_b, values_n, values_row;  // kv_n: 0 without values
  int64_t kv_scale_page, kv_scale_row, kv_tile, kr_scale_page, kr_scale_row, kr_tile;  // a scale is of so many columns
  int64_t has_fill, query_is_float, codes;  // codes: 1 int8, 2 float8_e4m3fn, 3 float8_e5m2
  double scale, fill, most;
};

void multiply(float* values, float factor, int64_t count) {
  at::vec::map<float>([factor](Lanes x) { return x * Lanes(factor); }, values, values, count);
}

// The larger one, or NaN.
float higher(float x, float y) { return std::isnan(x) || x > y ? x : y; }

// `Stored` is the dtype of the pool.
template <typename Stored, bool pairs>
class Attention {
  using F = ProductForm<pairs>;
  using Number = typename F::Number;

  const Call& a;
  const int64_t W, H, M, sets, group, groups, parts, tile;  // sets: of all sequences
  Buffer<float> sums, maxima, totals;  // [sets, M, parts, V], [sets, M, parts], [sets, M, parts]

  // As many parts as keep all threads busy.
  int64_t count_of_parts() const {
    const int64_t wanted = 2 * at::get_num_threads(), tasks = sets * groups;
    return std::max<int64_t>(1, std::min(wanted / tasks, a.T / PART));
  }

  // A set of heads: a sequence and the first head.
  struct Set {
    int64_t b, n;
  };
  Set set(int64_t number) const { return {number / (a.N / H), number % (a.N / H) * H}; }

  // The first row of a sequence in queries, keys and results, and its tokens.
  int64_t start(int64_t b) const { return a.starts ? reinterpret_cast<const int64_t*>(a.starts)[b] : 0; }
  int64_t tokens(int64_t b) const { return a.starts ? start(b + 1) - start(b) : a.S; }

  // The number of keys that token s sees, apart from a mask.
  int64_t seen(int64_t b, int64_t s) const {
    if (!a.lengths) return a.starts ? tokens(b) : a.T;
    const int64_t length = reinterpret_cast<const int64_t*>(a.lengths)[b * a.lengths_b];  // any number
    return std::clamp<int64_t>(std::clamp<int64_t>(length, 0, a.T + a.S) - a.S + 1 + s, 0, a.T);
  }

  // What tokens s..s_last see of keys first..last: nothing, all, or something else.
  enum class View { nothing, part, all };
  View view(Set of, int64_t s, int64_t s_last, int64_t first, int64_t last) const {
    if (a.lengths) return seen(of.b, s) >= last ? View::all : seen(of.b, s_last) > first ? View::part : View::nothing;
    if (!a.mask) return View::all;
    if (a.mask_n != 0 && H > 1) return View::part;
    bool all = true, nothing = true;
    for (; s <= s_last && (all || nothing); ++s) {
      const int64_t place = of.b * a.mask_b + of.n * a.mask_n + s * a.mask_s;
      if (a.mask_is_bool && a.mask_t == 1) {
        const char* own = a.mask + place + first;
        all = all && !std::memchr(own, 0, last - first);
        nothing = nothing && !own[0] && !std::memcmp(own, own + 1, last - first - 1);
        continue;
      }
      for (int64_t t = first; t < last; ++t) {
        const int64_t at = place + t * a.mask_t;
        const float given = a.mask_is_bool ? (a.mask[at] ? 0 : NOTHING) : reinterpret_cast<const float*>(a.mask)[at];
        all = all && given == 0;
        nothing = nothing && given == NOTHING;
      }
    }
    return all ? View::all : nothing ? View::nothing : View::part;
  }

  int64_t number_of_page(int64_t b, int64_t place) const {
    if (!a.table) return b;
    return number_at(a.table, a.table_is_int32, b * a.table_b + place);
  }

  // `count` numbers of a cache from one on: as they are stored or, with scales, from one of these on, codes.
  void put(const char* cache, int64_t at, const char* scales, int64_t scale, int64_t tile, int64_t count,
           Number* to) const {
    const float* by = reinterpret_cast<const float*>(scales) + scale;
    if (!scales) copy(reinterpret_cast<const Stored*>(cache) + at, to, count);
    else if (a.codes == 1) dequantise<Stored>(reinterpret_cast<const int8_t*>(cache) + at, by, tile, count, to);
    else if (a.codes == 2) dequantise<Stored>(reinterpret_cast<const Float8_e4m3fn*>(cache) + at, by, tile, count, to);
    else dequantise<Stored>(reinterpret_cast<const Float8_e5m2*>(cache) + at, by, tile, count, to);
  }

  // `to` becomes the joined rows of keys first..last, and zeros up to `padded` rows.
  void gather(Set of, int64_t first, int64_t last, int64_t padded, Number* to) const {
    std::memset(static_cast<void*>(to), 0, (W == a.R + a.Dr ? 0 : last - first) * W * sizeof(Number));
    for (int64_t t = first; t < last;) {
      const int64_t row = t % a.page, end = std::min(last, t - row + a.page), number = number_of_page(of.b, t / a.page);
      const int64_t kv = number < 0 ? number + a.kv_pages : number, kr = number < 0 ? number + a.kr_pages : number;
      int64_t latent = of.n * a.kv_n + kv * a.kv_page + (start(of.b) + row) * a.kv_row;
      int64_t key = kr * a.kr_page + (start(of.b) + row) * a.kr_row;
      int64_t scale = kv * a.kv_scale_page + row * a.kv_scale_row, key_scale = kr * a.kr_scale_page + row * a.kr_scale_row;
      for (; t < end; ++t, to += W, latent += a.kv_row, key += a.kr_row) {
        put(a.kv_cache, latent, a.kv_scales, scale, a.kv_tile, a.R, to);
        put(a.kr_cache, key, a.kr_scales, key_scale, a.kr_tile, a.Dr, to + a.R);
        scale += a.kv_scale_row;
        key_scale += a.kr_scale_row;
      }
    }
    std::memset(static_cast<void*>(to), 0, (padded - (last - first)) * W * sizeof(Number));
  }

  // `to` becomes the values of keys first..last, and zeros up to `padded` rows.
  void gather_values(Set of, int64_t first, int64_t last, int64_t padded, Number* to) const {
    const auto* value = reinterpret_cast<const Stored*>(a.values) + of.b * a.values_b + of.n * a.values_n;
    value += (start(of.b) + first) * a.values_row;
    for (int64_t t = first; t < last; ++t, to += a.V, value += a.values_row) copy(value, to, a.V);
    std::memset(static_cast<void*>(to), 0, (padded - (last - first)) * a.V * sizeof(Number));
  }

  template <typename Given>
  void gather_queries(Set of, int64_t first, int64_t last, Number* to) const {
    std::memset(static_cast<void*>(to), 0, rounded_up(last - first, LANES) * W * sizeof(Number));
    for (int64_t m = first; m < last; ++m, to += W) {
      const int64_t s = start(of.b) + m / H, n = of.n + m % H;
      copy(reinterpret_cast<const Given*>(a.query) + of.b * a.query_b + s * a.query_s + n * a.query_n, to, a.R);
      const auto* rope = reinterpret_cast<const Given*>(a.query_rope);
      copy(rope + of.b * a.rope_b + s * a.rope_s + n * a.rope_n, to + a.R, a.Dr);
    }
  }

  // What a thread uses for one task after another.
  struct Scratch {
    Buffer<Number> given, queries, rows, values, paired, weights;
    Buffer<float> scores, own, maximum, total;
    explicit Scratch(const Attention& of)
        : given(rounded_up(of.group, LANES) * of.W), queries(rounded_up(of.group, LANES) * of.W), rows(of.tile * of.W),
          values(of.a.values ? of.tile * of.a.V : 0), paired(pairs ? of.tile * of.a.V : 0), weights(BLOCK * of.tile),
          scores(BLOCK * of.tile), own(of.parts == 1 ? of.group * of.a.V : 0), maximum(of.group), total(of.group) {}
  };

  void run_task(int64_t number, int64_t first_row, int64_t last_row, int64_t part, Scratch& scratch) {
    auto& [given, queries, rows, values, paired, weights, scores, own, maximum, total] = scratch;
    const Set of = set(number);
    const int64_t count = last_row - first_row, values_width = a.values ? a.V : W;
    const int64_t keys_read = a.has_fill ? a.T : seen(of.b, (last_row - 1) / H);
    const int64_t size = rounded_up((keys_read + parts - 1) / parts, tile);
    const int64_t first = std::min(keys_read, part * size), last = std::min(keys_read, first + size);
    const int64_t place = (number * M + first_row) * parts + part, sums_row = parts * a.V;
    float* sum = parts == 1 ? own.get() : sums.get() + place * a.V;
    if (a.query_is_float) gather_queries<float>(of, first_row, last_row, given.get());
    else gather_queries<Stored>(of, first_row, last_row, given.get());
    for (int64_t row = 0; row < count; row += BLOCK)
      F::transposed(given.get() + row * W, queries.get() + row * W, std::min(BLOCK, rounded_up(count, LANES) - row), W);
    std::fill_n(maximum.get(), count, NOTHING);
    std::fill_n(total.get(), count, 0.0f);
    for (int64_t row = 0; row < count; ++row) std::fill_n(sum + row * sums_row, a.V, 0.0f);
    for (int64_t t = first; t < last; t += tile) {
      const int64_t end = std::min(last, t + tile), padded = rounded_up(end - t, PACKED);
      const Number* right = nullptr;
      for (int64_t row = 0; row < count; row += BLOCK) {
        const int64_t m = std::min(BLOCK, count - row), wide = rounded_up(m, LANES), at = first_row + row;
        const View seen = view(of, at / H, (at + m - 1) / H, t, end);
        if (seen == View::nothing && !a.has_fill) continue;
        if (!right) {
          gather(of, t, end, padded, rows.get());
          if (a.values) gather_values(of, t, end, padded, values.get());
          right = F::values(a.values ? values.get() : rows.get(), paired.get(), padded, values_width, a.V);
        }
        F::product(padded, wide, W, rows.get(), W, queries.get() + row * W, wide, scores.get(), wide, false);
        multiply(scores.get(), static_cast<float>(a.scale), (end - t) * wide);
        if (seen != View::all) hide(of, at, m, wide, t, end - t, scores.get());
        weigh(m, wide, end - t, padded, scores.get(), sum + row * sums_row, maximum.get() + row, total.get() + row);
        F::left(scores.get(), weights.get(), padded, wide);
        F::product(m, a.V, padded, weights.get(), padded, right, F::values_row(values_width, a.V),
                   sum + row * sums_row, sums_row, true);
      }
    }
    at::native::cpublas::brgemm_release(pairs);
    for (int64_t row = 0; row < count; ++row) {
      maxima.get()[place + row * parts] = maximum.get()[row];
      totals.get()[place + row * parts] = total.get()[row];
      if (parts == 1) store(number * M + first_row + row, sum + row * a.V, maximum.get()[row], total.get()[row]);
    }
  }

  // Hides keys t, ... from `m` query rows that do not see them: their scores are [count, wide], from `row` on.
  void hide(Set of, int64_t row, int64_t m, int64_t wide, int64_t t, int64_t count, float* scores) const {
    const float other = a.has_fill ? static_cast<float>(a.fill) : NOTHING;
    for (int64_t i = 0; a.lengths && i < count; ++i) {
      // The later a token, the more it sees: the first rows do not see this key.
      int64_t s = std::max<int64_t>(0, t + i - seen(of.b, 0));
      while (s < a.S && seen(of.b, s) <= t + i) ++s;
      std::fill_n(scores + i * wide, std::clamp<int64_t>(s * H - row, 0, m), other);
    }
    if (!a.mask) return;
    const bool is_shared = a.mask_n == 0 && H > 1;
    for (int64_t j = 0, more; j < m; j += more) {
      const int64_t n = (row + j) % H;
      more = is_shared ? std::min(m - j, H - n) : std::min(FEW, m - j);  // masks of more may be far apart
      const int64_t rows = is_shared ? 1 : more;
      int64_t at[FEW];
      for (int64_t k = 0; k < rows; ++k) at[k] = place_of_mask(of, row + j + k, t);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t k = 0; k < rows; ++k)
          apply_mask(at[k] + i * a.mask_t, other, scores + i * wide + j + k, is_shared ? more : 1);
    }
  }

  int64_t place_of_mask(Set of, int64_t row, int64_t t) const {
    return of.b * a.mask_b + row / H * a.mask_s + (of.n + row % H) * a.mask_n + t * a.mask_t;
  }

  // What a mask says of one key, for some query rows.
  void apply_mask(int64_t at, float other, float* scores, int64_t count) const {
    if (a.mask_is_bool) {
      if (!a.mask[at]) std::fill_n(scores, count, other);
      return;
    }
    const float more = reinterpret_cast<const float*>(a.mask)[at];
    if (more == NOTHING) std::fill_n(scores, count, NOTHING);
    else if (count == 1) *scores += more;
    else if (more != 0) at::vec::map<float>([more](Lanes x) { return x + Lanes(more); }, scores, scores, count);
  }

  // Scores [count, wide] become weights: exponentials of the scores less the maximum of a query row so far. Sums of
  // earlier keys shrink where that maximum grows. There are m query rows.
  void weigh(int64_t m, int64_t wide, int64_t count, int64_t padded, float* scores, float* sum, float* maximum,
             float* total) const {
    float now[BLOCK] = {};
    std::copy_n(maximum, m, now);
    for (int64_t i = 0; i < count; ++i)
      at::vec::map2<float>([](Lanes x, Lanes y) { return at::vec::maximum(x, y); }, now, now, scores + i * wide, wide);
    for (int64_t j = 0; j < m; ++j) {
      if (now[j] != maximum[j]) {
        const float shrink = std::exp(maximum[j] - now[j]);
        total[j] *= shrink;
        multiply(sum + j * parts * a.V, shrink, a.V);
        maximum[j] = now[j];
      }
      if (now[j] == NOTHING) now[j] = 0;  // no key is seen so far: weights are zero
    }
    const auto add = [](Lanes x, Lanes y) { return x + y; };
    const float most = static_cast<float>(a.most);
    float more[BLOCK] = {};
    const auto weight = [most](Lanes x, Lanes y) { return (x - y).exp_u20() * Lanes(most); };
    for (int64_t first = 0; first < count; first += FEW) {
      float few[BLOCK] = {};  // sums of sums round less
      for (int64_t i = first; i < std::min(count, first + FEW); ++i) {
        at::vec::map2<float>(weight, scores + i * wide, scores + i * wide, now, wide);
        at::vec::map2<float>(add, few, few, scores + i * wide, wide);
      }
      at::vec::map2<float>(add, more, more, few, wide);
    }
    at::vec::map2<float>(add, total, total, more, m);
    std::fill_n(scores + count * wide, (padded - count) * wide, 0.0f);
  }

  void join_parts(int64_t row) {
    float* sum = sums.get() + row * parts * a.V;
    const float *maximum = maxima.get() + row * parts, *total = totals.get() + row * parts;
    float now = maximum[0], whole = 0;
    for (int64_t part = 1; part < parts; ++part) now = higher(maximum[part], now);
    for (int64_t part = 0; part < parts; ++part) {
      const float factor = now == NOTHING ? 0 : std::exp(maximum[part] - now);
      float* more = sum + part * a.V;
      multiply(more, factor, a.V);
      if (part > 0) at::vec::map2<float>([](Lanes x, Lanes y) { return x + y; }, sum, sum, more, a.V);
      whole += total[part] * factor;
    }
    store(row, sum, now, whole);
  }

  // The results of one query row of all sets; `sum` is used up.
  void store(int64_t row, float* sum, float maximum, float total) const {
    const Set of = set(row / M);
    const int64_t m = row % M, n = of.n + m % H, first = a.starts ? start(of.b) : of.b * a.S;
    const int64_t to = (first + m / H) * a.N + n;
    const float most = static_cast<float>(a.most);
    reinterpret_cast<float*>(a.lse)[to] = std::isinf(maximum) ? maximum : maximum + std::log(total / most);
    float factor = total == 0 ? 0 : 1 / total;
    if (a.sinks) {
      const float sink = reinterpret_cast<const float*>(a.sinks)[n], now = higher(sink, maximum);
      const float shrink = now == NOTHING ? 0 : std::exp(maximum - now);
      factor = now == NOTHING ? 0 : shrink / (total * shrink + std::exp(sink - now) * most);
    }
    multiply(sum, factor, a.V);
    copy(sum, reinterpret_cast<Stored*>(a.out) + to * a.V, a.V);
  }

 public:
  explicit Attention(const Call& call)
      : a(call), W(rounded_up(a.R + a.Dr, F::width)), H(a.values ? 1 : a.N), M(a.S * H), sets(a.B * (a.N / H)),
        group(std::min(M, std::max(BLOCK, GROUP_BYTES / (4 * a.V) / BLOCK * BLOCK))), groups((M + group - 1) / group),
        parts(count_of_parts()), tile(std::min(TILE, rounded_up(std::max<int64_t>(a.T, 1), PACKED))),
        sums(parts == 1 ? 0 : sets * M * parts * a.V), maxima(sets * M * parts), totals(sets * M * parts) {}

  // Whether a number in the table names no page.
  bool names_no_page() const {
    const int64_t pages = a.kr_cache ? std::min(a.kv_pages, a.kr_pages) : a.kv_pages;
    const int64_t columns = a.table && a.T > 0 ? a.T / a.page : 0;
    for (int64_t place = 0; place < a.B * columns; ++place) {
      const int64_t number = number_of_page(place / columns, place % columns);
      if (number < -pages || number >= pages) return true;
    }
    return false;
  }

  void run() {
    if (names_no_page()) throw Failure{1};
    const int64_t tasks = sets * groups * parts;
    on_threads([&](auto& next) {
      Scratch scratch(*this);
      for (int64_t task; (task = next++) < tasks;) {
        const int64_t number = task / parts / groups, first = task / parts % groups * group;
        const int64_t last = std::min(tokens(set(number).b) * H, first + group);
        if (first < last) run_task(number, first, last, task % parts, scratch);
      }
    });
    if (parts == 1) return;
#pragma omp parallel for
    for (int64_t row = 0; row < sets * M; ++row)
      if (row % M < tokens(set(row / M).b) * H) join_parts(row);
  }
};

}  // namespace

// `dtype` of the pool. Returns 1, and reads nothing, if a number in the table names no page.
extern "C" int64_t attention_over_rows(const Call* call, int64_t dtype) {
  return run_for<Attention>(dtype, *call);
}
