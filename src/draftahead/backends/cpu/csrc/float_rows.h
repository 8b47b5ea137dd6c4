// Linear layers with float32 inputs, over rows of every kind but INT8.
//
// Each weight is loaded and widened once for up to MAX_TOKENS tokens; more tokens share rows that
// are widened into memory. A sum adds the products of every 16th input in one lane, in ascending
// order, then the lanes: of F32 weights, and of the same weights stored otherwise, the bits are the
// same.

#pragma once

#include "blocks.h"

namespace {

// Tokens of one pass over the weights: their sums fit the registers.
constexpr int64_t MAX_TOKENS = REGISTERS < 32 ? 4 : 8;

// Inputs of a linear layer.
struct FloatInputs {
  const float* x;  // [num_tokens][in]
  int64_t stride;  // floats from one token to the next; 0 for a single token
};

// Times that a cache line is prefetched: three, two and one block of outputs ahead. Prefetches are
// dropped when many are in flight. On an AMD Zen 4 the linear layers of a 4-token forward took
// 15.8 ms with one prefetch per line and take 12.5 ms with three. Prefetches go to the second-level
// cache: the first is too small for them.
constexpr int PREFETCHES = 3;

// Adds inputs [k0, k1) to the sums of T tokens for outputs [n0, n0 + N). Weights of input `next_k`
// and outputs from `next_n` on are those of the block after next, which are prefetched.
template <int T, int N>
inline __attribute__((always_inline)) void dot_f32(const Weights& w, const FloatInputs& a,
                                                   int64_t n0, int64_t k0, int64_t k1,
                                                   int64_t next_n, int64_t next_k,
                                                   f32x16 (&sums)[N][T]) {
  const float* prefetch = static_cast<const float*>(w.data) + next_n * w.in_features + next_k;
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

// The same for stored weights.
template <int64_t KIND, int T, int N>
inline __attribute__((always_inline)) void dot(const Weights& w, const FloatInputs& a, int64_t n0,
                                               int64_t k0, int64_t k1, int64_t next_n,
                                               int64_t next_k, f32x16 (&sums)[N][T]) {
  if constexpr (KIND == F32) {
    dot_f32<T, N>(w, a, n0, k0, k1, next_n, next_k, sums);
  } else {
    using Block = RowBlock<KIND>;
    constexpr BlockSize size = block_size(KIND);
    constexpr int64_t bytes = Block::WEIGHTS / size.weights * size.bytes;
    const int64_t stride = row_bytes(w);
    const uint8_t* data = static_cast<const uint8_t*>(w.data);
    const uint8_t* rows = data + n0 * stride + k0 / size.weights * size.bytes;
    const uint8_t* prefetch = data + next_n * stride + next_k / size.weights * size.bytes;
    f32x16 acc[N][T];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) acc[i][t] = sums[i][t];
    // Adds 16 inputs from k on, of which `count` are there.
    auto add = [&](int64_t k, int64_t count, const f32x16* weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const float* inputs = a.x + t * a.stride + k;
        const f32x16 x = in_register(count < 16 ? load_partial(inputs, count) : load(inputs));
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) acc[i][t] = multiply_add(weights[i], x, acc[i][t]);
      }
    };
    int64_t k = k0;
    for (; k + Block::WEIGHTS <= k1; k += Block::WEIGHTS, rows += bytes, prefetch += bytes) {
      const auto blocks = make_blocks<KIND, N>(rows, stride, std::make_index_sequence<N>());
#pragma GCC unroll 8
      for (int i = 0; i < N; i++)
#pragma GCC unroll 4
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(prefetch + i * stride + b, 0, 2);
      for (int p = 0; p < int(Block::WEIGHTS / 16); p += Block::PIECES)
#pragma GCC unroll 8
        for (int j = 0; j < Block::PIECES; j++) {
          f32x16 weights[N];
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) weights[i] = in_register(blocks[i].weights(p, j));
          add(k + 16 * (p + j), 16, weights);
        }
    }
    if (size.weights == 1 && k < k1) {
      f32x16 weights[N];
      for (int i = 0; i < N; i++) {
        uint8_t padded[256] = {};
        std::memcpy(padded, rows + i * stride, (k1 - k) * 2);
        weights[i] = RowBlock<KIND>(padded).weights(0, 0);
      }
      add(k, k1 - k, weights);
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) sums[i][t] = acc[i][t];
  }
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
template <int64_t KIND, int T, int N>
inline __attribute__((always_inline)) void output_block(const Weights& w, const FloatInputs& a,
                                                        float* y, int64_t stride, int64_t n0,
                                                        Output output) {
  f32x16 acc[N][T];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) acc[i][t] = f32x16{};
  dot<KIND, T, N>(w, a, n0, 0, w.in_features, n0 + 2 * N, 0, acc);
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
template <int64_t KIND, int T, int N>
void deep_group(const Weights& w, const FloatInputs& a, float* y, int64_t stride, int64_t n0,
                Output output) {
  f32x16 partial[DEEP_BLOCKS][N][T];
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
      dot<KIND, T, N>(w, a, n, k0, last ? w.in_features : k0 + DEEP_INPUTS, n0 + block * N, part,
                      acc);
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
template <int64_t KIND, int T, int N>
void row_outputs(const Weights& w, const FloatInputs& a, float* y, int64_t stride, int64_t begin,
                 int64_t end, Output output) {
  int64_t n = begin;
  if (T * w.in_features * int64_t(sizeof(float)) > FIRST_LEVEL_BYTES)
    for (; n + DEEP_BLOCKS * N <= end; n += DEEP_BLOCKS * N)
      deep_group<KIND, T, N>(w, a, y, stride, n, output);
  for (; n + N <= end; n += N) output_block<KIND, T, N>(w, a, y, stride, n, output);
  for (; n < end; n++) output_block<KIND, T, 1>(w, a, y, stride, n, output);
}

typedef void (*RowOutputs)(const Weights&, const FloatInputs&, float*, int64_t, int64_t, int64_t,
                           Output);

// Tokens of one pass over rows of a kind.
template <int64_t KIND>
constexpr int64_t MAX_ROW_TOKENS = KIND < Q4_0 ? MAX_TOKENS : 4;

// The most outputs, up to 4, whose sums for T tokens fit the registers beside what they are made
// of.
constexpr int outputs_of(int T) {
  const int fitting = REGISTERS < 32 ? 5 / T : T < 7 ? 4 : T == 7 ? 3 : 2;
  return fitting > 4 ? 4 : fitting < 1 ? 1 : fitting;
}

// By the number of tokens.
template <int64_t KIND>
RowOutputs row_outputs_of(int64_t num_tokens) {
  constexpr int MORE = MAX_ROW_TOKENS<KIND> > 4;
  switch (num_tokens) {
    case 1:
      return row_outputs<KIND, 1, outputs_of(1)>;
    case 2:
      return row_outputs<KIND, 2, outputs_of(2)>;
    case 3:
      return row_outputs<KIND, 3, outputs_of(3)>;
    case 4:
      return row_outputs<KIND, 4, outputs_of(4)>;
    case 5:
      return row_outputs < KIND, MORE ? 5 : 1, outputs_of(MORE ? 5 : 1) > ;
    case 6:
      return row_outputs < KIND, MORE ? 6 : 1, outputs_of(MORE ? 6 : 1) > ;
    case 7:
      return row_outputs < KIND, MORE ? 7 : 1, outputs_of(MORE ? 7 : 1) > ;
    default:
      return row_outputs < KIND, MORE ? 8 : 1, outputs_of(MORE ? 8 : 1) > ;
  }
}

// Outputs that all passes over many tokens use before the next ones: their rows stay in the
// second-level cache. To unpack them in each pass takes less time than to load them from there as
// float32.
constexpr int64_t ROWS_AT_ONCE = 48;
// Writes row n as float32: [in_features].
template <int64_t KIND>
void float_row(const Weights& w, int64_t n, float* out) {
  using Block = RowBlock<KIND>;
  constexpr BlockSize size = block_size(KIND);
  const uint8_t* row = static_cast<const uint8_t*>(w.data) + n * row_bytes(w);
  if constexpr (KIND == F32) {
    std::memcpy(out, row, row_bytes(w));
  } else {
    for (int64_t k = 0; k < w.in_features; k += Block::WEIGHTS) {
      if (size.weights == 1 && w.in_features - k < Block::WEIGHTS) {
        uint8_t padded[256] = {};
        std::memcpy(padded, row, (w.in_features - k) * 2);
        const f32x16 last = RowBlock<KIND>(padded).weights(0, 0);
        std::memcpy(out + k, &last, (w.in_features - k) * sizeof(float));
        return;
      }
      const Block block(row);
      for (int p = 0; p < int(Block::WEIGHTS / 16); p += Block::PIECES)
#pragma GCC unroll 8
        for (int j = 0; j < Block::PIECES; j++) store(out + k + 16 * (p + j), block.weights(p, j));
      row += Block::WEIGHTS / size.weights * size.bytes;
    }
  }
}

typedef void (*FloatRow)(const Weights&, int64_t, float*);
inline FloatRow float_row_of(int64_t kind) {
  switch (kind) {
    case F16:
      return float_row<F16>;
    case BF16:
      return float_row<BF16>;
    case Q4_0:
      return float_row<Q4_0>;
    case Q4_1:
      return float_row<Q4_1>;
    case Q5_0:
      return float_row<Q5_0>;
    case Q5_1:
      return float_row<Q5_1>;
    case Q8_0:
      return float_row<Q8_0>;
    case Q4_K:
      return float_row<Q4_K>;
    case Q5_K:
      return float_row<Q5_K>;
    case Q6_K:
      return float_row<Q6_K>;
    default:
      return float_row<F32>;
  }
}

// Outputs [begin, end) of any number of tokens.
template <int64_t KIND>
void float_outputs(const Weights& w, const float* x, int64_t num_tokens, float* y, int64_t stride,
                   int64_t begin, int64_t end, Output output) {
  const int64_t in = w.in_features, most = MAX_ROW_TOKENS<KIND>;
  const int64_t rows = num_tokens > most ? ROWS_AT_ONCE : end - begin;
  for (int64_t n = begin; n < end; n += rows)
    for (int64_t t = 0; t < num_tokens; t += most) {
      const int64_t count = num_tokens - t < most ? num_tokens - t : most;
      row_outputs_of<KIND>(count)(w, {x + t * in, count > 1 ? in : 0}, y + t * stride, stride, n,
                                  n + rows < end ? n + rows : end, output);
    }
}

typedef void (*FloatOutputs)(const Weights&, const float*, int64_t, float*, int64_t, int64_t,
                             int64_t, Output);
inline FloatOutputs float_outputs_of(int64_t kind) {
  switch (kind) {
    case F16:
      return float_outputs<F16>;
    case BF16:
      return float_outputs<BF16>;
    case Q4_0:
      return float_outputs<Q4_0>;
    case Q4_1:
      return float_outputs<Q4_1>;
    case Q5_0:
      return float_outputs<Q5_0>;
    case Q5_1:
      return float_outputs<Q5_1>;
    case Q8_0:
      return float_outputs<Q8_0>;
    case Q4_K:
      return float_outputs<Q4_K>;
    case Q5_K:
      return float_outputs<Q5_K>;
    case Q6_K:
      return float_outputs<Q6_K>;
    default:
      return float_outputs<F32>;
  }
}

}  // namespace
