// Scores of an indexer, for CPUs. lightning_index.py says what they are and fills in `Call`.
//
// Letters: B sequences, S query tokens, N heads, T keys, D columns of a query or key, W the same for products.
//
// A task is a group of query tokens of one sequence, and a part of its keys. It takes its keys tile by tile: products
// are [keys, query rows], and only their sums over heads are stored.

namespace {

constexpr int64_t TILE = 256;  // keys
constexpr int64_t ROWS = 128;  // query rows of one product, or the heads of one token
constexpr int64_t GROUP = 8;   // as many rows are one task

// Strides are in elements, addresses 0 where there is none.
struct Call {
  const char *query, *key, *weights, *table, *mask;
  float* out;
  int64_t B, S, N, T, D;
  int64_t query_b, query_s, query_n, key_page, key_row, pages;
  int64_t page, table_b, table_is_int32;  // page: rows of a page, or T without a table
  int64_t mask_b, mask_s, mask_t, mask_is_bool;
  double fill;
};

// `Stored` is the dtype of queries and keys.
template <typename Stored, bool pairs>
class Scores {
  using F = ProductForm<pairs>;
  using Number = typename F::Number;

  const Call& a;
  const int64_t W, tokens, group, groups, parts;  // tokens of a product, tokens of a task

  int64_t count_of_parts() const {
    const int64_t wanted = 4 * at::get_num_threads(), tasks = a.B * groups;
    return std::max<int64_t>(1, std::min(wanted / tasks, a.T / TILE));
  }

  int64_t number_of_page(int64_t b, int64_t place) const {
    if (!a.table) return b;
    const int64_t number = number_at(a.table, a.table_is_int32, b * a.table_b + place);
    return number < 0 ? number + a.pages : number;
  }

  // Rows of the keys first..last, a row of the result after `row` numbers: where they lie, or copied to `to`.
  const Number* keys(int64_t b, int64_t first, int64_t last, Number* to, int64_t* row) const {
    const auto address = [&](int64_t t) {
      return reinterpret_cast<const Stored*>(a.key) + number_of_page(b, t / a.page) * a.key_page + t % a.page * a.key_row;
    };
    if constexpr (std::is_same_v<Stored, Number>) {
      *row = a.key_row;
      if (W == a.D && first / a.page == (last - 1) / a.page) return address(first);
    }
    *row = W;
    for (int64_t t = first; t < last; ++t) {
      Number* next = to + (t - first) * W;
      copy(address(t), next, a.D);
      std::fill(next + a.D, next + W, Number(0));
    }
    return to;
  }

  // Whether a mask hides keys first..last from tokens s..s_last.
  bool hidden(int64_t b, int64_t s, int64_t s_last, int64_t first, int64_t last) const {
    if (!a.mask_is_bool || a.fill != NOTHING) return false;
    for (; s < s_last; ++s)
      for (int64_t t = first; t < last; ++t)
        if (a.mask[b * a.mask_b + s * a.mask_s + t * a.mask_t]) return false;
    return true;
  }

  float masked(float score, int64_t at) const {
    if (a.mask_is_bool) return a.mask[at] ? score : static_cast<float>(a.fill);
    return score + reinterpret_cast<const float*>(a.mask)[at];
  }

  void run_task(int64_t b, int64_t first_token, int64_t last_token, int64_t first_key, int64_t last_key) const {
    const int64_t rows = (last_token - first_token) * a.N;
    Buffer<Number> given(rows * W), queries(rows * W), copied(TILE * W);
    Buffer<float> products(TILE * tokens * a.N);
    for (int64_t m = 0; m < rows; ++m) {
      Number* next = given.get() + m * W;
      const int64_t s = first_token + m / a.N, n = m % a.N;
      copy(reinterpret_cast<const Stored*>(a.query) + b * a.query_b + s * a.query_s + n * a.query_n, next, a.D);
      std::fill(next + a.D, next + W, Number(0));
    }
    for (int64_t m = 0; m < rows; m += tokens * a.N)
      F::transposed(given.get() + m * W, queries.get() + m * W, std::min(tokens * a.N, rows - m), W);
    for (int64_t t = first_key; t < last_key; t += TILE) {
      const int64_t end = std::min(last_key, t + TILE);
      if (hidden(b, first_token, last_token, t, end)) {
        for (int64_t s = first_token; s < last_token; ++s) std::fill_n(a.out + (b * a.S + s) * a.T + t, end - t, NOTHING);
        continue;
      }
      int64_t row = 0;
      const Number* left = keys(b, t, end, copied.get(), &row);
      for (int64_t s = first_token; s < last_token; s += tokens) {
        const int64_t count = std::min(tokens, last_token - s);
        F::product(end - t, count * a.N, W, left, row, queries.get() + (s - first_token) * a.N * W, count * a.N,
                   products.get(), count * a.N, false);
        for (int64_t token = 0; token < count; ++token)
          sum_up(b, s + token, t, end, products.get() + token * a.N, count * a.N);
      }
    }
    at::native::cpublas::brgemm_release(pairs);
  }

  // Scores of one token, of products [keys, N] that are `row` numbers apart.
  void sum_up(int64_t b, int64_t s, int64_t first, int64_t last, const float* products, int64_t row) const {
    const float* weights = reinterpret_cast<const float*>(a.weights) + (b * a.S + s) * a.N;
    const auto weighed = [](Lanes x, Lanes weight) { return at::vec::maximum(x, Lanes(0)) * weight; };
    const auto add = [](Lanes x, Lanes y) { return x + y; };
    float* out = a.out + (b * a.S + s) * a.T;
    for (int64_t t = first; t < last; ++t, products += row)
      out[t] = at::vec::map2_reduce_all<float>(weighed, add, products, weights, a.N);
    for (int64_t t = first; a.mask && t < last; ++t)
      out[t] = masked(out[t], b * a.mask_b + s * a.mask_s + t * a.mask_t);
  }

 public:
  explicit Scores(const Call& call)
      : a(call), W(rounded_up(a.D, F::width)), tokens(std::clamp<int64_t>(ROWS / a.N, 1, a.S)),
        group(std::min(a.S, tokens * GROUP)), groups((a.S + group - 1) / group), parts(count_of_parts()) {}

  void run() const {
    const int64_t size = rounded_up((a.T + parts - 1) / parts, TILE), tasks = a.B * groups * parts;
    on_threads([&](auto& next) {
      for (int64_t task; (task = next++) < tasks;) {
        const int64_t token = task / parts % groups * group, key = std::min(a.T, task % parts * size);
        run_task(task / parts / groups, token, std::min(a.S, token + group), key, std::min(a.T, key + size));
      }
    });
  }
};

}  // namespace

// `dtype` of queries and keys. Page numbers must be checked.
extern "C" int64_t index_scores(const Call* call, int64_t dtype) { return run_for<Scores>(dtype, *call); }
