// Memory of a forward pass: buffers that its threads share, and those that each thread has.

#pragma once

#include <cmath>
#include <initializer_list>

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

inline int64_t max_in_features(const Model& m) {
  int64_t largest = m.intermediate_size > m.hidden_size ? m.intermediate_size : m.hidden_size;
  if (m.num_heads * m.head_dim > largest) largest = m.num_heads * m.head_dim;
  if (m.first_input_size > largest) largest = m.first_input_size;
  return largest;
}

struct SharedBuffers {
  float *q, *k, *v, *attention;  // [num_tokens][heads][head_dim]
  float *gate, *up;              // [num_tokens][intermediate_size]
  float* normed;                 // [num_tokens][hidden_size]
  uint8_t* integers;             // [num_tokens][integer_bytes(w)] inputs of the current layer w
  float* scores;                 // [scores_size]: see attention.h
  int64_t scores_size;

  static int64_t size(const Model& m, int64_t num_tokens) {
    return 2 * round_up16(num_tokens * m.num_heads * m.head_dim) +
           2 * round_up16(num_tokens * m.num_kv_heads * m.head_dim) +
           2 * round_up16(num_tokens * m.intermediate_size) +
           round_up16(num_tokens * m.hidden_size) + max_scores(m, num_tokens) +
           num_tokens * max_integer_bytes(max_in_features(m)) / 4;
  }

  // At least those of one node.
  static int64_t max_scores(const Model& m, int64_t num_tokens) {
    const int64_t of_node = m.num_heads * ::scores_size(m.num_entries);
    const int64_t limit = MAX_SCORES > of_node ? MAX_SCORES : of_node;
    return num_tokens * of_node < limit ? num_tokens * of_node : limit;
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
    normed = take(num_tokens * m.hidden_size);
    scores_size = max_scores(m, num_tokens);
    scores = take(scores_size);
    integers = reinterpret_cast<uint8_t*>(scratch);
  }
};

struct ThreadBuffers {
  float* tile;        // [tile_size]: keys or values as float32
  float* normed;      // inputs of a single token: see prepared
  uint8_t* integers;  // the same

  static int64_t size(const Model& m) {
    return tile_size(m) + round_up16(m.hidden_size) + max_integer_bytes(max_in_features(m)) / 4 +
           64;
  }

  static int64_t tile_size(const Model& m) {
    static_assert(MAX_NODES >= 2 * TILE_KEYS, "a tile of keys, and the same turned");
    const int64_t tree = MAX_NODES * m.head_dim;
    return tree > VALUE_TILE ? tree : VALUE_TILE;
  }

  ThreadBuffers(const Model& m, float* scratch)
      : tile(scratch),
        normed(tile + tile_size(m)),
        integers(reinterpret_cast<uint8_t*>(normed + round_up16(m.hidden_size))) {}
};

inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  f32x16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) squares = multiply_add(load(x + i), load(x + i), squares);
  float total = sum_lanes(squares);
  for (; i < size; i++) total += x[i] * x[i];
  float scale = 1.0f / std::sqrt(total / size + eps);
  for (i = 0; i + 16 <= size; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < size; i++) y[i] = x[i] * scale * weight[i];
}

// x [num_tokens][in] as inputs of layers that share them, normed first if there is a `norm`. Called
// by all threads: each prepares some of the tokens for all; a single token, each for itself, which
// is sooner done than waiting for another thread. Inputs of an earlier call are overwritten.
inline Inputs prepared(const Model& m, SharedBuffers& b, ThreadBuffers& local,
                       std::initializer_list<const Weights*> layers, const float* x,
                       const float* norm, int64_t num_tokens) {
  const Weights* with_integers = nullptr;
  // Inputs whose scales are shared do for layers that do not need it as well.
  for (const Weights* w : layers)
    if (integer_bytes(*w) && !(with_integers && sharing_units(*with_integers) > sharing_units(*w)))
      with_integers = w;
  if (!norm && !with_integers) return {x, nullptr};
  const int64_t in = (*layers.begin())->in_features;
  const int64_t bytes = with_integers ? integer_bytes(*with_integers) : 0;
  const bool is_single = num_tokens == 1;
  float* normed = is_single ? local.normed : b.normed;
  uint8_t* integers = is_single ? local.integers : b.integers;
  const Range mine = is_single ? Range{0, 1} : thread_range(num_tokens, 1);
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* row = x + t * in;
    if (norm) {
      rms_norm(row, norm, m.norm_eps, in, normed + t * in);
      row = normed + t * in;
    }
    if (with_integers) encode_token(*with_integers, row, integers + t * bytes);
  }
  if (!is_single) barrier();
  return {norm ? normed : x, integers};
}

// A linear layer, by all threads: y [num_tokens][out_features].
inline void linear(const Weights& w, const Inputs& inputs, int64_t num_tokens, float* y,
                   Output output) {
  share(w.out_features, output_unit(w), [&](Range part) {
    linear_outputs(w, inputs, num_tokens, y, w.out_features, part.begin, part.end, output);
  });
}

}  // namespace
