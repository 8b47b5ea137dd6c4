// Linear layers for a few rows: a weight is loaded once and used for all of them.

#pragma once

#include "vectors.h"

namespace {

// Weights of one linear layer: float32 [out][in] as the model has them; or int8 in groups with a
// scale each, packed in panels of some outputs, so that sums need no adding up across lanes and
// memory is read from front to end.
struct Weights {
  const void* data;      // float [out][in], or uint8 [panels][in / 4][PANEL][4] (the value plus 128)
  const float* scales;   // null for float32; [panels][in / group][PANEL] for int8
  const float* bias;     // [out] or null
  int64_t out, in;
  int64_t group;         // a multiple of 64
};

constexpr int PANEL = 48;  // outputs side by side, the last ones of a layer padded
constexpr int CHUNK = 64;  // weights that one instruction multiplies and adds

// Rows of activations, as the weights want them. For int8 each group of a row has a scale of its
// own, and `start` undoes the 128 that the unsigned weights carry.
struct Rows {
  const float* x;        // [rows][in]
  int64_t step;          // from a row to the next; 0 where there is one row only
  int8_t* q;             // [rows][in]
  float* scales;         // [rows][in / group]
  int32_t* start;        // [rows][in / group]
};

void quantize_row(const float* x, int64_t in, int64_t group, int8_t* q, float* scales,
                  int32_t* start) {
  for (int64_t g = 0; g < in / group; g++, x += group, q += group) {
    f16 most = {}, zero = {};
    for (int64_t i = 0; i < group; i += 16) {
      f16 v = load(x + i), size = v < 0.0f ? -v : v;
      most = size > most ? size : most;
      zero += v * 0.0f;
    }
    float top = biggest(most), inverse = top > 0 ? 127.0f / top : 0.0f;
    // NaN and infinity have no whole number; through the scale they reach every result.
    scales[g] = top / 127.0f + sum(zero);
    i16 total = {};
    for (int64_t i = 0; i < group; i += 16) {
      f16 whole = load(x + i) * inverse + 12582912.0f;  // rounds to the nearest whole number
      i16 value = __builtin_convertvector(whole - 12582912.0f, i16);
      *reinterpret_cast<b16u*>(q + i) = __builtin_convertvector(value, b16u);
      total += value;
    }
    start[g] = 0;
    for (int lane = 0; lane < 16; lane++) start[g] -= 128 * total[lane];
  }
}

// What is needed next is fetched into the second-level cache meanwhile (the first is too small for
// it), so that compute and memory overlap. Some fetches come to nothing when many are under way, so
// everything is asked for three times: three turns before its own, two, and one. On an AMD Zen 4
// the linear layers of a pass of four rows took 15.8 ms when asked for once, and take 12.5.
constexpr int ASKS = 3;

// Adds inputs [k0, k1) of outputs [n0, n0 + NB). `ahead`: where the weights of the turn after next
// begin; those of the turns before and after it lie as far apart as blocks do.
template <int R, int NB>
inline __attribute__((always_inline)) void dot_f32(const Weights& w, const Rows& rows, int64_t n0,
                                                   int64_t k0, int64_t k1, const float* ahead,
                                                   f16 (&sums)[NB][R]) {
  const float* data = static_cast<const float*>(w.data);
  const int64_t in = w.in;
  f16 acc[NB][R];  // a copy, so that no address of it is known: it stays in registers
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[i][r] = sums[i][r];
  int64_t k = k0;
  for (; k + 16 <= k1; k += 16) {
    f16 wv[NB];
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) {
      wv[i] = held(load(data + (n0 + i) * in + k));
      __builtin_prefetch(ahead + i * in + (k - k0), 0, 2);
      __builtin_prefetch(ahead - NB * in + i * in + (k - k0), 0, 2);
      __builtin_prefetch(ahead + NB * in + i * in + (k - k0), 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      f16 xv = held(load(rows.x + r * rows.step + k));
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) acc[i][r] = fused(wv[i], xv, acc[i][r]);
    }
  }
  if (k < k1) {
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) {
      f16 wv = load_some(data + (n0 + i) * in + k, k1 - k);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        acc[i][r] = fused(wv, load_some(rows.x + r * rows.step + k, k1 - k), acc[i][r]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[i][r] = acc[i][r];
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

template <int R, int NB>
inline __attribute__((always_inline)) void block(const Weights& w, const Rows& rows, float* y,
                                                 int64_t stride, int64_t n0, Then then) {
  f16 acc[NB][R];
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[i][r] = f16{};
  const float* ahead = static_cast<const float*>(w.data) + (n0 + 2 * NB) * w.in;
  dot_f32<R, NB>(w, rows, n0, 0, w.in, ahead, acc);
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
      // The next turns are in this part, or soon in the next one, or in the next blocks' first.
      const bool wraps = g + ASKS >= GROUP;
      const int64_t turn = !wraps ? g + 2 : last ? g + ASKS + 1 : g + ASKS + 1 - GROUP;
      const int64_t part = !wraps ? k0 : last ? 0 : k0 + DEEP;
      const float* ahead = data + (n0 + turn * NB) * w.in + part;
      dot_f32<R, NB>(w, rows, n, k0, last ? w.in : k0 + DEEP, ahead, acc);
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

template <int R, int NB>
void span(const Weights& w, const Rows& rows, float* y, int64_t stride, int64_t from, int64_t to,
          Then then) {
  int64_t n = from;
  if (R * w.in * int64_t(sizeof(float)) > FIRST_LEVEL)
    for (; n + GROUP * NB <= to; n += GROUP * NB) deep_group<R, NB>(w, rows, y, stride, n, then);
  for (; n + NB <= to; n += NB) block<R, NB>(w, rows, y, stride, n, then);
  for (; n < to; n++) block<R, 1>(w, rows, y, stride, n, then);
}

// Adds four products of bytes to each of 16 whole numbers. `four`: of a row, for all lanes.
inline __attribute__((always_inline)) i16 dot4(i16 total, const uint8_t* w, i16 four) {
#ifdef __AVX512VNNI__
  return (i16)_mm512_dpbusd_epi32((__m512i)total, _mm512_loadu_si512(w), (__m512i)four);
#else
  for (int lane = 0; lane < 16; lane++)
    for (int j = 0; j < 4; j++)
      total[lane] += int32_t(w[4 * lane + j]) * int8_t(uint32_t(four[0]) >> 8 * j);
  return total;
#endif
}

// One panel for R rows. Within a group the sums are whole numbers, exact in any order.
template <int R>
inline __attribute__((always_inline)) void panel(const Weights& w, const Rows& rows, float* y,
                                                 int64_t stride, int64_t n0, Then then) {
  constexpr int NB = PANEL / 16;
  const int64_t in = w.in, groups = in / w.group;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + n0 * in;
  const float* scales = w.scales + n0 * groups;
  // Another core may have used these results last, and giving them up takes a while.
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) __builtin_prefetch(y + r * stride + n0 + 16 * i, 1, 3);
  f16 acc[NB][R];
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[i][r] = f16{};
  for (int64_t g = 0; g < groups; g++) {
    i16 total[NB][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) total[i][r] = i16{} + rows.start[r * groups + g];
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 4, data += 4 * PANEL) {
#pragma GCC unroll 8
      for (int i = 0; i < NB; i++) {
        __builtin_prefetch(data + 64 * i + 4096, 0, 2);
        __builtin_prefetch(data + 64 * i + 8192, 0, 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t bytes;
        std::memcpy(&bytes, rows.q + r * in + k, sizeof bytes);
        i16 four = (i16)held((f16)(i16{} + bytes));
#pragma GCC unroll 8
        for (int i = 0; i < NB; i++) total[i][r] = dot4(total[i][r], data + 64 * i, four);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < NB; i++) {
      f16 scale = load(scales + g * PANEL + 16 * i);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        acc[i][r] = fused(__builtin_convertvector(total[i][r], f16),
                          scale * rows.scales[r * groups + g], acc[i][r]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < NB; i++) {
    const int64_t n = n0 + 16 * i, left = w.out - n;
    if (left <= 0) break;
    const int64_t some = left < 16 ? left : 16;
    f16 bias = w.bias ? load_some(w.bias + n, some) : f16{};
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      float* at = y + r * stride + n;
      f16 value = acc[i][r] + bias;
      if (then == Then::AddTo) value += load_some(at, some);
      std::memcpy(at, &value, some * sizeof(float));
    }
  }
}

template <int R>
void panels(const Weights& w, const Rows& rows, float* y, int64_t stride, int64_t from, int64_t to,
            Then then) {
  for (int64_t n = from; n < to; n += PANEL) panel<R>(w, rows, y, stride, n, then);
}

typedef void (*Span)(const Weights&, const Rows&, float*, int64_t, int64_t, int64_t, Then);
// As many outputs at a time as keep R times that many sums in registers.
constexpr Span FLOATS[9] = {nullptr,    span<1, 4>, span<2, 4>, span<3, 4>, span<4, 4>,
                            span<5, 4>, span<6, 4>, span<7, 3>, span<8, 2>};
constexpr Span BYTES[9] = {nullptr,   panels<1>, panels<2>, panels<3>, panels<4>,
                           panels<5>, panels<6>, panels<7>, panels<8>};

// Outputs [from, to) of a linear layer for all rows, from a multiple of PANEL on; weights that 8
// rows have used are still in the cache for the next 8.
void linear_part(const Weights& w, const Rows& rows, int64_t count, float* y, int64_t stride,
                 int64_t from, int64_t to, Then then) {
  const int64_t groups = w.group ? w.in / w.group : 0, chunk = PANEL;
  const Span* spans = w.scales ? BYTES : FLOATS;
  if (count <= 8) return spans[count](w, rows, y, stride, from, to, then);
  for (int64_t n = from; n < to; n += chunk)
    for (int64_t r = 0; r < count; r += 8) {
      int64_t some = count - r < 8 ? count - r : 8;
      Rows part = {rows.x + r * w.in, some > 1 ? w.in : 0, rows.q + r * w.in,
                   rows.scales + r * groups, rows.start + r * groups};
      spans[some](w, part, y + r * stride, stride, n, n + chunk < to ? n + chunk : to, then);
    }
}

}  // namespace
