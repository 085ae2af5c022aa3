// Kernels of a decode step on a CPU: attention of single queries over paged KV, and the small
// operations between the matrix products. No framework headers; compiled on first use for the CPU
// at hand (see compiler.py). fp32 arithmetic on fp32 or bf16 data.
//
// Every result depends on its own row alone: sums run in an order that the row's length fixes,
// never the batch or the number of threads. NaN inside a row's own context reaches its output (so
// that the row can be failed); memory outside it is never read.

#include <cstdint>
#include <cstring>

namespace {

// 16 lanes; the compiler maps them to one AVX-512, two AVX2 or four NEON registers.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int LANES = 16;
// Positions of a row that one work item attends to. Fixed, so that a row is always cut alike.
constexpr int SPLIT = 256;
constexpr int AHEAD = 64;  // positions between a prefetch and its use
constexpr int MAX_HEADS = 128;
constexpr float NEVER = -3.0e38f;

struct BFloat16 {
  uint16_t bits;
};

inline Floats splat(float x) { return x - Floats{}; }

inline Floats load(const float *p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Floats load(const BFloat16 *p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  Words w = __builtin_convertvector(h, Words) << 16;
  return (Floats)w;
}

inline void store(float *p, Floats x) { std::memcpy(p, &x, sizeof x); }

inline void store(BFloat16 *p, Floats x) {
  // Round to nearest even; NaN keeps a set mantissa bit.
  Words w = (Words)x;
  Words rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  Words quiet = (w >> 16) | 0x40u;
  Words is_nan = (Words)(x != x);
  Words chosen = (rounded & ~is_nan) | (quiet & is_nan);
  Halves h = __builtin_convertvector(chosen, Halves);
  std::memcpy(p, &h, sizeof h);
}

inline float sum(Floats x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return x[0] + x[1];
}

// Sums of 16 vectors at once: lane i of the result is the sum of the lanes of x[i].
inline Floats sums(Floats *x) {
  for (int count = LANES; count > 1; count /= 2)
    for (int i = 0; i < count / 2; i++) {
      const Floats a = x[2 * i], b = x[2 * i + 1];
      x[i] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                     30) +
             __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                                     31);
    }
  return x[0];
}

// exp(x) for x <= 0 to 2 ulp: 2^n * 2^f with f in [-1/2, 1/2], by the Taylor series of 2^f. A NaN
// stays one.
inline Floats exp_negative(Floats x) {
  Ints low = x < splat(-87.0f);
  x = (Floats)(((Ints)x & ~low) | ((Ints)splat(-87.0f) & low));
  Floats t = x * 1.44269504088896341f;
  Floats n = (t + 12582912.0f) - 12582912.0f;  // nearest integer
  Floats f = t - n;
  Floats p = splat(1.54035304e-4f);
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return p * (Floats)exponent;
}

struct Attention {
  const void *query, *keys, *values;
  void *output;
  const int32_t *tables, *tokens, *rows, *lengths;
  float *scratch;
  int64_t query_stride, table_stride;
  int32_t num_queries, num_heads, num_kv_heads, block_size, window, max_splits;
  float scale, soft_cap;
};

// Partial results of one (query, head, split): maximum, sum of exponentials, weighted values.
template <int V>
constexpr int partial_size() {
  return V * LANES + LANES;
}

// Asks for 16 positions' tokens early: the hardware's own prefetch stops at each page.
template <typename T>
inline void prefetch(const T *base, const int64_t *offsets, int first, int count,
                     int token_bytes) {
  const int end = first + LANES < count ? first + LANES : count;
  for (int i = first; i < end; i++) {
    const char *token = (const char *)(base + offsets[i]);
    for (int byte = 0; byte < token_bytes; byte += 64) __builtin_prefetch(token + byte);
  }
}

// All heads of one split of one query: keys and values are read once, in the order in which they
// lie in memory.
template <typename T, int V>
void attend_split(const Attention &a, int query, int split) {
  constexpr int D = V * LANES;
  const int heads = a.num_heads, group = heads / a.num_kv_heads;
  const int length = a.lengths[query];
  const int begin_seen = a.window > 0 && length > a.window ? length - a.window : 0;
  const int begin = split * SPLIT > begin_seen ? split * SPLIT : begin_seen;
  const int end = (split + 1) * SPLIT < length ? (split + 1) * SPLIT : length;
  const int count = end - begin;
  const int32_t *table = a.tables + (int64_t)a.rows[query] * a.table_stride;
  const T *q = (const T *)a.query + (int64_t)a.tokens[query] * a.query_stride;
  const T *keys = (const T *)a.keys, *values = (const T *)a.values;
  float *partials = a.scratch + ((int64_t)query * a.max_splits + split) * heads * partial_size<V>();

  int64_t offsets[SPLIT];  // of each position's token in the pool, in elements
  for (int i = 0, entry = begin / a.block_size, inside = begin % a.block_size; i < count; i++) {
    offsets[i] = ((int64_t)table[entry] * a.block_size + inside) * a.num_kv_heads * D;
    if (++inside == a.block_size) inside = 0, entry++;
  }

  const int token_bytes = a.num_kv_heads * D * (int)sizeof(T);
  for (int first = 0; first < AHEAD; first += LANES) prefetch(keys, offsets, first, count, token_bytes);

  alignas(64) float scores[MAX_HEADS][SPLIT];
  alignas(64) Floats scaled[MAX_HEADS][V];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < V; v++) scaled[h][v] = load(q + h * D + v * LANES) * a.scale;
  for (int first = 0; first < count; first += LANES) {
    const int here = count - first < LANES ? count - first : LANES;
    prefetch(keys, offsets, first + AHEAD, count, token_bytes);
    for (int h = 0; h < heads; h++) {
      const T *key = keys + h / group * D;
      Floats dots[LANES];
      for (int i = 0; i < LANES; i++) {
        const T *k = key + offsets[first + (i < here ? i : here - 1)];
        dots[i] = scaled[h][0] * load(k);
        for (int v = 1; v < V; v++) dots[i] += scaled[h][v] * load(k + v * LANES);
      }
      store(&scores[h][first], sums(dots));
    }
  }

  for (int h = 0; h < heads; h++) {
    if (a.soft_cap > 0)
      for (int i = 0; i < count; i++)
        scores[h][i] = a.soft_cap * __builtin_tanhf(scores[h][i] / a.soft_cap);
    float highest = NEVER;
    for (int i = 0; i < count; i++) highest = scores[h][i] > highest ? scores[h][i] : highest;
    Floats total = {};
    for (int i = 0; i < count; i += LANES) {
      Floats weight = exp_negative(load(&scores[h][i]) - highest);
      for (int lane = count - i; lane < LANES; lane++) weight[lane] = 0.0f;
      store(&scores[h][i], weight);
      total += weight;
    }
    float *partial = partials + h * partial_size<V>();
    partial[0] = highest;
    partial[1] = sum(total);
    for (int v = 0; v < V; v++) store(partial + LANES + v * LANES, Floats{});
  }

  for (int first = 0; first < count; first += LANES) {
    const int here = count - first < LANES ? count - first : LANES;
    prefetch(values, offsets, first + AHEAD, count, token_bytes);
    for (int h = 0; h < heads; h++) {
      const T *value = values + h / group * D;
      float *mixed = partials + h * partial_size<V>() + LANES;
      Floats sum_of[V];
      for (int v = 0; v < V; v++) sum_of[v] = load(mixed + v * LANES);
      for (int i = 0; i < here; i++) {
        const T *from = value + offsets[first + i];
        const Floats weight = splat(scores[h][first + i]);
        for (int v = 0; v < V; v++) sum_of[v] += weight * load(from + v * LANES);
      }
      for (int v = 0; v < V; v++) store(mixed + v * LANES, sum_of[v]);
    }
  }
}

template <typename T, int V>
void merge_splits(const Attention &a, int query, int head) {
  const int length = a.lengths[query];
  const int begin = a.window > 0 && length > a.window ? length - a.window : 0;
  const int first = begin / SPLIT, last = (length - 1) / SPLIT;
  const int64_t split_stride = (int64_t)a.num_heads * partial_size<V>();
  const float *partials = a.scratch + (int64_t)query * a.max_splits * split_stride +
                          (int64_t)head * partial_size<V>();
  float highest = NEVER;
  for (int s = first; s <= last; s++) {
    const float m = partials[s * split_stride];
    highest = m > highest ? m : highest;
  }
  float total = 0.0f;
  Floats mixed[V] = {};
  for (int s = first; s <= last; s++) {
    const float *partial = partials + s * split_stride;
    const float weight = exp_negative(splat(partial[0] - highest))[0];
    total += weight * partial[1];
    for (int v = 0; v < V; v++) mixed[v] += weight * load(partial + LANES + v * LANES);
  }
  T *out = (T *)a.output + ((int64_t)a.tokens[query] * a.num_heads + head) * V * LANES;
  for (int v = 0; v < V; v++) store(out + v * LANES, mixed[v] / total);
}

template <typename T, int V>
void attend(const Attention &a) {
#pragma omp parallel
  {
#pragma omp for schedule(dynamic, 1)
    for (int item = 0; item < a.num_queries * a.max_splits; item++) {
      const int query = item / a.max_splits, split = item % a.max_splits;
      const int length = a.lengths[query];
      const int begin = a.window > 0 && length > a.window ? length - a.window : 0;
      if (split * SPLIT < length && (split + 1) * SPLIT > begin)
        attend_split<T, V>(a, query, split);
    }
#pragma omp for schedule(static)
    for (int item = 0; item < a.num_queries * a.num_heads; item++)
      merge_splits<T, V>(a, item / a.num_heads, item % a.num_heads);
  }
}

template <typename T>
int attend_by_size(const Attention &a, int head_dim) {
  switch (head_dim) {
    case 16: attend<T, 1>(a); return 0;
    case 32: attend<T, 2>(a); return 0;
    case 48: attend<T, 3>(a); return 0;
    case 64: attend<T, 4>(a); return 0;
    case 80: attend<T, 5>(a); return 0;
    case 96: attend<T, 6>(a); return 0;
    case 128: attend<T, 8>(a); return 0;
    case 256: attend<T, 16>(a); return 0;
    default: return 1;
  }
}

// total = x + residual (rounded to T), out = total / rms(total) * weight. residual may be null.
template <typename T>
void rms_norm_rows(const T *x, int64_t x_stride, const T *residual, const T *weight, T *total,
                   T *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > 65536)
  for (int64_t row = 0; row < rows; row++) {
    const T *in = x + row * x_stride;
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
      Floats value = load(in + i);
      if (residual) {
        value += load(residual + row * size + i);
        store(total + row * size + i, value);
        value = load(total + row * size + i);
      }
      squares += value * value;
    }
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps);
    const T *from = residual ? total + row * size : in;
    for (int64_t i = 0; i < size; i += LANES)
      store(out + row * size + i, load(from + i) * factor * load(weight + i));
  }
}

// out[t, h] = x[t, h] * cos[t] + rolled(x[t, h]) * sin[t]; sin carries the sign of the first half.
template <typename T>
void rotate_rows(const T *x, int64_t token_stride, int64_t head_stride, const T *cosine,
                 const T *sine, T *out, int64_t tokens, int64_t heads, int64_t head_dim) {
  const int64_t half = head_dim / 2;
#pragma omp parallel for schedule(static) if (tokens * heads * head_dim > 65536)
  for (int64_t token = 0; token < tokens; token++) {
    const T *c = cosine + token * head_dim, *s = sine + token * head_dim;
    for (int64_t head = 0; head < heads; head++) {
      const T *in = x + token * token_stride + head * head_stride;
      T *to = out + (token * heads + head) * head_dim;
      for (int64_t i = 0; i < half; i += LANES) {
        const Floats low = load(in + i), high = load(in + half + i);
        store(to + i, low * load(c + i) + high * load(s + i));
        store(to + half + i, high * load(c + half + i) + low * load(s + half + i));
      }
    }
  }
}

template <typename T>
void silu_mul_rows(const T *gate_up, T *out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 65536)
  for (int64_t row = 0; row < rows; row++) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    for (int64_t i = 0; i < size; i += LANES) {
      const Floats g = load(gate + i);
      // sigmoid by exp of a non-positive number on both sides of zero
      const Ints negative = g < Floats{};
      const Floats minus_abs = (Floats)((Words)g | 0x80000000u);
      const Floats e = exp_negative(minus_abs);
      const Floats one = splat(1.0f);
      const Floats numerator = (Floats)(((Ints)e & negative) | ((Ints)one & ~negative));
      store(out + row * size + i, g * (numerator / (one + e)) * load(up + i));
    }
  }
}

}  // namespace

extern "C" {

int legato_kernels_version() { return 1; }

int legato_attend(int is_bf16, int head_dim, const void *query, int64_t query_stride,
                  const void *keys, const void *values, const int32_t *tables,
                  int64_t table_stride, const int32_t *tokens, const int32_t *rows,
                  const int32_t *lengths, int num_queries, int num_heads, int num_kv_heads,
                  int block_size, int window, int max_splits, float scale, float soft_cap,
                  float *scratch, void *output) {
  if (num_heads > MAX_HEADS) return 1;
  const Attention a = {query,       keys,         values,    output,       tables,
                       tokens,      rows,         lengths,   scratch,      query_stride,
                       table_stride, num_queries, num_heads, num_kv_heads, block_size,
                       window,      max_splits,   scale,     soft_cap};
  return is_bf16 ? attend_by_size<BFloat16>(a, head_dim) : attend_by_size<float>(a, head_dim);
}

void legato_rms_norm(int is_bf16, const void *x, int64_t x_stride, const void *residual,
                     const void *weight, void *total, void *out, int64_t rows, int64_t size,
                     float eps) {
  if (is_bf16)
    rms_norm_rows((const BFloat16 *)x, x_stride, (const BFloat16 *)residual,
                  (const BFloat16 *)weight, (BFloat16 *)total, (BFloat16 *)out, rows, size, eps);
  else
    rms_norm_rows((const float *)x, x_stride, (const float *)residual, (const float *)weight,
                  (float *)total, (float *)out, rows, size, eps);
}

void legato_rotary(int is_bf16, const void *x, int64_t token_stride, int64_t head_stride,
                   const void *cosine, const void *sine, void *out, int64_t tokens,
                   int64_t heads, int64_t head_dim) {
  if (is_bf16)
    rotate_rows((const BFloat16 *)x, token_stride, head_stride, (const BFloat16 *)cosine,
                (const BFloat16 *)sine, (BFloat16 *)out, tokens, heads, head_dim);
  else
    rotate_rows((const float *)x, token_stride, head_stride, (const float *)cosine,
                (const float *)sine, (float *)out, tokens, heads, head_dim);
}

void legato_silu_mul(int is_bf16, const void *gate_up, void *out, int64_t rows, int64_t size) {
  if (is_bf16)
    silu_mul_rows((const BFloat16 *)gate_up, (BFloat16 *)out, rows, size);
  else
    silu_mul_rows((const float *)gate_up, (float *)out, rows, size);
}

void legato_append_kv(int64_t row_bytes, const char *key, int64_t key_stride, const char *value,
                      int64_t value_stride, char *keys, char *values, const int64_t *slots,
                      int64_t tokens) {
  for (int64_t token = 0; token < tokens; token++) {
    std::memcpy(keys + slots[token] * row_bytes, key + token * key_stride, row_bytes);
    std::memcpy(values + slots[token] * row_bytes, value + token * value_stride, row_bytes);
  }
}
}
