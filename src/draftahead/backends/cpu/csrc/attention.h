// Attention of new nodes over the KV cache.
//
// A node attends to the entries of its slot in order of position: the context first, then its
// ancestors in the tree, itself last. So a node's sums have the same order in a tree as in a chain,
// and with any other queries beside it.

#pragma once

#include <cmath>

#include "workspace.h"

namespace {

// Index in its sequence's tree of the t-th node of a forward, t in [0, num_tokens).
inline int64_t tree_node(const ForwardArgs& f, int64_t t) {
  return f.tree_nodes ? f.tree_nodes[t] : t % f.num_nodes;
}

// Some queries of one sequence that share a KV head. Queries count by node, then by query head of
// the KV head's group. Keys and values are read in tiles that stay in the first-level cache while
// all queries use them.
struct QueryGroup {
  const Model& m;
  const DecoderLayer& layer;
  const ForwardArgs& f;
  int64_t sequence, kv_head, first, count;
  const float* q;  // [num_sequences][num_nodes][num_heads][head_dim]
  float* out;      // the same shape
  float* scores;   // [count][scores_size]

  int64_t heads_per_group() const { return m.num_heads / m.num_kv_heads; }
  int64_t node(int64_t u) const { return sequence * f.num_nodes + (first + u) / heads_per_group(); }
  int64_t offset(int64_t u) const {
    const int64_t head = kv_head * heads_per_group() + (first + u) % heads_per_group();
    return (node(u) * m.num_heads + head) * m.head_dim;
  }
};

// KV entries of a node's ancestors, oldest first, the node itself last; returns how many of them
// the sliding window holds.
int64_t ancestor_entries(const QueryGroup& g, int64_t t, int64_t* entries) {
  int64_t count = 0;
  const int64_t tree = g.sequence * g.f.tree_size, node = tree + tree_node(g.f, t);
  for (uint64_t bits = g.f.ancestors[node]; bits; bits &= bits - 1) {
    int64_t ancestor = __builtin_ctzll(bits);
    int64_t distance = g.f.depths[node] - g.f.depths[tree + ancestor];
    if (!g.layer.sliding_window || distance < g.layer.sliding_window)
      entries[count++] = g.f.num_cached[g.sequence] + ancestor;
  }
  return count;
}

// How many entries, from the first on, are adjacent in memory: all of them in a chain.
int64_t adjacent(const int64_t* entries, int64_t count) {
  int64_t n = 1;
  while (n < count && entries[n] == entries[0] + n) n++;
  return n;
}

// Scores of one query with `count` adjacent keys.
void score_keys(const float* query, const float* key, int64_t count, int64_t head_dim,
                float* scores) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8, key += 8 * head_dim) {
    f32x16 acc[8] = {};
    for (int64_t i = 0; i < head_dim; i += 16) {
      f32x16 part = in_register(load(query + i));
#pragma GCC unroll 8
      for (int u = 0; u < 8; u++) acc[u] = multiply_add(part, load(key + u * head_dim + i), acc[u]);
    }
    sum_lanes8(acc, scores + j);
  }
  for (; j < count; j++, key += head_dim) {
    f32x16 acc = {};
    for (int64_t i = 0; i < head_dim; i += 16)
      acc = multiply_add(load(query + i), load(key + i), acc);
    scores[j] = sum_lanes(acc);
  }
}

// Softmax in place without its division: returns the factor that makes the weights sum to 1.
float softmax(float* scores, int64_t count, float scaling) {
  const int64_t padded = round_up16(count);
  for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;
  f32x16 lane_max = broadcast(-INFINITY), total = {};
  for (int64_t j = 0; j < padded; j += 16) {
    f32x16 s = load(scores + j) * scaling;
    store(scores + j, s);
    lane_max = s > lane_max ? s : lane_max;
  }
  float largest = max_lane(lane_max);
  for (int64_t j = 0; j < padded; j += 16) store(scores + j, fast_exp(load(scores + j) - largest));
  for (int64_t j = count; j < padded; j++) scores[j] = 0;
  for (int64_t j = 0; j < padded; j += 16) total += load(scores + j);
  return 1.0f / sum_lanes(total);
}

// Adds weights * values over `count` adjacent values, for Q queries and 16 * C channels of each.
template <int Q, int C>
inline __attribute__((always_inline)) void add_channels(const float* const* weights,
                                                        const float* value, int64_t count,
                                                        int64_t head_dim, float* const* out) {
  f32x16 acc[Q][C];
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[q][c] = load(out[q] + 16 * c);
  for (int64_t j = 0; j < count; j++, value += head_dim) {
    f32x16 part[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) part[c] = in_register(load(value + 16 * c));
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      f32x16 weight = in_register(broadcast(weights[q][j]));
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[q][c] = multiply_add(weight, part[c], acc[q][c]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out[q] + 16 * c, acc[q][c]);
}

// The same for all channels.
template <int Q>
void add_values(const float* const* weights, const float* values, int64_t count, int64_t head_dim,
                float* const* out) {
  float* channels[Q];
  int64_t i = 0;
  for (; i + 64 <= head_dim; i += 64) {
    for (int q = 0; q < Q; q++) channels[q] = out[q] + i;
    add_channels<Q, 4>(weights, values + i, count, head_dim, channels);
  }
  for (; i < head_dim; i += 16) {
    for (int q = 0; q < Q; q++) channels[q] = out[q] + i;
    add_channels<Q, 1>(weights, values + i, count, head_dim, channels);
  }
}

constexpr int64_t TILE_FLOATS =
    4096;  // keys or values of a tile: half of a 32 KiB first-level cache

// Context entries that a group's queries attend to: [begin, begin + count).
struct Context {
  int64_t begin, count, tile;  // tile: entries read at a time
};

Context context_of(const QueryGroup& g) {
  const ForwardArgs& f = g.f;
  const int64_t num_cached = f.num_cached[g.sequence], window = g.layer.sliding_window;
  // With a sliding window a group holds one query: other nodes' windows begin elsewhere.
  const int64_t depth = f.depths[g.sequence * f.tree_size + tree_node(f, g.node(0))];
  const int64_t position = num_cached + depth;
  const int64_t begin = window && position >= window ? position - window + 1 : 0;
  return {begin, num_cached > begin ? num_cached - begin : 0, TILE_FLOATS / g.m.head_dim};
}

void score_context(const QueryGroup& g, const Context& c, const float* keys) {
  const int64_t d = g.m.head_dim, stride = scores_size(g.m);
  for (int64_t j = 0; j < c.count; j += c.tile)
    for (int64_t u = 0; u < g.count; u++)
      score_keys(g.q + g.offset(u), keys + (c.begin + j) * d,
                 c.count - j < c.tile ? c.count - j : c.tile, d, g.scores + u * stride + j);
}

void add_context_values(const QueryGroup& g, const Context& c, const float* values) {
  const int64_t d = g.m.head_dim, stride = scores_size(g.m);
  for (int64_t j = 0; j < c.count; j += c.tile) {
    const int64_t entries = c.count - j < c.tile ? c.count - j : c.tile;
    for (int64_t u = 0; u < g.count; u += 4) {
      const float* weights[4];
      float* out[4];
      const int64_t queries = g.count - u < 4 ? g.count - u : 4;
      for (int64_t q = 0; q < queries; q++) {
        weights[q] = g.scores + (u + q) * stride + j;
        out[q] = g.out + g.offset(u + q);
      }
      const float* tile = values + (c.begin + j) * d;
      if (queries == 4) add_values<4>(weights, tile, entries, d, out);
      else if (queries == 3) add_values<3>(weights, tile, entries, d, out);
      else if (queries == 2) add_values<2>(weights, tile, entries, d, out);
      else add_values<1>(weights, tile, entries, d, out);
    }
  }
}

void attend(const QueryGroup& g) {
  const int64_t d = g.m.head_dim, stride = scores_size(g.m);
  const int64_t head = (g.f.first_slot + g.sequence) * g.m.num_kv_heads + g.kv_head;
  const float* keys = g.layer.keys + head * g.m.num_entries * d;
  const float* values = g.layer.values + head * g.m.num_entries * d;
  const Context context = context_of(g);
  int64_t entries[MAX_NODES];
  float normalizers[MAX_QUERIES];
  score_context(g, context, keys);
  for (int64_t u = 0; u < g.count; u++) {
    float* scores = g.scores + u * stride;
    const int64_t nodes = ancestor_entries(g, g.node(u), entries);
    for (int64_t j = 0, run; j < nodes; j += run) {
      run = adjacent(entries + j, nodes - j);
      score_keys(g.q + g.offset(u), keys + entries[j] * d, run, d, scores + context.count + j);
    }
    normalizers[u] = softmax(scores, context.count + nodes, g.layer.scaling);
    std::memset(g.out + g.offset(u), 0, d * sizeof(float));
  }
  add_context_values(g, context, values);
  for (int64_t u = 0; u < g.count; u++) {
    float* out = g.out + g.offset(u);
    const int64_t nodes = ancestor_entries(g, g.node(u), entries);
    for (int64_t j = 0, run; j < nodes; j += run) {
      run = adjacent(entries + j, nodes - j);
      const float* weights = g.scores + u * stride + context.count + j;
      add_values<1>(&weights, values + entries[j] * d, run, d, &out);
    }
    for (int64_t i = 0; i < d; i += 16) store(out + i, load(out + i) * normalizers[u]);
  }
}

// This thread's part of all queries. The queries of each (sequence, KV head) are cut into groups,
// at least two for each thread.
void attention(const Model& m, const DecoderLayer& layer, const ForwardArgs& f, SharedBuffers& b,
               ThreadBuffers& local) {
  const int64_t queries = f.num_nodes * (m.num_heads / m.num_kv_heads);
  const int64_t kv_heads = f.num_sequences * m.num_kv_heads;
  int64_t groups = (2 * num_threads() + kv_heads - 1) / kv_heads;
  if (groups * MAX_QUERIES < queries) groups = (queries + MAX_QUERIES - 1) / MAX_QUERIES;
  if (groups > queries || layer.sliding_window) groups = queries;
  const int64_t group_size = (queries + groups - 1) / groups;
  const Range mine = thread_range(kv_heads * groups, 1);
  for (int64_t job = mine.begin; job < mine.end; job++) {
    int64_t first = job % groups * group_size, kv_head = job / groups;
    int64_t count = queries - first < group_size ? queries - first : group_size;
    if (count > 0)
      attend({m, layer, f, kv_head / m.num_kv_heads, kv_head % m.num_kv_heads, first, count, b.q,
              b.attention, local.scores});
  }
}

}  // namespace
