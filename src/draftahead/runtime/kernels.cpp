// Small-row kernels for the CPU, and one pass of a llama-shaped decoder made of them.
//
// Decoding reads every weight once a pass, so a pass over 8 rows should cost what one row costs.
// A weight is therefore loaded once and used for all rows while it is in a register. Every sum runs
// in an order that does not depend on how many rows there are, or where a row stands among them:
// a token's logits are the same bits as a root, as a guess, and with any batch mates.
//
// Plain C++ with GCC/Clang vector extensions; the compiler maps 16 floats to what the CPU has.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <sched.h>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float f16 __attribute__((vector_size(64)));
typedef float f16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef int8_t b16u __attribute__((vector_size(16), aligned(1), may_alias));

inline f16 load(const float* p) { return *reinterpret_cast<const f16u*>(p); }
inline void store(float* p, f16 v) { *reinterpret_cast<f16u*>(p) = v; }
inline f16 all(float v) { return f16{} + v; }

inline f16 load_some(const float* p, long count) {  // the first `count` of 16, zeros behind
  float full[16] = {0};
  std::memcpy(full, p, count * sizeof(float));
  return load(full);
}

// a * b + c, rounded once where the CPU can. Said outright: a compiler that may choose (and
// -ffp-contract=off forbids it to) fuses in one loop and not in the next, and bits would differ.
inline __attribute__((always_inline)) f16 fused(f16 a, f16 b, f16 c) {
#if defined(__AVX512F__)
  return (f16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { f16 whole; __m256 half[2]; } x = {a}, y = {b}, z = {c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}

// Keeps a vector in a register: some compilers would rather load it again for every use, and on
// most CPUs there are fewer loads a cycle than additions.
inline __attribute__((always_inline)) f16 held(f16 v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Halves are added, then quarters, and so on: one order for all sums.
inline float sum(f16 v) {
  union { f16 whole; f8 half[2]; } a = {v};
  union { f8 whole; f4 half[2]; } b = {a.half[0] + a.half[1]};
  f4 c = b.half[0] + b.half[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// Eight such sums at once, in that very order.
inline __attribute__((always_inline)) void sum8(const f16* v, float* out) {
  auto halves = [](f16 a, f16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  auto quarters = [](f16 a, f16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  f16 a = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
  f16 b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  f16 c = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
          __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  f16 d = __builtin_shufflevector(c, c, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) +
          __builtin_shufflevector(c, c, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
  std::memcpy(out, &d, 8 * sizeof(float));
}

inline float biggest(f16 v) {
  float best = v[0];
  for (int i = 1; i < 16; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// exp by 2^n * p(r), about 1e-7 off, within [-87, 88]; NaN stays NaN.
inline f16 exp16(f16 x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;  // beyond, 2^n would run into the sign bit
  f16 n = x * 1.44269504f + 12582912.0f;  // rounds to the nearest whole number
  n -= 12582912.0f;
  f16 r = x - n * 0.693145752f - n * 1.42860677e-6f;
  f16 p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i16 bits = (__builtin_convertvector(n, i16) + 127) << 23;
  f16 scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// ------------------------------------------------------------------------------ linear layers

// Weights of one linear layer, [out, in] row by row: float32, or int8 in groups with a scale each.
struct Weights {
  const void* data;      // float [out][in], or uint8 [out][in] (the value plus 128)
  const float* scales;   // null for float32; [out][in / group] for int8
  const float* bias;     // [out] or null
  int64_t out, in;
  int64_t group;         // a multiple of 64
};

constexpr int CHUNK = 64;  // weights that one instruction multiplies and adds

// Rows of activations, as the weights want them. For int8 each group of a row has a scale of its
// own, and `start` undoes the 128 that the unsigned weights carry.
struct Rows {
  const float* x;        // [rows][in]
  int64_t step;          // from a row to the next; 0 where there is one row only
  int8_t* q;             // [rows][in]
  float* scales;         // [rows][in / group]
  int32_t* start;        // [rows][in / group][16]
};

void quantize_row(const float* x, int64_t in, int64_t group, int8_t* q, float* scales,
                  int32_t* start) {
  for (int64_t g = 0; g < in / group; g++, x += group, q += group, start += 16) {
    f16 most = {}, zero = {};
    for (int64_t i = 0; i < group; i += 16) {
      f16 v = load(x + i), size = v < 0.0f ? -v : v;
      most = size > most ? size : most;
      zero += v * 0.0f;
    }
    float top = biggest(most), inverse = top > 0 ? 127.0f / top : 0.0f;
    // NaN and infinity have no whole number; through the scale they reach every result.
    scales[g] = top / 127.0f + sum(zero);
    int32_t lanes[16] = {0};
    for (int64_t i = 0; i < group; i += 16) {
      f16 whole = load(x + i) * inverse + 12582912.0f;  // rounds to the nearest whole number
      i16 value = __builtin_convertvector(whole - 12582912.0f, i16);
      *reinterpret_cast<b16u*>(q + i) = __builtin_convertvector(value, b16u);
      for (int four = 0; four < 4; four++)
        lanes[(i / 4 + four) % 16] += value[4 * four] + value[4 * four + 1] + value[4 * four + 2] +
                                      value[4 * four + 3];
    }
    for (int lane = 0; lane < 16; lane++) start[lane] = -128 * lanes[lane];
  }
}

// Adds inputs [k0, k1) of outputs [n0, n0 + NB). What lies at `ahead`, as far as these weights are
// long, is fetched into the second-level cache meanwhile (the first is too small for it): so
// compute and memory overlap.
template <int R, int NB>
inline __attribute__((always_inline)) void dot_f32(const Weights& w, const Rows& rows, int64_t n0,
                                                   int64_t k0, int64_t k1, const float* ahead,
                                                   f16 (&acc)[NB][R]) {
  const float* data = static_cast<const float*>(w.data);
  const int64_t in = w.in;
  int64_t k = k0;
  for (; k + 16 <= k1; k += 16) {
    f16 wv[NB];
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) {
      wv[i] = load(data + (n0 + i) * in + k);
      __builtin_prefetch(ahead + i * in + (k - k0), 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      f16 xv = held(load(rows.x + r * rows.step + k));
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) acc[i][r] = fused(wv[i], xv, acc[i][r]);
    }
  }
  if (k < k1) {
    for (int i = 0; i < NB; i++) {
      f16 wv = load_some(data + (n0 + i) * in + k, k1 - k);
      for (int r = 0; r < R; r++)
        acc[i][r] = fused(wv, load_some(rows.x + r * rows.step + k, k1 - k), acc[i][r]);
    }
  }
}

template <int R, int NB>
inline __attribute__((always_inline)) void dot_int8(const Weights& w, const Rows& rows, int64_t n0,
                                                    f16 (&acc)[NB][R]) {
  const uint8_t* data = static_cast<const uint8_t*>(w.data);
  const int64_t in = w.in, groups = in / w.group;
  for (int64_t g = 0; g < groups; g++) {
    i16 total[NB][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      i16 begin;
      std::memcpy(&begin, rows.start + (r * groups + g) * 16, sizeof begin);
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) total[i][r] = begin;
    }
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += CHUNK) {
#ifdef __AVX512VNNI__
      __m512i wv[NB];
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) {
        wv[i] = _mm512_loadu_si512(data + (n0 + i) * in + k);
        __builtin_prefetch(data + (n0 + i + 2 * NB) * in + k, 0, 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        __m512i q = (__m512i)held((f16)_mm512_loadu_si512(rows.q + r * in + k));
#pragma GCC unroll 8
        for (int i = 0; i < NB; i++)
          total[i][r] = (i16)_mm512_dpbusd_epi32((__m512i)total[i][r], wv[i], q);
      }
#else
      for (int r = 0; r < R; r++)
        for (int i = 0; i < NB; i++)
          for (int j = 0; j < CHUNK; j++)
            total[i][r][j / 4] += int32_t(data[(n0 + i) * in + k + j]) * rows.q[r * in + k + j];
#endif
    }
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) {
      float scale = w.scales[(n0 + i) * groups + g];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        acc[i][r] = fused(__builtin_convertvector(total[i][r], f16),
                          all(scale * rows.scales[r * groups + g]), acc[i][r]);
    }
  }
}

enum class Then { Store, AddTo };  // what becomes of a result: written, or added to what is there

// Sums up the lanes, adds the bias, and puts the results where they belong.
template <int R, int NB>
inline __attribute__((always_inline)) void finish(const Weights& w, const f16 (&acc)[NB][R],
                                                  float* y, int64_t stride, int64_t n0, Then then) {
  constexpr int COUNT = NB * R;
  float sums[COUNT];
  const f16* flat = &acc[0][0];
#pragma GCC unroll 8
  for (int j = 0; j + 8 <= COUNT; j += 8) sum8(flat + j, sums + j);
#pragma GCC unroll 8
  for (int j = COUNT / 8 * 8; j < COUNT; j++) sums[j] = sum(flat[j]);
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      float value = sums[i * R + r] + (w.bias ? w.bias[n0 + i] : 0.0f);
      float* at = y + r * stride + n0 + i;
      *at = then == Then::AddTo ? *at + value : value;
    }
}

template <int R, int NB, bool INT8>
inline __attribute__((always_inline)) void block(const Weights& w, const Rows& rows, float* y,
                                                 int64_t stride, int64_t n0, Then then) {
  f16 acc[NB][R];
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[i][r] = f16{};
  if constexpr (INT8) {
    dot_int8<R, NB>(w, rows, n0, acc);
  } else {
    const float* ahead = static_cast<const float*>(w.data) + (n0 + 2 * NB) * w.in;
    if constexpr (R == 1) {
      // As if there were two rows, both the same one: weights that are asked for twice arrive
      // sooner than those asked for once (by a tenth of a pass, on an AMD Zen 4).
      f16 twice[NB][2] = {};
      dot_f32<2, NB>(w, rows, n0, 0, w.in, ahead, twice);
      for (int i = 0; i < NB; i++) acc[i][0] = twice[i][0];
    } else {
      dot_f32<R, NB>(w, rows, n0, 0, w.in, ahead, acc);
    }
  }
  finish<R, NB>(w, acc, y, stride, n0, then);
}

constexpr int64_t FIRST_LEVEL = 26 * 1024;  // bytes of rows that stay in the first-level cache
constexpr int64_t DEEP = 512;               // inputs at a time where whole rows would not
constexpr int GROUP = 8;                    // blocks that take turns, so that the rows are used

// The same sums in the same order, with rows too long for the cache taken in parts. The sums so
// far wait in memory, lane by lane.
template <int R, int NB>
void deep_group(const Weights& w, const Rows& rows, float* y, int64_t stride, int64_t n0,
                Then then) {
  f16 kept[GROUP][NB][R];
  const float* data = static_cast<const float*>(w.data);
  for (int64_t k0 = 0; k0 < w.in; k0 += DEEP) {
    const bool last = k0 + DEEP >= w.in;
    for (int g = 0; g < GROUP; g++) {
      f16 acc[NB][R];
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[i][r] = k0 ? kept[g][i][r] : f16{};
      const int64_t n = n0 + g * NB;
      // Two turns on: in this part, or at the start of the next one.
      const int64_t turn = g + 2 < GROUP || last ? (g + 2) * NB * w.in + k0
                                                 : (g + 2 - GROUP) * NB * w.in + k0 + DEEP;
      const int64_t start = last && g + 2 >= GROUP ? turn - k0 : turn;
      dot_f32<R, NB>(w, rows, n, k0, last ? w.in : k0 + DEEP, data + n0 * w.in + start, acc);
      if (last) {
        finish<R, NB>(w, acc, y, stride, n, then);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) kept[g][i][r] = acc[i][r];
      }
    }
  }
}

template <int R, int NB, bool INT8>
void span(const Weights& w, const Rows& rows, float* y, int64_t stride, int64_t from, int64_t to,
          Then then) {
  int64_t n = from;
  if constexpr (!INT8)
    if (R * w.in * int64_t(sizeof(float)) > FIRST_LEVEL)
      for (; n + GROUP * NB <= to; n += GROUP * NB) deep_group<R, NB>(w, rows, y, stride, n, then);
  for (; n + NB <= to; n += NB) block<R, NB, INT8>(w, rows, y, stride, n, then);
  for (; n < to; n++) block<R, 1, INT8>(w, rows, y, stride, n, then);
}

typedef void (*Span)(const Weights&, const Rows&, float*, int64_t, int64_t, int64_t, Then);
// As many outputs at a time as keep R times that many sums in registers.
constexpr Span FLOATS[9] = {nullptr,           span<1, 8, false>, span<2, 8, false>,
                            span<3, 6, false>, span<4, 6, false>, span<5, 4, false>,
                            span<6, 4, false>, span<7, 3, false>, span<8, 3, false>};
// int8 keeps whole-number sums beside the others.
constexpr Span BYTES[9] = {nullptr,          span<1, 8, true>, span<2, 6, true>,
                           span<3, 4, true>, span<4, 3, true>, span<5, 2, true>,
                           span<6, 2, true>, span<7, 2, true>, span<8, 2, true>};

// Outputs [from, to) of a linear layer for all rows; weights that 8 rows have used are still in
// the cache for the next 8.
void linear_part(const Weights& w, const Rows& rows, int64_t count, float* y, int64_t stride,
                 int64_t from, int64_t to, Then then) {
  const int64_t groups = w.group ? w.in / w.group : 0, chunk = 48;
  const Span* spans = w.scales ? BYTES : FLOATS;
  if (count <= 8) return spans[count](w, rows, y, stride, from, to, then);
  for (int64_t n = from; n < to; n += chunk)
    for (int64_t r = 0; r < count; r += 8) {
      int64_t some = count - r < 8 ? count - r : 8;
      Rows part = {rows.x + r * w.in, some > 1 ? w.in : 0, rows.q + r * w.in,
                   rows.scales + r * groups, rows.start + r * groups * 16};
      spans[some](w, part, y + r * stride, stride, n, n + chunk < to ? n + chunk : to, then);
    }
}

// Threads meet here between the stages of a pass. OpenMP's own barrier spins for milliseconds; on a
// busy machine that keeps the thread that is waited for off its core. This one soon steps aside.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait() {
    int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int tries = 0; phase_.load(std::memory_order_acquire) == phase; tries++)
      if (tries > 4000) sched_yield();
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0}, phase_{0};
};

// This thread's share of `count` things, in whole multiples of `unit`.
inline void share(int64_t count, int64_t unit, int64_t& from, int64_t& to) {
  int64_t threads = omp_get_num_threads(), units = (count + unit - 1) / unit;
  int64_t each = (units + threads - 1) / threads * unit;
  from = each * omp_get_thread_num();
  to = from + each < count ? from + each : count;
  if (from > count) from = to = count;
}

// --------------------------------------------------------------------------- between the layers

void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* y) {
  f16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) squares = fused(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total += x[i] * x[i];
  float scale = 1.0f / std::sqrt(total / width + eps);
  for (i = 0; i + 16 <= width; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < width; i++) y[i] = x[i] * scale * weight[i];
}

// x * cos + rotate_half(x) * sin, in place.
void rotate(float* x, const float* cos, const float* sin, int64_t width) {
  int64_t half = width / 2;
  for (int64_t i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

enum Activation { SILU = 0, GELU_TANH = 1 };

inline f16 activate(f16 x, int kind) {
  if (kind == SILU) return x / (1.0f + exp16(-x));
  f16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp16(-2.0f * inner));
}

}  // namespace

// ------------------------------------------------------------------------------ the whole pass

extern "C" {

struct Layer {
  Weights q, k, v, o, gate, up, down;
  const float *input_norm, *after_norm, *q_norm, *k_norm;  // the last two may be null
  float *keys, *values;  // [cache rows][key heads][length][width]
  int64_t window;        // 0: none
  float scaling;
  float unused;
};

struct Model {
  const Layer* layers;
  int64_t layer_count, hidden, heads, key_heads, width, inner, length, activation;
  const float* final_norm;
  Weights head;
  float eps;
  float unused;
};

// One pass over `rows` texts of `nodes` new nodes each.
struct Pass {
  int64_t rows, nodes, first;  // first: of the cache's rows
  int64_t real;                // nodes of a row that belong to its text; behind them are guesses
  const int64_t* lengths;      // [rows] keys each text has already
  const int32_t* depths;       // [rows][nodes]
  const uint64_t* ancestors;   // [rows][nodes] bit m: node m leads to this one, itself included
  const float *cos, *sin;      // [rows][nodes][width]
  float* x;                    // [rows][nodes][hidden]: embeddings in, garbage out
  float* logits;               // [rows][nodes][vocabulary], or null if only the keys are wanted
  float* scratch;              // of draftahead_scratch(...) floats
};

}  // extern "C"

namespace {

constexpr int64_t MOST_QUERIES = 16;  // that share the reading of keys and values

int64_t rounded(int64_t n) { return (n + 15) / 16 * 16; }

// What the threads of a pass share.
struct Buffers {
  float *q, *k, *v, *mixed, *inner, *other;
  Barrier* barrier;
};

int64_t private_size(const Model& m, int64_t count) {
  int64_t widest = m.inner > m.hidden ? m.inner : m.hidden;
  if (m.heads * m.width > widest) widest = m.heads * m.width;
  int64_t norm = rounded(count * m.hidden);
  int64_t quantized = rounded(count * widest / 4) + rounded(count * widest / CHUNK) +
                      rounded(count * widest / 4);
  return norm + quantized + MOST_QUERIES * rounded(m.length + 64) + 64;
}

// Each thread prepares all rows for itself: they are few, and no barrier is needed.
struct Private {
  float* norm;
  int8_t* q;
  float* scales;
  int32_t* start;
  float* scores;

  Private(const Model& m, int64_t count, float* at) {
    int64_t widest = m.inner > m.hidden ? m.inner : m.hidden;
    if (m.heads * m.width > widest) widest = m.heads * m.width;
    norm = at;
    at += rounded(count * m.hidden);
    q = reinterpret_cast<int8_t*>(at);
    at += rounded(count * widest / 4);
    scales = at;
    at += rounded(count * widest / CHUNK);
    start = reinterpret_cast<int32_t*>(at);
    at += rounded(count * widest / 4);
    scores = at;
  }

  Rows rows_for(const Weights& w, const float* x, int64_t count) {
    Rows rows = {x, count > 1 ? w.in : 0, q, scales, start};
    if (w.scales)
      for (int64_t r = 0; r < count; r++)
        quantize_row(x + r * w.in, w.in, w.group, q + r * w.in, scales + r * (w.in / w.group),
                     start + r * (w.in / w.group) * 16);
    return rows;
  }
};

void linear_shared(const Weights& w, const Rows& rows, int64_t count, float* y, Then then) {
  int64_t from, to;
  share(w.out, 24, from, to);
  if (from < to) linear_part(w, rows, count, y, w.out, from, to, then);
}

// Normalises and rotates new queries and keys, and puts the keys and values into the cache.
void place_keys(const Model& m, const Layer& l, const Pass& p, Buffers& b) {
  const int64_t count = p.rows * p.nodes, d = m.width;
  int64_t from, to;
  share(count * (m.heads + m.key_heads), 1, from, to);
  for (int64_t job = from; job < to; job++) {
    int64_t t = job / (m.heads + m.key_heads), h = job % (m.heads + m.key_heads);
    const float *cos = p.cos + t * d, *sin = p.sin + t * d;
    if (h < m.heads) {
      float* q = b.q + (t * m.heads + h) * d;
      if (l.q_norm) rms_norm(q, l.q_norm, m.eps, d, q);
      rotate(q, cos, sin, d);
      continue;
    }
    h -= m.heads;
    float *k = b.k + (t * m.key_heads + h) * d, *v = b.v + (t * m.key_heads + h) * d;
    if (l.k_norm) rms_norm(k, l.k_norm, m.eps, d, k);
    rotate(k, cos, sin, d);
    int64_t row = t / p.nodes, node = t % p.nodes;
    int64_t slot = p.lengths[row] + node;
    int64_t at = (((p.first + row) * m.key_heads + h) * m.length + slot) * d;
    std::memcpy(l.keys + at, k, d * sizeof(float));
    std::memcpy(l.values + at, v, d * sizeof(float));
    if (node < p.real) continue;
    for (int64_t i = 0; i < d; i++) {  // see CacheWindow in kvcache.py
      if (!std::isfinite(k[i])) l.keys[at + i] = 0.0f;
      if (!std::isfinite(v[i])) l.values[at + i] = 0.0f;
    }
  }
}

// Some queries of one text that share a key head, over the keys they may see: the text so far, then
// each node's ancestors, in order of position. So a node of a tree sums in the same order as the same
// token of a chain, and a query in the same order whichever others go with it. Keys and values are
// taken in tiles that stay in the first-level cache while all queries use them.
struct Queries {
  const Model& m;
  const Layer& l;
  const Pass& p;
  int64_t row, head, first, count;  // queries count by node, then by head of the group
  const float* q;                   // [rows][nodes][heads][width]
  float* out;                       // the same
  float* scores;                    // [count][room]

  int64_t room() const { return rounded(m.length + 64); }
  int64_t node(int64_t u) const { return row * p.nodes + (first + u) / group(); }
  int64_t group() const { return m.heads / m.key_heads; }
  int64_t place(int64_t u) const {
    return (node(u) * m.heads + head * group() + (first + u) % group()) * m.width;
  }
};

// Where a node's ancestors lie, oldest first, itself at the end; returns how many its window holds.
int64_t ancestors(const Queries& a, int64_t t, int64_t* slots) {
  int64_t found = 0;
  for (uint64_t bits = a.p.ancestors[t]; bits; bits &= bits - 1) {
    int64_t other = __builtin_ctzll(bits);
    int64_t apart = a.p.depths[t] - a.p.depths[a.row * a.p.nodes + other];
    if (!a.l.window || apart < a.l.window) slots[found++] = a.p.lengths[a.row] + other;
  }
  return found;
}

void score(const float* query, const float* key, int64_t keys, int64_t d, float* scores) {
  int64_t j = 0;
  for (; j + 8 <= keys; j += 8, key += 8 * d) {
    f16 acc[8] = {};
    for (int64_t i = 0; i < d; i += 16) {
      f16 part = held(load(query + i));
#pragma GCC unroll 8
      for (int u = 0; u < 8; u++) acc[u] = fused(part, load(key + u * d + i), acc[u]);
    }
    sum8(acc, scores + j);
  }
  for (; j < keys; j++, key += d) {
    f16 acc = {};
    for (int64_t i = 0; i < d; i += 16) acc = fused(load(query + i), load(key + i), acc);
    scores[j] = sum(acc);
  }
}

// Scores to weights that add up to 1 once they are multiplied by what is returned.
float weigh(float* scores, int64_t count, float scaling) {
  const int64_t padded = rounded(count);
  for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;
  f16 best = all(-INFINITY), total = {};
  for (int64_t j = 0; j < padded; j += 16) {
    f16 s = load(scores + j) * scaling;
    store(scores + j, s);
    best = s > best ? s : best;
  }
  float most = biggest(best);
  for (int64_t j = 0; j < padded; j += 16) {
    f16 e = exp16(load(scores + j) - most);
    for (int64_t i = count - j; i < 16; i++) e[i] = 0;  // behind the last key
    store(scores + j, e);
    total += e;
  }
  return 1.0f / sum(total);
}

// Adds the weighted values of some keys to the results of G queries, C times 16 numbers of each.
template <int G, int C>
inline __attribute__((always_inline)) void mix(const float* const* weights, const float* value,
                                               int64_t keys, int64_t d, float* const* out) {
  f16 acc[G][C];
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[g][c] = load(out[g] + 16 * c);
  for (int64_t j = 0; j < keys; j++, value += d) {
    f16 part[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) part[c] = held(load(value + 16 * c));
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      f16 weight = held(all(weights[g][j]));
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[g][c] = fused(weight, part[c], acc[g][c]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out[g] + 16 * c, acc[g][c]);
}

template <int G>
void mix_all(const float* const* weights, const float* values, int64_t keys, int64_t d,
             float* const* out) {
  float* at[G];
  int64_t i = 0;
  for (; i + 64 <= d; i += 64) {
    for (int g = 0; g < G; g++) at[g] = out[g] + i;
    mix<G, 4>(weights, values + i, keys, d, at);
  }
  for (; i < d; i += 16) {
    for (int g = 0; g < G; g++) at[g] = out[g] + i;
    mix<G, 1>(weights, values + i, keys, d, at);
  }
}

void attend(const Queries& a) {
  const int64_t d = a.m.width, length = a.p.lengths[a.row], room = a.room();
  const int64_t base = ((a.p.first + a.row) * a.m.key_heads + a.head) * a.m.length * d;
  const float *keys = a.l.keys + base, *values = a.l.values + base;
  // With a window a query goes alone: the others begin elsewhere.
  const int64_t position = length + a.p.depths[a.node(0)];
  const int64_t begin = a.l.window && position >= a.l.window ? position - a.l.window + 1 : 0;
  const int64_t past = length > begin ? length - begin : 0, tile = 4096 / d;
  int64_t slots[64];
  float inverse[MOST_QUERIES];
  for (int64_t j = 0; j < past; j += tile)
    for (int64_t u = 0; u < a.count; u++)
      score(a.q + a.place(u), keys + (begin + j) * d, past - j < tile ? past - j : tile, d,
            a.scores + u * room + j);
  for (int64_t u = 0; u < a.count; u++) {
    float* mine = a.scores + u * room;
    const int64_t extra = ancestors(a, a.node(u), slots);
    for (int64_t j = 0; j < extra; j++)
      score(a.q + a.place(u), keys + slots[j] * d, 1, d, mine + past + j);
    inverse[u] = weigh(mine, past + extra, a.l.scaling);
    std::memset(a.out + a.place(u), 0, d * sizeof(float));
  }
  for (int64_t j = 0; j < past; j += tile) {
    const int64_t some = past - j < tile ? past - j : tile;
    for (int64_t u = 0; u < a.count; u += 4) {
      const float* weights[4];
      float* out[4];
      const int64_t together = a.count - u < 4 ? a.count - u : 4;
      for (int64_t g = 0; g < together; g++) {
        weights[g] = a.scores + (u + g) * room + j;
        out[g] = a.out + a.place(u + g);
      }
      const float* from = values + (begin + j) * d;
      if (together == 4) mix_all<4>(weights, from, some, d, out);
      else if (together == 3) mix_all<3>(weights, from, some, d, out);
      else if (together == 2) mix_all<2>(weights, from, some, d, out);
      else mix_all<1>(weights, from, some, d, out);
    }
  }
  for (int64_t u = 0; u < a.count; u++) {
    float* out = a.out + a.place(u);
    const int64_t extra = ancestors(a, a.node(u), slots);
    for (int64_t j = 0; j < extra; j++) {
      const float* weight = a.scores + u * room + past + j;
      mix_all<1>(&weight, values + slots[j] * d, 1, d, &out);
    }
    for (int64_t i = 0; i < d; i += 16) store(out + i, load(out + i) * inverse[u]);
  }
}

// This thread's share of all queries, in pieces that leave nobody idle.
void attend_shared(const Model& m, const Layer& l, const Pass& p, Buffers& b, Private& mine) {
  const int64_t all_queries = p.nodes * (m.heads / m.key_heads), lists = p.rows * m.key_heads;
  int64_t pieces = (2 * omp_get_num_threads() + lists - 1) / lists;
  if (pieces * MOST_QUERIES < all_queries) pieces = (all_queries + MOST_QUERIES - 1) / MOST_QUERIES;
  if (pieces > all_queries || l.window) pieces = all_queries;
  const int64_t each = (all_queries + pieces - 1) / pieces;
  int64_t from, to;
  share(lists * pieces, 1, from, to);
  for (int64_t job = from; job < to; job++) {
    int64_t first = job % pieces * each, list = job / pieces;
    int64_t count = all_queries - first < each ? all_queries - first : each;
    if (count > 0)
      attend({m, l, p, list / m.key_heads, list % m.key_heads, first, count, b.q, b.mixed,
              mine.scores});
  }
}

void run_layer(const Model& m, const Layer& l, const Pass& p, Buffers& b, Private& mine) {
  const int64_t count = p.rows * p.nodes;
  int64_t from, to;
  for (int64_t r = 0; r < count; r++)
    rms_norm(p.x + r * m.hidden, l.input_norm, m.eps, m.hidden, mine.norm + r * m.hidden);
  Rows rows = mine.rows_for(l.q, mine.norm, count);
  linear_shared(l.q, rows, count, b.q, Then::Store);
  linear_shared(l.k, rows, count, b.k, Then::Store);
  linear_shared(l.v, rows, count, b.v, Then::Store);
  b.barrier->wait();
  place_keys(m, l, p, b);
  b.barrier->wait();
  attend_shared(m, l, p, b, mine);
  b.barrier->wait();
  linear_shared(l.o, mine.rows_for(l.o, b.mixed, count), count, p.x, Then::AddTo);
  b.barrier->wait();
  for (int64_t r = 0; r < count; r++)
    rms_norm(p.x + r * m.hidden, l.after_norm, m.eps, m.hidden, mine.norm + r * m.hidden);
  rows = mine.rows_for(l.gate, mine.norm, count);
  share(m.inner, 48, from, to);
  if (from < to) {
    // Gate and up for the same outputs, so that their product needs no barrier.
    float* other = b.other;
    linear_part(l.gate, rows, count, b.inner, m.inner, from, to, Then::Store);
    linear_part(l.up, rows, count, other, m.inner, from, to, Then::Store);
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = from; i < to; i += 16) {
        float *g = b.inner + r * m.inner + i, *u = other + r * m.inner + i;
        store(g, activate(load(g), m.activation) * load(u));
      }
  }
  b.barrier->wait();
  linear_shared(l.down, mine.rows_for(l.down, b.inner, count), count, p.x, Then::AddTo);
  b.barrier->wait();
}

}  // namespace

extern "C" {

int64_t draftahead_scratch(const Model* m, int64_t count, int64_t threads) {
  int64_t shared = rounded(count * m->heads * m->width) * 2 +
                   rounded(count * m->key_heads * m->width) * 2 + rounded(count * m->inner) * 2;
  return shared + threads * private_size(*m, count) + 64;
}

void draftahead_pass(const Model* m, const Pass* p, int64_t threads) {
  const int64_t count = p->rows * p->nodes;
  float* at = p->scratch;
  auto take = [&](int64_t n) { float* here = at; at += rounded(n); return here; };
  Buffers b;
  b.q = take(count * m->heads * m->width);
  b.mixed = take(count * m->heads * m->width);
  b.k = take(count * m->key_heads * m->width);
  b.v = take(count * m->key_heads * m->width);
  b.inner = take(count * m->inner);
  b.other = take(count * m->inner);
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    b.barrier = new Barrier(omp_get_num_threads());  // which may be fewer than asked for
    Private mine(*m, count, at + omp_get_thread_num() * private_size(*m, count));
    for (int64_t i = 0; i < m->layer_count; i++) run_layer(*m, m->layers[i], *p, b, mine);
    if (p->logits) {
      for (int64_t r = 0; r < count; r++)
        rms_norm(p->x + r * m->hidden, m->final_norm, m->eps, m->hidden, mine.norm + r * m->hidden);
      Rows rows = mine.rows_for(m->head, mine.norm, count);
      linear_shared(m->head, rows, count, p->logits, Then::Store);
    }
  }
  delete b.barrier;
}

// One linear layer, for models whose shape the pass above does not know.
void draftahead_linear(const Weights* w, const float* x, int64_t count, float* y, int64_t threads,
                       int8_t* q, float* scales, int32_t* start) {
  Rows rows = {x, count > 1 ? w->in : 0, q, scales, start};
#pragma omp parallel num_threads(threads)
  {
    if (w->scales) {
#pragma omp for
      for (int64_t r = 0; r < count; r++)
        quantize_row(x + r * w->in, w->in, w->group, q + r * w->in, scales + r * (w->in / w->group),
                     start + r * (w->in / w->group) * 16);
    }
    linear_shared(*w, rows, count, y, Then::Store);
  }
}

// Reads memory and does nothing else: the limit that every pass is measured against.
float draftahead_read(const float* data, int64_t count, int64_t threads) {
  float found = 0;
#pragma omp parallel num_threads(threads) reduction(+ : found)
  {
    int64_t from, to;
    share(count, 128, from, to);
    f16 acc[8] = {};
    for (int64_t i = from; i + 128 <= to; i += 128)
#pragma GCC unroll 8
      for (int c = 0; c < 8; c++) acc[c] += load(data + i + 16 * c);
    for (int c = 0; c < 8; c++) found += sum(acc[c]);
  }
  return found;
}

}  // extern "C"
