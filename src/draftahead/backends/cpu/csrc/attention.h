// Attention of a pass's queries over the cache.

#pragma once

#include <cmath>

#include "model.h"

namespace {

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
  const int64_t base = a.row * a.p.block, own = base + in_block(a.p, t);
  for (uint64_t bits = a.p.ancestors[own]; bits; bits &= bits - 1) {
    int64_t other = __builtin_ctzll(bits);
    int64_t apart = a.p.depths[own] - a.p.depths[base + other];
    if (!a.l.window || apart < a.l.window) slots[found++] = a.p.lengths[a.row] + other;
  }
  return found;
}

// How many slots from the first on lie side by side: a chain's all do.
int64_t in_a_row(const int64_t* slots, int64_t count) {
  int64_t found = 1;
  while (found < count && slots[found] == slots[0] + found) found++;
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
  for (int64_t j = 0; j < padded; j += 16) store(scores + j, exp16(load(scores + j) - most));
  for (int64_t j = count; j < padded; j++) scores[j] = 0;
  for (int64_t j = 0; j < padded; j += 16) total += load(scores + j);
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
  const int64_t position = length + a.p.depths[a.row * a.p.block + in_block(a.p, a.node(0))];
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
    for (int64_t j = 0, some; j < extra; j += some) {
      some = in_a_row(slots + j, extra - j);
      score(a.q + a.place(u), keys + slots[j] * d, some, d, mine + past + j);
    }
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
    for (int64_t j = 0, some; j < extra; j += some) {
      some = in_a_row(slots + j, extra - j);
      const float* weight = a.scores + u * room + past + j;
      mix_all<1>(&weight, values + slots[j] * d, some, d, &out);
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

}  // namespace
