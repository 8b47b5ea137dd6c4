// Memory of a forward pass: buffers that its threads share, and those that each thread has.

#pragma once

#include "linear.h"
#include "threads.h"

namespace {

// Queries of a KV head that read its keys and values together. More need a larger buffer of scores;
// fewer read keys and values more often.
constexpr int64_t MAX_QUERIES = 16;

inline int64_t round_up16(int64_t n) { return (n + 15) / 16 * 16; }

// Attention scores of one query: the KV entries of a slot and its tree's nodes.
inline int64_t scores_size(const Model& m) { return round_up16(m.num_entries + MAX_NODES); }

struct SharedBuffers {
  float *q, *k, *v, *attention;  // [num_tokens][heads][head_dim]
  float *gate, *up;              // [num_tokens][intermediate_size]

  static int64_t size(const Model& m, int64_t num_tokens) {
    return 2 * round_up16(num_tokens * m.num_heads * m.head_dim) +
           2 * round_up16(num_tokens * m.num_kv_heads * m.head_dim) +
           2 * round_up16(num_tokens * m.intermediate_size);
  }

  SharedBuffers(const Model& m, int64_t num_tokens, float* scratch) {
    auto take = [&](int64_t count) {
      float* begin = scratch;
      scratch += round_up16(count);
      return begin;
    };
    q = take(num_tokens * m.num_heads * m.head_dim);
    attention = take(num_tokens * m.num_heads * m.head_dim);
    k = take(num_tokens * m.num_kv_heads * m.head_dim);
    v = take(num_tokens * m.num_kv_heads * m.head_dim);
    gate = take(num_tokens * m.intermediate_size);
    up = take(num_tokens * m.intermediate_size);
  }
};

inline int64_t max_in_features(const Model& m) {
  int64_t largest = m.intermediate_size > m.hidden_size ? m.intermediate_size : m.hidden_size;
  if (m.num_heads * m.head_dim > largest) largest = m.num_heads * m.head_dim;
  if (m.first_input_size > largest) largest = m.first_input_size;
  return largest;
}

// Each thread norms and quantizes all tokens for itself: they are few, and it saves a barrier.
struct ThreadBuffers {
  float* normed;  // [num_tokens][hidden_size]
  int8_t* quantized;
  float* scales;
  int32_t* corrections;
  float* scores;  // [MAX_QUERIES][scores_size]

  static int64_t size(const Model& m, int64_t num_tokens) {
    int64_t in = max_in_features(m);
    return round_up16(num_tokens * m.hidden_size) + round_up16(num_tokens * in / 4) +
           2 * round_up16(num_tokens * in / CHUNK) + MAX_QUERIES * scores_size(m) + 64;
  }

  ThreadBuffers(const Model& m, int64_t num_tokens, float* scratch) {
    int64_t in = max_in_features(m);
    normed = scratch;
    scratch += round_up16(num_tokens * m.hidden_size);
    quantized = reinterpret_cast<int8_t*>(scratch);
    scratch += round_up16(num_tokens * in / 4);
    scales = scratch;
    scratch += round_up16(num_tokens * in / CHUNK);
    corrections = reinterpret_cast<int32_t*>(scratch);
    scratch += round_up16(num_tokens * in / CHUNK);
    scores = scratch;
  }

  // x [num_tokens][in_features] as inputs of w. Those of an earlier call are overwritten.
  Activations activations(const Weights& w, const float* x, int64_t num_tokens) {
    const int64_t in = w.in_features;
    if (w.scales) {
      const int64_t groups = in / w.group_size;
      for (int64_t t = 0; t < num_tokens; t++)
        quantize_token(x + t * in, in, w.group_size, quantized + t * in, scales + t * groups,
                       corrections + t * groups);
    }
    return {x, num_tokens > 1 ? in : 0, quantized, scales, corrections};
  }
};

// This thread's outputs of a linear layer: y [num_tokens][out_features].
inline void linear(const Weights& w, const Activations& a, int64_t num_tokens, float* y,
                   Output output) {
  share(w.out_features, w.scales ? PANEL : 24, [&](Range mine) {
    linear_outputs(w, a, num_tokens, y, w.out_features, mine.begin, mine.end, output);
  });
}

}  // namespace
