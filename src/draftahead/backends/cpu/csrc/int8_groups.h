// Linear layers whose weights are our own int8 in groups, in panels of PANEL outputs.

#pragma once

#include "blocks.h"
#include "dot.h"

namespace {

// The inputs of a token, as they lie in memory: the integers, then for each group a scale, and
// -128 * sum of the integers: weights carry +128.
inline int64_t int8_input_bytes(const Weights& w) {
  return (w.in_features + 8 * (w.in_features / w.group_size) + 63) / 64 * 64;
}

// Inputs of several tokens.
struct Int8Inputs {
  const uint8_t* tokens;
  int64_t stride, in, groups;  // stride: bytes from one token to the next

  Int8Inputs(const Weights& w, const uint8_t* integers)
      : tokens(integers),
        stride(int8_input_bytes(w)),
        in(w.in_features),
        groups(in / w.group_size) {}
  const int8_t* integers(int64_t t) const {
    return reinterpret_cast<const int8_t*>(tokens + t * stride);
  }
  const float* scales(int64_t t) const {
    return reinterpret_cast<const float*>(tokens + t * stride + in);
  }
  const int32_t* corrections(int64_t t) const {
    return reinterpret_cast<const int32_t*>(tokens + t * stride + in) + groups;
  }
};

inline void quantize_groups(const Weights& w, const float* x, uint8_t* token) {
  const int64_t in = w.in_features, group_size = w.group_size;
  int8_t* quantized = reinterpret_cast<int8_t*>(token);
  float* scales = reinterpret_cast<float*>(token + in);
  int32_t* corrections = reinterpret_cast<int32_t*>(scales) + in / group_size;
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

// Four inputs of a token, and what adds their products with 4 weights of each lane to its total.
#ifdef __AVX512VNNI__
typedef i32x16 FourInputs;  // in all lanes, in a register: N panels use them
inline __attribute__((always_inline)) FourInputs four_inputs(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, sizeof bytes);
  return (i32x16)in_register((f32x16)(i32x16{} + bytes));
}
inline __attribute__((always_inline)) i32x16 add_products(i32x16 total, const uint8_t* weights,
                                                          FourInputs x) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)total, _mm512_loadu_si512(weights), (__m512i)x);
}
#else
typedef const int8_t* FourInputs;
inline FourInputs four_inputs(const int8_t* x) { return x; }
inline __attribute__((always_inline)) i32x16 add_products(i32x16 total, const uint8_t* weights,
                                                          FourInputs x) {
  return dot4<true>(total, load_bytes(weights), x);
}
#endif

// One panel of outputs of T tokens. Sums within a group are integers: exact in any order.
template <int T>
void int8_panel(const Weights& w, const Int8Inputs& a, float* y, int64_t stride, int64_t n0,
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
      for (int i = 0; i < N; i++) total[i][t] = i32x16{} + a.corrections(t)[g];
    for (int64_t k = g * w.group_size; k < (g + 1) * w.group_size; k += 4, data += 4 * PANEL) {
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        __builtin_prefetch(data + 64 * i + 4096, 0, 2);
        __builtin_prefetch(data + 64 * i + 8192, 0, 2);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const FourInputs four = four_inputs(a.integers(t) + k);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) total[i][t] = add_products(total[i][t], data + 64 * i, four);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      f32x16 scale = load(scales + g * PANEL + 16 * i);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
        acc[i][t] = multiply_add(__builtin_convertvector(total[i][t], f32x16),
                                 scale * a.scales(t)[g], acc[i][t]);
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

typedef void (*Int8Panel)(const Weights&, const Int8Inputs&, float*, int64_t, int64_t, Output);
// Tokens of one pass over a panel: their sums fit the registers.
#if defined(__AVX512F__)
constexpr int64_t MAX_INT8_TOKENS = 8;
constexpr Int8Panel INT8_PANEL[MAX_INT8_TOKENS + 1] = {
    nullptr,       int8_panel<1>, int8_panel<2>, int8_panel<3>, int8_panel<4>,
    int8_panel<5>, int8_panel<6>, int8_panel<7>, int8_panel<8>,
};
#else
constexpr int64_t MAX_INT8_TOKENS = 2;
constexpr Int8Panel INT8_PANEL[MAX_INT8_TOKENS + 1] = {nullptr, int8_panel<1>, int8_panel<2>};
#endif

// Outputs [begin, end) of any number of tokens; begin is a multiple of PANEL. More tokens are taken
// MAX_INT8_TOKENS at a time: the panel is then still in the cache.
inline void int8_outputs(const Weights& w, const uint8_t* integers, int64_t num_tokens, float* y,
                         int64_t stride, int64_t begin, int64_t end, Output output) {
  const int64_t per_token = int8_input_bytes(w);
  for (int64_t n = begin; n < end; n += PANEL)
    for (int64_t t = 0; t < num_tokens; t += MAX_INT8_TOKENS) {
      const int64_t count = num_tokens - t < MAX_INT8_TOKENS ? num_tokens - t : MAX_INT8_TOKENS;
      INT8_PANEL[count](w, {w, integers + t * per_token}, y + t * stride, stride, n, output);
    }
}

}  // namespace
