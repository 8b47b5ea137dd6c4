// The two products of attention, for a block of queries at a time: scores with keys, and sums of
// weighted values. The order of each sum is the same for every number of queries.

#pragma once

#include <type_traits>

#include "kv_rows.h"
#include "lanes.h"
#include "workspace.h"

namespace {

// Queries whose products are computed together, so that a key or value is loaded once for them.
// More do not fit into the registers.
constexpr int QUERY_BLOCK = 6;

// Calls f with `count`, from 1 to Most, as a compile-time number.
template <int Most, class F>
inline void with_count(int64_t count, F f) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, f);
  f(std::integral_constant<int, Most>());
}

// Queries of the next block, so that blocks of at most `most` are of nearly equal size: 4 and 3 are
// faster than 6 and 1.
inline int64_t block_size(int64_t remaining, int64_t most) {
  const int64_t blocks = (remaining + most - 1) / most;
  return (remaining + blocks - 1) / blocks;
}

// ---------------------------------------------------------------------------------------- scores

// What fits into the registers: queries of a block whose products are summed at once with so many
// vectors of keys, and vectors of values whose sums are kept for a block of queries.
#if defined(__AVX512F__)  // 32 registers
constexpr int SCORE_QUERIES = 6, SCORE_VECTORS = 2, VALUE_VECTORS = 4;
#elif defined(__AVX__)  // 16
constexpr int SCORE_QUERIES = 3, SCORE_VECTORS = 2, VALUE_VECTORS = 2;
#else                   // 32 on ARM
constexpr int SCORE_QUERIES = 6, SCORE_VECTORS = 2, VALUE_VECTORS = 4;
#endif

#if defined(__AVX512F__)
// Rows of sixteen numbers become columns.
inline __attribute__((always_inline)) void transpose16(f32x16* v) {
  f32x16 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = (f32x16)_mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
    t[i + 1] = (f32x16)_mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; k++) {
      const __m512d low = (__m512d)t[i + k], high = (__m512d)t[i + k + 2];
      v[i + 2 * k] = (f32x16)_mm512_unpacklo_pd(low, high);
      v[i + 2 * k + 1] = (f32x16)_mm512_unpackhi_pd(low, high);
    }
  for (int i = 0; i < 16; i += 8)
    for (int k = 0; k < 4; k++) {
      const __m512 low = (__m512)v[i + k], high = (__m512)v[i + k + 4];
      t[i + k] = (f32x16)_mm512_shuffle_f32x4(low, high, 0x88);
      t[i + k + 4] = (f32x16)_mm512_shuffle_f32x4(low, high, 0xdd);
    }
  for (int k = 0; k < 8; k++) {
    v[k] = (f32x16)_mm512_shuffle_f32x4((__m512)t[k], (__m512)t[k + 8], 0x88);
    v[k + 8] = (f32x16)_mm512_shuffle_f32x4((__m512)t[k], (__m512)t[k + 8], 0xdd);
  }
}

// Numbers [i, i + 16) of sixteen keys.
inline void turn_keys(Rows keys, int64_t i, float* turned) {
  f32x16 v[16];
  for (int k = 0; k < 16; k++) v[k] = load(keys.data + k * keys.stride + i);
  transpose16(v);
  for (int k = 0; k < 16; k++) store(turned + (i + k) * TILE_KEYS, v[k]);
}
#else
inline void turn_keys(Rows keys, int64_t i, float* turned) {
  for (int k = 0; k < 16; k += 4)
    for (int j = 0; j < 16; j += 4) {
      f32x4 v[4];
      for (int n = 0; n < 4; n++)
        std::memcpy(&v[n], keys.data + (k + n) * keys.stride + i + j, sizeof v[n]);
      const f32x4 a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
      const f32x4 b = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
      const f32x4 c = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
      const f32x4 d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
      v[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
      v[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
      v[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
      v[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
      for (int n = 0; n < 4; n++)
        std::memcpy(turned + (i + j + n) * TILE_KEYS + k, &v[n], sizeof v[n]);
    }
}
#endif

// `count` keys, at most TILE_KEYS, as turned [head_dim][TILE_KEYS]; the columns behind them hold
// what they held, or copies.
inline void turn_tile(Rows keys, int64_t count, int64_t head_dim, float* turned) {
  for (int64_t k = 0; k < count; k += 16) {
    for (int64_t i = 0; i < head_dim; i += 16) {
      if (k + 16 <= count) {
        turn_keys({keys.data + k * keys.stride, keys.stride}, i, turned + k);
      } else {
        float rows[16 * 16] = {0};
        for (int64_t n = k; n < count; n++)
          store(rows + (n - k) * 16, load(keys.data + n * keys.stride + i));
        turn_keys({rows - i, 16}, i, turned + k);
      }
    }
  }
}

// Products of Q queries with V vectors of turned keys, summed over channels 16 apart: those from
// `lane` on, and those from `lane` + 8 on, which are added to them.
template <int Q, int V>
inline __attribute__((always_inline)) void multiply_lane(const float* const* queries,
                                                         const float* turned, int64_t head_dim,
                                                         int64_t lane, f32xN (*sums)[V]) {
  f32xN acc[2][Q][V] = {};
  for (int64_t i = lane; i < head_dim; i += 16)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      f32xN key[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++)
        key[v] = pinned(load_lanes(turned + (i + 8 * half) * TILE_KEYS + LANES * v));
#pragma GCC unroll 6
      for (int q = 0; q < Q; q++) {
        const f32xN query = pinned(broadcast_lanes(queries[q][i + 8 * half]));
#pragma GCC unroll 2
        for (int v = 0; v < V; v++)
          acc[half][q][v] = multiply_add_lanes(query, key[v], acc[half][q][v]);
      }
    }
#pragma GCC unroll 6
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sums[q][v] = acc[0][q][v] + acc[1][q][v];
}

// Scores of Q queries with V vectors of turned keys: sums of the lanes in the order of sum_lanes.
template <int Q, int V>
inline __attribute__((always_inline)) void score_keys(const float* const* queries,
                                                      const float* turned, int64_t head_dim,
                                                      f32xN (*scores)[V]) {
  f32xN quarters[2][Q][V], a[Q][V], b[Q][V];
  for (int64_t odd = 0; odd < 2; odd++)
    for (int64_t lane = odd; lane < 4; lane += 2) {
      multiply_lane<Q, V>(queries, turned, head_dim, lane, a);
      multiply_lane<Q, V>(queries, turned, head_dim, lane + 4, b);
      for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) {
          const f32xN sum = a[q][v] + b[q][v];
          quarters[odd][q][v] = lane < 2 ? sum : quarters[odd][q][v] + sum;
        }
    }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) scores[q][v] = quarters[0][q][v] + quarters[1][q][v];
}

// Scores of Q queries with `count` keys of a turned tile.
template <int Q>
void score_tile(const float* const* queries, const float* turned, int64_t count, int64_t head_dim,
                float* const* scores) {
  constexpr int V = SCORE_VECTORS;
  for (int64_t j = 0; j < count; j += LANES * V) {
    f32xN found[Q][V];
    score_keys<Q, V>(queries, turned + j, head_dim, found);
    for (int q = 0; q < Q; q++) {
      if (j + LANES * V <= count) {
        for (int v = 0; v < V; v++) store_lanes(scores[q] + j + LANES * v, found[q][v]);
      } else {
        std::memcpy(scores[q] + j, found[q], (count - j) * sizeof(float));
      }
    }
  }
}

// --------------------------------------------------------------------------------- sums of values

// Adds weights * values over `count` adjacent values, for Q queries and C vectors of channels of
// each.
template <int Q, int C>
inline __attribute__((always_inline)) void add_channels(const float* const* weights, Rows values,
                                                        int64_t count, float* const* out,
                                                        int64_t channel) {
  f32xN acc[Q][C];
#pragma GCC unroll 6
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[q][c] = load_lanes(out[q] + channel + LANES * c);
  const float* value = values.data + channel;
  for (int64_t j = 0; j < count; j++, value += values.stride) {
    f32xN part[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) part[c] = pinned(load_lanes(value + LANES * c));
#pragma GCC unroll 6
    for (int q = 0; q < Q; q++) {
      f32xN weight = pinned(broadcast_lanes(weights[q][j]));
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[q][c] = multiply_add_lanes(weight, part[c], acc[q][c]);
    }
  }
#pragma GCC unroll 6
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store_lanes(out[q] + channel + LANES * c, acc[q][c]);
}

// The same for `width` channels, a multiple of 16.
template <int Q>
void add_values(const float* const* weights, Rows values, int64_t count, int64_t width,
                float* const* out) {
  int64_t i = 0;
  for (; i + LANES * VALUE_VECTORS <= width; i += LANES * VALUE_VECTORS)
    add_channels<Q, VALUE_VECTORS>(weights, values, count, out, i);
  for (; i < width; i += LANES) add_channels<Q, 1>(weights, values, count, out, i);
}

}  // namespace
