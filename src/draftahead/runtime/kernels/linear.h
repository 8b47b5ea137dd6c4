// Linear layers for a few rows: a weight is loaded once and used for all of them.

#pragma once

#include "vectors.h"

namespace {

// Weights of one linear layer, [out, in] row by row: float32, or int8 in groups with a scale each.
struct Weights {
  const void* data;      // float [out][in], or uint8 [out][in] (the value plus 128)
  const float* scales;   // null for float32; [out][in / group] for int8
  const float* bias;     // [out] or null
  int64_t out, in;
  int64_t group;         // a multiple of 64
};

constexpr int CHUNK = 64;  // weights that one instruction multiplies and adds

// Rows of activations, as the weights want them. For int8 each group of a row has a scale of its
// own, and `start` undoes the 128 that the unsigned weights carry.
struct Rows {
  const float* x;        // [rows][in]
  int64_t step;          // from a row to the next; 0 where there is one row only
  int8_t* q;             // [rows][in]
  float* scales;         // [rows][in / group]
  int32_t* start;        // [rows][in / group][16]
};

void quantize_row(const float* x, int64_t in, int64_t group, int8_t* q, float* scales,
                  int32_t* start) {
  for (int64_t g = 0; g < in / group; g++, x += group, q += group, start += 16) {
    f16 most = {}, zero = {};
    for (int64_t i = 0; i < group; i += 16) {
      f16 v = load(x + i), size = v < 0.0f ? -v : v;
      most = size > most ? size : most;
      zero += v * 0.0f;
    }
    float top = biggest(most), inverse = top > 0 ? 127.0f / top : 0.0f;
    // NaN and infinity have no whole number; through the scale they reach every result.
    scales[g] = top / 127.0f + sum(zero);
    int32_t lanes[16] = {0};
    for (int64_t i = 0; i < group; i += 16) {
      f16 whole = load(x + i) * inverse + 12582912.0f;  // rounds to the nearest whole number
      i16 value = __builtin_convertvector(whole - 12582912.0f, i16);
      *reinterpret_cast<b16u*>(q + i) = __builtin_convertvector(value, b16u);
      for (int four = 0; four < 4; four++)
        lanes[(i / 4 + four) % 16] += value[4 * four] + value[4 * four + 1] + value[4 * four + 2] +
                                      value[4 * four + 3];
    }
    for (int lane = 0; lane < 16; lane++) start[lane] = -128 * lanes[lane];
  }
}

// Adds inputs [k0, k1) of outputs [n0, n0 + NB). What lies at `ahead`, as far as these weights are
// long, is fetched into the second-level cache meanwhile (the first is too small for it): so
// compute and memory overlap.
template <int R, int NB>
inline __attribute__((always_inline)) void dot_f32(const Weights& w, const Rows& rows, int64_t n0,
                                                   int64_t k0, int64_t k1, const float* ahead,
                                                   f16 (&acc)[NB][R]) {
  const float* data = static_cast<const float*>(w.data);
  const int64_t in = w.in;
  int64_t k = k0;
  for (; k + 16 <= k1; k += 16) {
    f16 wv[NB];
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) {
      wv[i] = load(data + (n0 + i) * in + k);
      __builtin_prefetch(ahead + i * in + (k - k0), 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      f16 xv = held(load(rows.x + r * rows.step + k));
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) acc[i][r] = fused(wv[i], xv, acc[i][r]);
    }
  }
  if (k < k1) {
    for (int i = 0; i < NB; i++) {
      f16 wv = load_some(data + (n0 + i) * in + k, k1 - k);
      for (int r = 0; r < R; r++)
        acc[i][r] = fused(wv, load_some(rows.x + r * rows.step + k, k1 - k), acc[i][r]);
    }
  }
}

template <int R, int NB>
inline __attribute__((always_inline)) void dot_int8(const Weights& w, const Rows& rows, int64_t n0,
                                                    f16 (&acc)[NB][R]) {
  const uint8_t* data = static_cast<const uint8_t*>(w.data);
  const int64_t in = w.in, groups = in / w.group;
  for (int64_t g = 0; g < groups; g++) {
    i16 total[NB][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      i16 begin;
      std::memcpy(&begin, rows.start + (r * groups + g) * 16, sizeof begin);
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) total[i][r] = begin;
    }
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += CHUNK) {
#ifdef __AVX512VNNI__
      __m512i wv[NB];
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) {
        wv[i] = _mm512_loadu_si512(data + (n0 + i) * in + k);
        __builtin_prefetch(data + (n0 + i + 2 * NB) * in + k, 0, 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        __m512i q = (__m512i)held((f16)_mm512_loadu_si512(rows.q + r * in + k));
#pragma GCC unroll 8
        for (int i = 0; i < NB; i++)
          total[i][r] = (i16)_mm512_dpbusd_epi32((__m512i)total[i][r], wv[i], q);
      }
#else
      for (int r = 0; r < R; r++)
        for (int i = 0; i < NB; i++)
          for (int j = 0; j < CHUNK; j++)
            total[i][r][j / 4] += int32_t(data[(n0 + i) * in + k + j]) * rows.q[r * in + k + j];
#endif
    }
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) {
      float scale = w.scales[(n0 + i) * groups + g];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        acc[i][r] = fused(__builtin_convertvector(total[i][r], f16),
                          all(scale * rows.scales[r * groups + g]), acc[i][r]);
    }
  }
}

enum class Then { Store, AddTo };  // what becomes of a result: written, or added to what is there

// Sums up the lanes, adds the bias, and puts the results where they belong.
template <int R, int NB>
inline __attribute__((always_inline)) void finish(const Weights& w, const f16 (&acc)[NB][R],
                                                  float* y, int64_t stride, int64_t n0, Then then) {
  constexpr int COUNT = NB * R;
  float sums[COUNT];
  const f16* flat = &acc[0][0];
#pragma GCC unroll 8
  for (int j = 0; j + 8 <= COUNT; j += 8) sum8(flat + j, sums + j);
#pragma GCC unroll 8
  for (int j = COUNT / 8 * 8; j < COUNT; j++) sums[j] = sum(flat[j]);
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      float value = sums[i * R + r] + (w.bias ? w.bias[n0 + i] : 0.0f);
      float* at = y + r * stride + n0 + i;
      *at = then == Then::AddTo ? *at + value : value;
    }
}

template <int R, int NB, bool INT8>
inline __attribute__((always_inline)) void block(const Weights& w, const Rows& rows, float* y,
                                                 int64_t stride, int64_t n0, Then then) {
  f16 acc[NB][R];
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[i][r] = f16{};
  if constexpr (INT8) {
    dot_int8<R, NB>(w, rows, n0, acc);
  } else {
    const float* ahead = static_cast<const float*>(w.data) + (n0 + 2 * NB) * w.in;
    if constexpr (R == 1) {
      // As if there were two rows, both the same one: weights that are asked for twice arrive
      // sooner than those asked for once (by a tenth of a pass, on an AMD Zen 4).
      f16 twice[NB][2] = {};
      dot_f32<2, NB>(w, rows, n0, 0, w.in, ahead, twice);
      for (int i = 0; i < NB; i++) acc[i][0] = twice[i][0];
    } else {
      dot_f32<R, NB>(w, rows, n0, 0, w.in, ahead, acc);
    }
  }
  finish<R, NB>(w, acc, y, stride, n0, then);
}

constexpr int64_t FIRST_LEVEL = 26 * 1024;  // bytes of rows that stay in the first-level cache
constexpr int64_t DEEP = 512;               // inputs at a time where whole rows would not
constexpr int GROUP = 8;                    // blocks that take turns, so that the rows are used

// The same sums in the same order, with rows too long for the cache taken in parts. The sums so
// far wait in memory, lane by lane.
template <int R, int NB>
void deep_group(const Weights& w, const Rows& rows, float* y, int64_t stride, int64_t n0,
                Then then) {
  f16 kept[GROUP][NB][R];
  const float* data = static_cast<const float*>(w.data);
  for (int64_t k0 = 0; k0 < w.in; k0 += DEEP) {
    const bool last = k0 + DEEP >= w.in;
    for (int g = 0; g < GROUP; g++) {
      f16 acc[NB][R];
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[i][r] = k0 ? kept[g][i][r] : f16{};
      const int64_t n = n0 + g * NB;
      // Two turns on: in this part, or at the start of the next one.
      const int64_t turn = g + 2 < GROUP || last ? (g + 2) * NB * w.in + k0
                                                 : (g + 2 - GROUP) * NB * w.in + k0 + DEEP;
      const int64_t start = last && g + 2 >= GROUP ? turn - k0 : turn;
      dot_f32<R, NB>(w, rows, n, k0, last ? w.in : k0 + DEEP, data + n0 * w.in + start, acc);
      if (last) {
        finish<R, NB>(w, acc, y, stride, n, then);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) kept[g][i][r] = acc[i][r];
      }
    }
  }
}

template <int R, int NB, bool INT8>
void span(const Weights& w, const Rows& rows, float* y, int64_t stride, int64_t from, int64_t to,
          Then then) {
  int64_t n = from;
  if constexpr (!INT8)
    if (R * w.in * int64_t(sizeof(float)) > FIRST_LEVEL)
      for (; n + GROUP * NB <= to; n += GROUP * NB) deep_group<R, NB>(w, rows, y, stride, n, then);
  for (; n + NB <= to; n += NB) block<R, NB, INT8>(w, rows, y, stride, n, then);
  for (; n < to; n++) block<R, 1, INT8>(w, rows, y, stride, n, then);
}

typedef void (*Span)(const Weights&, const Rows&, float*, int64_t, int64_t, int64_t, Then);
// As many outputs at a time as keep R times that many sums in registers.
constexpr Span FLOATS[9] = {nullptr,           span<1, 8, false>, span<2, 8, false>,
                            span<3, 6, false>, span<4, 6, false>, span<5, 4, false>,
                            span<6, 4, false>, span<7, 3, false>, span<8, 3, false>};
// int8 keeps whole-number sums beside the others.
constexpr Span BYTES[9] = {nullptr,          span<1, 8, true>, span<2, 6, true>,
                           span<3, 4, true>, span<4, 3, true>, span<5, 2, true>,
                           span<6, 2, true>, span<7, 2, true>, span<8, 2, true>};

// Outputs [from, to) of a linear layer for all rows; weights that 8 rows have used are still in
// the cache for the next 8.
void linear_part(const Weights& w, const Rows& rows, int64_t count, float* y, int64_t stride,
                 int64_t from, int64_t to, Then then) {
  const int64_t groups = w.group ? w.in / w.group : 0, chunk = 48;
  const Span* spans = w.scales ? BYTES : FLOATS;
  if (count <= 8) return spans[count](w, rows, y, stride, from, to, then);
  for (int64_t n = from; n < to; n += chunk)
    for (int64_t r = 0; r < count; r += 8) {
      int64_t some = count - r < 8 ? count - r : 8;
      Rows part = {rows.x + r * w.in, some > 1 ? w.in : 0, rows.q + r * w.in,
                   rows.scales + r * groups, rows.start + r * groups * 16};
      spans[some](w, part, y + r * stride, stride, n, n + chunk < to ? n + chunk : to, then);
    }
}

}  // namespace
