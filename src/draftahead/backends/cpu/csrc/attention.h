// Attention of new nodes over the KV cache.
//
// A node attends to the entries of its slot in order of position: the context first, then its
// ancestors in the tree, itself last. So a node's sums have the same order in a tree as in a chain,
// and with any other queries beside it.
//
// Three phases, between which the threads meet: scores, a part of the entries for each thread;
// softmax, a part of the queries; weighted sums of values, a part of the channels. So each key and
// each value is read once for all queries of its KV head, no sum is cut, and all threads have work
// however few KV heads there are.

#pragma once

#include <algorithm>

#include "attention_products.h"

namespace {

// Index in its sequence's tree of the t-th node of a forward, t in [0, num_tokens).
inline int64_t tree_node(const ForwardArgs& f, int64_t t) {
  return f.tree_nodes ? f.tree_nodes[t] : t % f.num_nodes;
}

// First entry that the sliding window of a node holds, at most the first of the nodes' own.
inline int64_t window_begin(const DecoderLayer& layer, const ForwardArgs& f, int64_t t) {
  const int64_t sequence = t / f.num_nodes, cached = f.num_cached[sequence];
  const int64_t depth = f.depths[sequence * f.tree_size + tree_node(f, t)];
  const int64_t position = cached + depth, window = layer.sliding_window;
  const int64_t begin = window && position >= window ? position - window + 1 : 0;
  return begin < cached ? begin : cached;
}

// The queries of some nodes of one sequence that share a KV head. They count by node, then by query
// head of the KV head's group.
struct Queries {
  const Model& m;
  const DecoderLayer& layer;
  const ForwardArgs& f;
  int64_t sequence, kv_head, first_token, count;
  int64_t begin, end;  // entries to which one of them may attend: the last are those of all nodes
  const float* q;      // [num_sequences][num_nodes][num_heads][head_dim]
  float* out;          // the same shape
  float* scores;       // [count][row_size]

  int64_t heads() const { return m.num_heads / m.num_kv_heads; }
  int64_t num_cached() const { return f.num_cached[sequence]; }
  int64_t node(int64_t u) const { return first_token + u / heads(); }
  int64_t offset(int64_t u) const {
    return (node(u) * m.num_heads + kv_head * heads() + u % heads()) * m.head_dim;
  }
  const char* row(const char* stored, int64_t entry) const {
    const int64_t head = (f.first_slot + sequence) * m.num_kv_heads + kv_head;
    return stored + (head * m.num_entries + entry) * kv_row_size(m);
  }
  // A query's scores: those of the context from entry `begin` on, then those of the nodes, of which
  // softmax keeps the ancestors'. The last number is the query's normalizer.
  int64_t row_size() const { return scores_size(end - begin); }
  float* scores_of(int64_t u) const { return scores + u * row_size(); }
  float& normalizer(int64_t u) const { return scores[(u + 1) * row_size() - 1]; }
};

// KV entries of a node's ancestors, oldest first, the node itself last; returns how many of them
// the sliding window holds.
int64_t ancestor_entries(const Queries& g, int64_t t, int64_t* entries) {
  int64_t count = 0;
  const int64_t tree = g.sequence * g.f.tree_size, node = tree + tree_node(g.f, t);
  for (uint64_t bits = g.f.ancestors[node]; bits; bits &= bits - 1) {
    int64_t ancestor = __builtin_ctzll(bits);
    int64_t distance = g.f.depths[node] - g.f.depths[tree + ancestor];
    if (!g.layer.sliding_window || distance < g.layer.sliding_window)
      entries[count++] = g.num_cached() + ancestor;
  }
  return count;
}

// How many entries, from the first on, are adjacent in memory: all of them in a chain.
int64_t adjacent(const int64_t* entries, int64_t count) {
  int64_t n = 1;
  while (n < count && entries[n] == entries[0] + n) n++;
  return n;
}

// --------------------------------------------------------------------------------------- phases

// Scores of all queries with the keys in entries [begin, end).
void score_entries(const Queries& g, int64_t begin, int64_t end, float* buffer) {
  const int64_t d = g.m.head_dim;
  float* turned = buffer + TILE_KEYS * d;
  for (int64_t e = begin; e < end; e += TILE_KEYS) {
    const int64_t count = std::min(end - e, TILE_KEYS);
    const char* stored = g.row(static_cast<const char*>(g.layer.keys), e);
    turn_tile(widened(g.m, stored, count, 0, d, buffer), count, d, turned);
    const char* following = g.row(static_cast<const char*>(g.layer.keys), e + count);
    Prefetch next(g.m, following, std::min(end - e - count, TILE_KEYS), 0, d,
                  g.count / SCORE_QUERIES);
    for (int64_t u = 0, size; u < g.count; u += size) {
      next.some();
      size = block_size(g.count - u, SCORE_QUERIES);
      with_count<SCORE_QUERIES>(size, [&](auto Q) {
        const float* queries[Q];
        float* scores[Q];
        for (int q = 0; q < Q; q++) {
          queries[q] = g.q + g.offset(u + q);
          scores[q] = g.scores_of(u + q) + (e - g.begin);
        }
        score_tile<Q>(queries, turned, count, d, scores);
      });
    }
  }
}

inline f32xN larger(f32xN a, f32xN b) { return a > b ? a : b; }  // b if a is NaN

// The largest of `count` scores, a multiple of 16. Two running maxima: each comparison waits for
// the last one of its own.
float largest_score(const float* scores, int64_t count, float scaling) {
  f32xN even = broadcast_lanes(-INFINITY), odd = even;
  for (int64_t j = 0; j < count; j += 2 * LANES) {
    even = larger(load_lanes(scores + j) * scaling, even);
    odd = larger(load_lanes(scores + std::min(j + LANES, count - LANES)) * scaling, odd);
  }
  even = larger(even, odd);
  float largest = even[0];
  for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, float(even[lane]));
  return largest;
}

// Softmax in place without its division: returns the factor that makes the weights sum to 1.
float softmax(float* scores, int64_t count, float scaling) {
  const int64_t padded = round_up16(count), last = padded - 16;
  for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;
  const float largest = largest_score(scores, padded, scaling);
  f32xN totals[16 / LANES] = {};
  for (int64_t j = 0; j < padded; j += 16)
#pragma GCC unroll 4
    for (int part = 0; part < 16 / LANES; part++) {
      float* at = scores + j + LANES * part;
      const f32xN weights = fast_exp(load_lanes(at) * scaling - largest);
      store_lanes(at, weights);
      if (j < last) totals[part] += weights;
    }
  for (int64_t j = count; j < padded; j++) scores[j] = 0;
  f32x16 total;
  std::memcpy(&total, totals, sizeof total);
  return 1.0f / sum_lanes(total + load(scores + last));
}

// Turns a query's scores into weights: those of the context, then those of its ancestors alone.
void weigh(const Queries& g, int64_t u) {
  int64_t entries[MAX_NODES];
  const int64_t nodes = ancestor_entries(g, g.node(u), entries), context = g.num_cached() - g.begin;
  const int64_t skipped = window_begin(g.layer, g.f, g.node(u)) - g.begin;
  float* scores = g.scores_of(u);
  for (int64_t j = 0; j < nodes; j++) scores[context + j] = scores[entries[j] - g.begin];
  g.normalizer(u) = softmax(scores + skipped, context - skipped + nodes, g.layer.scaling);
}

// Context entries that queries attend to: a block of queries has the same first one.
void add_context_values(const Queries& g, Range queries, int64_t channel, int64_t width,
                        float* buffer) {
  const int64_t tile = std::max<int64_t>(1, VALUE_TILE / width), end = g.num_cached();
  for (int64_t e = g.begin; e < end; e += tile) {
    const int64_t tile_end = end - e < tile ? end : e + tile;
    const char* stored = g.row(static_cast<const char*>(g.layer.values), e);
    const Rows values = widened(g.m, stored, tile_end - e, channel, channel + width, buffer);
    const char* following = g.row(static_cast<const char*>(g.layer.values), tile_end);
    Prefetch next(g.m, following, std::min(end - tile_end, tile), channel, channel + width,
                  (queries.end - queries.begin) / QUERY_BLOCK);
    for (int64_t u = queries.begin, size; u < queries.end; u += size) {
      next.some();
      size = queries.end - u;
      int64_t skipped = 0;
      if (g.layer.sliding_window) {  // other nodes' windows begin elsewhere
        const int64_t same_node = g.heads() - u % g.heads();
        size = size < same_node ? size : same_node;
        const int64_t begin = window_begin(g.layer, g.f, g.node(u));
        skipped = begin > e ? begin - e : 0;
      }
      size = block_size(size, QUERY_BLOCK);
      if (e + skipped >= tile_end) continue;
      with_count<QUERY_BLOCK>(size, [&](auto Q) {
        const float* weights[Q];
        float* out[Q];
        for (int q = 0; q < Q; q++) {
          weights[q] = g.scores_of(u + q) + (e + skipped - g.begin);
          out[q] = g.out + g.offset(u + q) + channel;
        }
        add_values<Q>(weights, {values.data + skipped * values.stride, values.stride},
                      tile_end - e - skipped, width, out);
      });
    }
  }
}

// Values of each query's ancestors, then the normalizer.
void add_node_values(const Queries& g, Range queries, int64_t channel, int64_t width,
                     float* buffer) {
  const int64_t context = g.num_cached() - g.begin;
  const char* stored = g.row(static_cast<const char*>(g.layer.values), g.num_cached());
  const Rows values = widened(g.m, stored, g.f.tree_size, channel, channel + width, buffer);
  int64_t entries[MAX_NODES];
  for (int64_t u = queries.begin, size; u < queries.end; u += size) {
    const int64_t same_node = g.heads() - u % g.heads(), rest = queries.end - u;
    size = block_size(std::min(rest, same_node), QUERY_BLOCK);
    const int64_t nodes = ancestor_entries(g, g.node(u), entries);
    with_count<QUERY_BLOCK>(size, [&](auto Q) {
      const float* weights[Q];
      float* out[Q];
      for (int q = 0; q < Q; q++) out[q] = g.out + g.offset(u + q) + channel;
      for (int64_t j = 0, run; j < nodes; j += run) {
        run = adjacent(entries + j, nodes - j);
        for (int q = 0; q < Q; q++) weights[q] = g.scores_of(u + q) + context + j;
        const float* first = values.data + (entries[j] - g.num_cached()) * values.stride;
        add_values<Q>(weights, {first, values.stride}, run, width, out);
      }
      for (int q = 0; q < Q; q++)
        for (int64_t i = 0; i < width; i += 16)
          store(out[q] + i, load(out[q] + i) * g.normalizer(u + q));
    });
  }
}

// Sums of values of some queries, in channels [channel, channel + width).
void sum_values(const Queries& g, Range queries, int64_t channel, int64_t width, float* buffer) {
  for (int64_t u = queries.begin; u < queries.end; u++)
    std::memset(g.out + g.offset(u) + channel, 0, width * sizeof(float));
  add_context_values(g, queries, channel, width, buffer);
  add_node_values(g, queries, channel, width, buffer);
}

// --------------------------------------------------------------------------- division of the work

// This thread's part of work that consists of many items, by their weights.
class Share {
 public:
  explicit Share(int64_t total_weight) : mine_(thread_range(total_weight, 1)) {}
  // The thread's ones of the next `count` items, of `weight` each.
  Range next(int64_t count, int64_t weight) {
    auto items = [&](int64_t until) {  // that begin before it
      const int64_t before = until > at_ ? (until - at_ + weight - 1) / weight : 0;
      return before < count ? before : count;
    };
    const Range found = {items(mine_.begin), items(mine_.end)};
    at_ += count * weight;
    return found;
  }

 private:
  const Range mine_;
  int64_t at_ = 0;
};

// Calls visit(Queries) for each sequence and KV head, with some nodes' queries.
template <class F>
void for_each_kv_head(const Model& m, const DecoderLayer& layer, const ForwardArgs& f,
                      SharedBuffers& b, Range tokens, F visit) {
  float* scores = b.scores;
  for (int64_t t = tokens.begin, next; t < tokens.end; t = next) {
    const int64_t sequence = t / f.num_nodes, num_cached = f.num_cached[sequence];
    next = std::min((sequence + 1) * f.num_nodes, tokens.end);
    int64_t begin = layer.sliding_window ? num_cached : 0;
    for (int64_t n = t; layer.sliding_window && n < next; n++)
      begin = std::min(begin, window_begin(layer, f, n));
    const int64_t count = (next - t) * (m.num_heads / m.num_kv_heads);
    for (int64_t kv_head = 0; kv_head < m.num_kv_heads; kv_head++) {
      const Queries g = {
          m,   layer,       f,     sequence, kv_head, t, count, begin, num_cached + f.tree_size,
          b.q, b.attention, scores};
      visit(g);
      scores += count * g.row_size();
    }
  }
}

// Attention of some nodes. Called by all threads.
void attend(const Model& m, const DecoderLayer& layer, const ForwardArgs& f, SharedBuffers& b,
            ThreadBuffers& local, Range tokens) {
  auto for_each = [&](auto visit) { for_each_kv_head(m, layer, f, b, tokens, visit); };
  int64_t total = 0;  // scores
  int64_t tiles = 0;  // scores of whole tiles
  for_each([&](const Queries& g) {
    total += g.count * (g.end - g.begin);
    tiles += g.count * ((g.end - g.begin + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS);
  });
  Share scored(tiles), weighed(total), summed(total * (m.head_dim / 16));
  for_each([&](const Queries& g) {
    const int64_t tiles = (g.end - g.begin + TILE_KEYS - 1) / TILE_KEYS;
    const Range mine = scored.next(tiles, TILE_KEYS * g.count);
    score_entries(g, g.begin + mine.begin * TILE_KEYS,
                  std::min(g.begin + mine.end * TILE_KEYS, g.end), local.tile);
  });
  barrier();
  for_each([&](const Queries& g) {
    const Range mine = weighed.next(g.count, g.end - g.begin);
    for (int64_t u = mine.begin; u < mine.end; u++) weigh(g, u);
  });
  barrier();
  for_each([&](const Queries& g) {
    for (int64_t u = 0; u < g.count; u += SUM_QUERIES) {
      const Range queries = {u, std::min(u + SUM_QUERIES, g.count)};
      const int64_t weight = (g.end - g.begin) * (queries.end - queries.begin);
      const Range mine = summed.next(m.head_dim / 16, weight);
      if (mine.begin < mine.end)
        sum_values(g, queries, 16 * mine.begin, 16 * (mine.end - mine.begin), local.tile);
    }
  });
}

// Attention of all nodes, of as many at a time as there is memory for their scores.
void attention(const Model& m, const DecoderLayer& layer, const ForwardArgs& f, SharedBuffers& b,
               ThreadBuffers& local) {
  const int64_t num_tokens = f.num_sequences * f.num_nodes;
  const int64_t most_cached = *std::max_element(f.num_cached, f.num_cached + f.num_sequences);
  const int64_t at_once = b.scores_size / (m.num_heads * scores_size(most_cached + f.tree_size));
  for (int64_t t = 0; t < num_tokens; t += at_once) {
    if (t) barrier();  // the scores of the last nodes are read until then
    attend(m, layer, f, b, local, {t, std::min(t + at_once, num_tokens)});
  }
}

}  // namespace
