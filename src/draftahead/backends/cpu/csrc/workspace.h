// Memory of a forward pass: buffers that its threads share, and those that each thread has.

#pragma once

#include "linear.h"
#include "threads.h"

namespace {

// Attention scores that are held at once, of all queries: 128 MiB, which a call takes only as far
// as it has so many. Fewer would make forwards over many nodes of a long context read its keys and
// values more often.
constexpr int64_t MAX_SCORES = int64_t(1) << 25;
// Floats of values that are read at a time while all queries use them. More of them do not stay in
// the first-level cache; with fewer, sums are stored more often.
constexpr int64_t VALUE_TILE = 4096;
// Keys that are read at a time, which is a multiple of the keys in a block of products. They are
// turned, so that adjacent numbers are those of adjacent keys.
constexpr int64_t TILE_KEYS = 32;
// Queries whose values one thread sums: another set of them is work for another thread, or reads
// the values again.
constexpr int64_t SUM_QUERIES = 96;

inline int64_t round_up16(int64_t n) { return (n + 15) / 16 * 16; }

// Floats for the attention scores of one query with so many KV entries: softmax rounds them up from
// any of them on, and the last float is for the query's normalizer.
inline int64_t scores_size(int64_t entries) { return round_up16(entries + 15) + 16; }

struct SharedBuffers {
  float *q, *k, *v, *attention;  // [num_tokens][heads][head_dim]
  float *gate, *up;              // [num_tokens][intermediate_size]
  float* scores;                 // [scores_size]: see attention.h
  int64_t scores_size;
  Barrier* barrier;

  static int64_t size(const Model& m, int64_t num_tokens) {
    return 2 * round_up16(num_tokens * m.num_heads * m.head_dim) +
           2 * round_up16(num_tokens * m.num_kv_heads * m.head_dim) +
           2 * round_up16(num_tokens * m.intermediate_size) + max_scores(m, num_tokens);
  }

  // At least those of one node.
  static int64_t max_scores(const Model& m, int64_t num_tokens) {
    const int64_t of_node = m.num_heads * ::scores_size(m.num_entries);
    const int64_t limit = MAX_SCORES > of_node ? MAX_SCORES : of_node;
    return num_tokens * of_node < limit ? num_tokens * of_node : limit;
  }

  SharedBuffers(const Model& m, int64_t num_tokens, float* scratch) : barrier(nullptr) {
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
    scores_size = max_scores(m, num_tokens);
    scores = take(scores_size);
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
  float* tile;  // [tile_size]: keys or values as float32

  static int64_t size(const Model& m, int64_t num_tokens) {
    int64_t in = max_in_features(m);
    return round_up16(num_tokens * m.hidden_size) + round_up16(num_tokens * in / 4) +
           2 * round_up16(num_tokens * in / CHUNK) + tile_size(m) + 64;
  }

  static int64_t tile_size(const Model& m) {
    static_assert(MAX_NODES >= 2 * TILE_KEYS, "a tile of keys, and the same turned");
    const int64_t tree = MAX_NODES * m.head_dim;
    return tree > VALUE_TILE ? tree : VALUE_TILE;
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
    tile = scratch;
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
  const Range mine = thread_range(w.out_features, w.scales ? PANEL : 24);
  if (mine.begin < mine.end)
    linear_outputs(w, a, num_tokens, y, w.out_features, mine.begin, mine.end, output);
}

}  // namespace
