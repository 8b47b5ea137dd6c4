// Linear layers for a few tokens: each weight is loaded once and used for all of them.
//
// y[token][output] = bias[output] + sum over inputs of weight[output][input] * x[token][input]. The
// sum runs in an order that does not depend on the number of tokens or on a token's place among
// them.
//
//   linear_outputs
//     float32: float32_outputs -> deep_group (long inputs) or output_block -> dot -> finish
//     int8:    int8_outputs -> int8_panel

#pragma once

#include "abi.h"
#include "vectors.h"

namespace {

// Inputs of a linear layer. For int8 weights they are quantized too, with a scale for each group of
// each token.
struct Activations {
  const float* x;        // [num_tokens][in]
  int64_t stride;        // floats from one token to the next; 0 for a single token
  int8_t* quantized;     // [num_tokens][in]
  float* scales;         // [num_tokens][in / group_size]
  int32_t* corrections;  // [num_tokens][in / group_size] -128 * sum(quantized): weights carry +128
};

enum class Output { STORE, ADD };  // write the result, or add it to what is there

void quantize_token(const float* x, int64_t in, int64_t group_size, int8_t* quantized,
                    float* scales, int32_t* corrections) {
  for (int64_t g = 0; g < in / group_size; g++, x += group_size, quantized += group_size) {
    f32x16 magnitude = {}, not_finite = {};
    for (int64_t i = 0; i < group_size; i += 16) {
      f32x16 v = load(x + i), size = v < 0.0f ? -v : v;
      magnitude = size > magnitude ? size : magnitude;
      not_finite += v * 0.0f;
    }
    float largest = max_lane(magnitude), inverse = largest > 0 ? 127.0f / largest : 0.0f;
    // NaN and infinity have no int8 value: through the scale they make every result NaN.
    scales[g] = largest / 127.0f + sum_lanes(not_finite);
    i32x16 total = {};
    for (int64_t i = 0; i < group_size; i += 16) {
      f32x16 rounded = load(x + i) * inverse + ROUND_TO_INTEGER - ROUND_TO_INTEGER;
      // 0 for what is not finite: C++ does not define its conversion.
      rounded = (rounded < 0.0f ? -rounded : rounded) <= 127.0f ? rounded : f32x16{};
      i32x16 value = __builtin_convertvector(rounded, i32x16);
      *reinterpret_cast<i8x16_unaligned*>(quantized + i) =
          __builtin_convertvector(value, i8x16_unaligned);
      total += value;
    }
    corrections[g] = 0;
    for (int lane = 0; lane < 16; lane++) corrections[g] -= 128 * total[lane];
  }
}

// --------------------------------------------------------------------------------------- float32

// Times that a cache line is prefetched: three, two and one block of outputs ahead. Prefetches are
// dropped when many are in flight. On an AMD Zen 4 the linear layers of a 4-token forward took
// 15.8 ms with one prefetch per line and take 12.5 ms with three. Prefetches go to the second-level
// cache: the first is too small for them.
constexpr int PREFETCHES = 3;

// Adds inputs [k0, k1) to the sums of T tokens for outputs [n0, n0 + N). `prefetch`: weights of the
// block after next; those of the blocks before and after it lie N rows apart.
template <int T, int N>
inline __attribute__((always_inline)) void dot(const Weights& w, const Activations& a, int64_t n0,
                                               int64_t k0, int64_t k1, const float* prefetch,
                                               f32x16 (&sums)[N][T]) {
  const float* data = static_cast<const float*>(w.data);
  const int64_t in = w.in_features;
  f32x16 acc[N][T];  // a copy whose address is not taken: it stays in registers
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) acc[i][t] = sums[i][t];
  int64_t k = k0;
  for (; k + 16 <= k1; k += 16) {
    f32x16 weight[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      weight[i] = in_register(load(data + (n0 + i) * in + k));
      __builtin_prefetch(prefetch + i * in + (k - k0), 0, 2);
      __builtin_prefetch(prefetch - N * in + i * in + (k - k0), 0, 2);
      __builtin_prefetch(prefetch + N * in + i * in + (k - k0), 0, 2);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      f32x16 x = in_register(load(a.x + t * a.stride + k));
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) acc[i][t] = multiply_add(weight[i], x, acc[i][t]);
    }
  }
  if (k < k1) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      f32x16 weight = load_partial(data + (n0 + i) * in + k, k1 - k);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
        acc[i][t] = multiply_add(weight, load_partial(a.x + t * a.stride + k, k1 - k), acc[i][t]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) sums[i][t] = acc[i][t];
}

// Adds up the lanes, adds the bias, and writes y[token][n0 + i].
template <int T, int N>
inline __attribute__((always_inline)) void finish(const Weights& w, const f32x16 (&acc)[N][T],
                                                  float* y, int64_t stride, int64_t n0,
                                                  Output output) {
  constexpr int COUNT = N * T;
  float sums[COUNT];
  const f32x16* flat = &acc[0][0];
#pragma GCC unroll 8
  for (int j = 0; j + 8 <= COUNT; j += 8) sum_lanes8(flat + j, sums + j);
#pragma GCC unroll 8
  for (int j = COUNT / 8 * 8; j < COUNT; j++) sums[j] = sum_lanes(flat[j]);
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      float value = sums[i * T + t] + (w.bias ? w.bias[n0 + i] : 0.0f);
      float* out = y + t * stride + n0 + i;
      *out = output == Output::ADD ? *out + value : value;
    }
}

// N outputs of T tokens.
template <int T, int N>
inline __attribute__((always_inline)) void output_block(const Weights& w, const Activations& a,
                                                        float* y, int64_t stride, int64_t n0,
                                                        Output output) {
  f32x16 acc[N][T];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) acc[i][t] = f32x16{};
  const float* prefetch = static_cast<const float*>(w.data) + (n0 + 2 * N) * w.in_features;
  dot<T, N>(w, a, n0, 0, w.in_features, prefetch, acc);
  finish<T, N>(w, acc, y, stride, n0, output);
}

// Bytes of activations that stay in a 32 KiB first-level cache beside the weights. If T tokens need
// more, their inputs are taken DEEP_INPUTS at a time: larger parts fall out of the cache, smaller
// ones load and store the sums more often (256 inputs were a third slower).
constexpr int64_t FIRST_LEVEL_BYTES = 26 * 1024;
constexpr int64_t DEEP_INPUTS = 512;
// Blocks of outputs that use a part of the inputs before the next part is read.
constexpr int DEEP_BLOCKS = 8;

// DEEP_BLOCKS blocks of outputs, the inputs in parts: the same sums in the same order as by
// output_block. Partial sums wait in memory, lane by lane.
template <int T, int N>
void deep_group(const Weights& w, const Activations& a, float* y, int64_t stride, int64_t n0,
                Output output) {
  f32x16 partial[DEEP_BLOCKS][N][T];
  const float* data = static_cast<const float*>(w.data);
  for (int64_t k0 = 0; k0 < w.in_features; k0 += DEEP_INPUTS) {
    const bool last = k0 + DEEP_INPUTS >= w.in_features;
    for (int b = 0; b < DEEP_BLOCKS; b++) {
      f32x16 acc[N][T];
#pragma GCC unroll 8
      for (int i = 0; i < N; i++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) acc[i][t] = k0 ? partial[b][i][t] : f32x16{};
      const int64_t n = n0 + b * N;
      // The blocks to prefetch are in this part, in the next part, or in the next group's first.
      const bool wraps = b + PREFETCHES >= DEEP_BLOCKS;
      const int64_t block = !wraps ? b + 2
                            : last ? b + PREFETCHES + 1
                                   : b + PREFETCHES + 1 - DEEP_BLOCKS;
      const int64_t part = !wraps ? k0 : last ? 0 : k0 + DEEP_INPUTS;
      const float* prefetch = data + (n0 + block * N) * w.in_features + part;
      dot<T, N>(w, a, n, k0, last ? w.in_features : k0 + DEEP_INPUTS, prefetch, acc);
      if (last) {
        finish<T, N>(w, acc, y, stride, n, output);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++)
#pragma GCC unroll 8
          for (int t = 0; t < T; t++) partial[b][i][t] = acc[i][t];
      }
    }
  }
}

// Outputs [begin, end) of T tokens, N at a time.
template <int T, int N>
void float32_outputs(const Weights& w, const Activations& a, float* y, int64_t stride,
                     int64_t begin, int64_t end, Output output) {
  int64_t n = begin;
  if (T * w.in_features * int64_t(sizeof(float)) > FIRST_LEVEL_BYTES)
    for (; n + DEEP_BLOCKS * N <= end; n += DEEP_BLOCKS * N)
      deep_group<T, N>(w, a, y, stride, n, output);
  for (; n + N <= end; n += N) output_block<T, N>(w, a, y, stride, n, output);
  for (; n < end; n++) output_block<T, 1>(w, a, y, stride, n, output);
}

// ------------------------------------------------------------------------------------------ int8

// Adds to each of 16 totals the products of 4 weights (uint8) and 4 activations (int8, the same
// four bytes in all lanes).
inline __attribute__((always_inline)) i32x16 dot4(i32x16 total, const uint8_t* weights,
                                                  i32x16 activations) {
#ifdef __AVX512VNNI__
  return (i32x16)_mm512_dpbusd_epi32((__m512i)total, _mm512_loadu_si512(weights),
                                     (__m512i)activations);
#else
  for (int lane = 0; lane < 16; lane++)
    for (int j = 0; j < 4; j++)
      total[lane] += int32_t(weights[4 * lane + j]) * int8_t(uint32_t(activations[0]) >> 8 * j);
  return total;
#endif
}

// One panel of outputs of T tokens. Sums within a group are integers: exact in any order.
template <int T>
inline __attribute__((always_inline)) void int8_panel(const Weights& w, const Activations& a,
                                                      float* y, int64_t stride, int64_t n0,
                                                      Output output) {
  constexpr int N = PANEL / 16;
  const int64_t in = w.in_features, groups = in / w.group_size;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + n0 * in;
  const float* scales = w.scales + n0 * groups;
  // Another core may own the cache lines of y: ask for them early.
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) __builtin_prefetch(y + t * stride + n0 + 16 * i, 1, 3);
  f32x16 acc[N][T];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) acc[i][t] = f32x16{};
  for (int64_t g = 0; g < groups; g++) {
    i32x16 total[N][T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) total[i][t] = i32x16{} + a.corrections[t * groups + g];
    for (int64_t k = g * w.group_size; k < (g + 1) * w.group_size; k += 4, data += 4 * PANEL) {
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        __builtin_prefetch(data + 64 * i + 4096, 0, 2);
        __builtin_prefetch(data + 64 * i + 8192, 0, 2);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        int32_t bytes;
        std::memcpy(&bytes, a.quantized + t * in + k, sizeof bytes);
        i32x16 four = (i32x16)in_register((f32x16)(i32x16{} + bytes));
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) total[i][t] = dot4(total[i][t], data + 64 * i, four);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      f32x16 scale = load(scales + g * PANEL + 16 * i);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
        acc[i][t] = multiply_add(__builtin_convertvector(total[i][t], f32x16),
                                 scale * a.scales[t * groups + g], acc[i][t]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const int64_t n = n0 + 16 * i, left = w.out_features - n;
    if (left <= 0) break;
    const int64_t count = left < 16 ? left : 16;
    f32x16 bias = w.bias ? load_partial(w.bias + n, count) : f32x16{};
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      float* out = y + t * stride + n;
      f32x16 value = acc[i][t] + bias;
      if (output == Output::ADD) value += load_partial(out, count);
      std::memcpy(out, &value, count * sizeof(float));
    }
  }
}

template <int T>
void int8_outputs(const Weights& w, const Activations& a, float* y, int64_t stride, int64_t begin,
                  int64_t end, Output output) {
  for (int64_t n = begin; n < end; n += PANEL) int8_panel<T>(w, a, y, stride, n, output);
}

// ---------------------------------------------------------------------------------- both of them

constexpr int64_t MAX_TOKENS = 8;  // of one pass over the weights: their sums fit the registers

typedef void (*Outputs)(const Weights&, const Activations&, float*, int64_t, int64_t, int64_t,
                        Output);
// By the number of tokens. N is the most outputs whose sums for T tokens fit 32 registers.
constexpr Outputs FLOAT32_OUTPUTS[MAX_TOKENS + 1] = {
    nullptr,
    float32_outputs<1, 4>,
    float32_outputs<2, 4>,
    float32_outputs<3, 4>,
    float32_outputs<4, 4>,
    float32_outputs<5, 4>,
    float32_outputs<6, 4>,
    float32_outputs<7, 3>,
    float32_outputs<8, 2>,
};
constexpr Outputs INT8_OUTPUTS[MAX_TOKENS + 1] = {
    nullptr,         int8_outputs<1>, int8_outputs<2>, int8_outputs<3>, int8_outputs<4>,
    int8_outputs<5>, int8_outputs<6>, int8_outputs<7>, int8_outputs<8>,
};

// Outputs [begin, end) of a linear layer; begin is a multiple of PANEL for int8. More than
// MAX_TOKENS tokens are taken MAX_TOKENS at a time: the weights of PANEL outputs are then still in
// the cache.
void linear_outputs(const Weights& w, const Activations& a, int64_t num_tokens, float* y,
                    int64_t stride, int64_t begin, int64_t end, Output output) {
  const int64_t groups = w.group_size ? w.in_features / w.group_size : 0;
  const Outputs* outputs = w.scales ? INT8_OUTPUTS : FLOAT32_OUTPUTS;
  if (num_tokens == 0) return;
  if (num_tokens <= MAX_TOKENS) return outputs[num_tokens](w, a, y, stride, begin, end, output);
  for (int64_t n = begin; n < end; n += PANEL)
    for (int64_t t = 0; t < num_tokens; t += MAX_TOKENS) {
      int64_t count = num_tokens - t < MAX_TOKENS ? num_tokens - t : MAX_TOKENS;
      Activations some = {a.x + t * w.in_features, count > 1 ? w.in_features : 0,
                          a.quantized + t * w.in_features, a.scales + t * groups,
                          a.corrections + t * groups};
      outputs[count](w, some, y + t * stride, stride, n, n + PANEL < end ? n + PANEL : end, output);
    }
}

}  // namespace
