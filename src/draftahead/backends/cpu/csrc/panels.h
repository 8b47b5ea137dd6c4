// Quantized weights in panels of 16 outputs, multiplied with inputs as integers.
//
// A panel holds 16 outputs side by side, one in each SIMD lane, in units of 32 inputs: all loads
// are in address order and no sum ever crosses a lane. Within a unit every sum is of whole numbers,
// so its bits depend neither on the number of tokens nor on the instruction set; units are added in
// float32, in ascending order.
//
// An input is an integer with a scale per unit: of 8 bits, or of 24 bits as three limbs of 8, each
// of which is multiplied like an int8 input. 24 bits are as exact as float32, whose sums round more
// than the integers lose. For K kinds, whose units have integer scales in groups of 8, int8 inputs
// share a scale in such a group: its sum is of whole numbers too, and costs less.
//
//   quantize_units: inputs of a token -> Unit<LIMBS>
//   make_panel:     rows as in a GGUF file -> a panel
//   panel_outputs:  panel_block<KIND, LIMBS, T>, for up to max_panel_tokens at a time
//                     add_group, of K kinds with int8 inputs | add_unit

#pragma once

#include <cmath>

#include "blocks.h"
#include "dot.h"

namespace {

constexpr int64_t UNIT = 32;        // inputs that share a scale
constexpr int64_t PANEL_ROWS = 16;  // outputs of a panel

// ----------------------------------------------------------------------------------------- inputs

// 32 inputs of a token: scale * (65536 * x[0] + 256 * x[1] + x[2]), or scale * x[0].
template <int LIMBS>
struct Unit {
  float scale;
  float sum;                        // of the 32 inputs
  int32_t negative_sums[3][LIMBS];  // minus the sums of x, for weights with an offset: halves, all
  // Of the first limb, for int8 inputs that share a scale: of halves; of this unit and the next.
  int16_t half_sums[2], pair_sums[2];
  int8_t x[LIMBS][UNIT];
};

// The scale of 8 bits is the largest input over 127. That of 24 bits is a power of two, so that
// only what lies below the last bit is rounded; the integers stay below 2^23 - 2^15 - 2^7, so that
// the first limb is at most 127.
template <int LIMBS>
inline void unit_scale(float largest, float* scale, float* inverse) {
  *scale = *inverse = 0.0f;
  if (!(largest >= 1e-30f && largest < INFINITY)) return;
  if (LIMBS == 1) {
    *scale = largest / 127.0f, *inverse = 127.0f / largest;
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  // The power of two above `largest`, or the next one if its mantissa is among the largest 2^-6.
  const uint32_t exponent = (bits >> 23) + 1 + ((bits & 0x7fffff) >= 0x7e0000);
  const uint32_t scale_bits = (exponent - 23) << 23, inverse_bits = (277 - exponent) << 23;
  std::memcpy(scale, &scale_bits, sizeof bits);
  std::memcpy(inverse, &inverse_bits, sizeof bits);
}

// The sum of 16 bytes that were stored together: as many are loaded, which does not wait for
// memory.
inline __attribute__((always_inline)) int32_t sum_of_bytes(const int8_t* x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  __m128i v = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), bytes);
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
#else
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += x[i];
  return sum;
#endif
}

// The integers of a unit and their sums.
template <int LIMBS>
inline void quantize_unit(const float* x, float scale, float inverse, Unit<LIMBS>& unit) {
  for (int half = 0; half < 2; half++) {
    const i32x16 integers = round_to_integers(load(x + 16 * half) * inverse);
    if (LIMBS == 1) {
      store_bytes(unit.x[0] + 16 * half, integers);
      continue;
    }
    const i32x16 digits = integers + 0x8080;
    store_bytes(unit.x[0] + 16 * half, digits >> 16);
    if (LIMBS > 1) store_bytes(unit.x[LIMBS > 1] + 16 * half, ((digits >> 8) & 255) - 128);
    if (LIMBS > 2) store_bytes(unit.x[LIMBS > 2 ? 2 : 0] + 16 * half, (digits & 255) - 128);
  }
  int32_t total = 0;
  for (int l = 0; l < LIMBS; l++) {
    const int32_t sums[2] = {sum_of_bytes(unit.x[l]), sum_of_bytes(unit.x[l] + 16)};
    unit.negative_sums[0][l] = -sums[0], unit.negative_sums[1][l] = -sums[1];
    unit.negative_sums[2][l] = -sums[0] - sums[1];
    total = 256 * total + sums[0] + sums[1];
    if (l == 0) unit.half_sums[0] = int16_t(sums[0]), unit.half_sums[1] = int16_t(sums[1]);
  }
  unit.scale = scale;
  unit.sum = scale * float(total);
}

// The inputs of a token; `sharing`: how many units share a scale. The last ones may be fewer.
template <int LIMBS>
void quantize_units(const float* x, int64_t in, int64_t sharing, Unit<LIMBS>* units) {
  for (int64_t first = 0, num_units = in / UNIT; first < num_units; first += sharing) {
    const int64_t end = first + sharing < num_units ? first + sharing : num_units;
    f32x16 largest = {}, not_finite = {};
    for (int64_t i = first * UNIT; i < end * UNIT; i += 16) {
      const f32x16 a = absolute(load(x + i));
      largest = a > largest ? a : largest;
      not_finite += a * 0.0f;
    }
    float scale, inverse;
    unit_scale<LIMBS>(max_lane(largest), &scale, &inverse);
    // NaN and infinity have no integer: through the scale they make every result NaN.
    if (any(not_finite != 0.0f)) scale = NAN;
    for (int64_t u = first; u < end; u++) quantize_unit(x + u * UNIT, scale, inverse, units[u]);
    for (int64_t u = first; u < end; u++) {
      units[u].pair_sums[0] = int16_t(units[u].half_sums[0] + units[u].half_sums[1]);
      if (u > first) units[u - 1].pair_sums[1] = units[u].pair_sums[0];
    }
  }
}

// ------------------------------------------------------------------------------------------ kinds

// How a kind of weights lies in a panel: group by group, first a group's scales, then its integers
// unit by unit. An integer has up to 8 bits: four of all inputs (two inputs a byte), then the bits
// above them. A weight is scale * (integer - offset) or scale * integer - minimum.
struct PanelKind {
  int64_t units;        // of a group
  int64_t scale_bytes;  // of a group
  int64_t unit_bytes;   // of the integers of a unit
  constexpr int64_t group_bytes() const { return scale_bytes + units * unit_bytes; }
};

constexpr PanelKind panel_kind(int64_t kind) {
  switch (kind) {
    case Q4_0:
      return {2, 64, 256};
    case Q4_1:
      return {1, 64, 256};
    case Q5_0:
      return {2, 64, 320};
    case Q5_1:
      return {1, 64, 320};
    case Q8_0:
      return {2, 64, 512};
    case Q4_K:
      return {8, 320, 256};
    case Q5_K:
      return {8, 320, 320};
    case Q6_K:
      return {8, 320, 384};
    default:
      return {0, 0, 0};
  }
}
inline int64_t panel_bytes(int64_t kind, int64_t in) {
  const PanelKind k = panel_kind(kind);
  return (in / UNIT + k.units - 1) / k.units * k.group_bytes();
}

constexpr bool has_minimum(int64_t kind) {
  return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K;
}
// Whether units have integer scales, and the scales and minima of 8 units share a factor.
constexpr bool is_k_kind(int64_t kind) { return kind == Q4_K || kind == Q5_K || kind == Q6_K; }
// Whether each half of a unit has a scale.
constexpr bool has_halves(int64_t kind) { return kind == Q6_K; }
// Log 2 of what was added to a weight's integer so that it is not negative; 0: nothing.
constexpr int offset_bits(int64_t kind) {
  switch (kind) {
    case Q4_0:
      return 3;
    case Q5_0:
      return 4;
    case Q6_K:
      return 5;
    case Q8_0:
      return 7;
    default:
      return 0;
  }
}

// The integers of a unit as bytes: integers[g], lane by lane, the inputs 4 g to 4 g + 3.
template <int64_t KIND>
inline __attribute__((always_inline)) void unit_integers(const uint8_t* data, u8x64* integers) {
  if (KIND == Q8_0) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) integers[g] = load_bytes(data + 64 * g);
    return;
  }
  const u8x64 low = u8x64{} + 15;
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    const u8x64 v = load_bytes(data + 64 * g);
    integers[g] = v & low;
    integers[g + 4] = shift_right(v, 4) & low;
  }
  if (KIND == Q5_0 || KIND == Q5_1 || KIND == Q5_K) {
    const u8x64 high = load_bytes(data + 256), bit = u8x64{} + 16;
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++)
      integers[g] |= (g < 4 ? shift_left(high, 4 - g) : shift_right(high, g - 4)) & bit;
  }
  if (KIND == Q6_K) {
    const u8x64 bits = u8x64{} + 48;
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
      const u8x64 high = load_bytes(data + 256 + 64 * (g / 4));
      const int at = 2 * (g % 4);
      integers[g] |= (at < 4 ? shift_left(high, 4 - at) : shift_right(high, at - 4)) & bits;
    }
  }
}

// What a unit's sums are multiplied with, lane by lane.
struct UnitScales {
  f32x16 scale[2];          // of each half, for kinds with halves; else scale[0]
  f32x16 negative_minimum;  // only of kinds that have one
};

// Scales of a group of units.
template <int64_t KIND>
struct GroupScales {
  const uint8_t* group;
  f32x16 scale = {}, negative_minimum = {};  // of K kinds: what their units' integers multiply

  inline __attribute__((always_inline)) explicit GroupScales(const uint8_t* g) : group(g) {
    if (!is_k_kind(KIND)) return;
    scale = from_f16(g);
    if (has_minimum(KIND)) negative_minimum = -from_f16(g + 32);
  }

  inline __attribute__((always_inline)) UnitScales unit(int64_t i) const {
    UnitScales found = {};
    if (KIND == Q4_0 || KIND == Q5_0 || KIND == Q8_0) {
      found.scale[0] = from_f16(group + 32 * i);
    } else if (KIND == Q4_1 || KIND == Q5_1) {
      found.scale[0] = from_f16(group);
      found.negative_minimum = from_f16(group + 32);
    } else if (KIND == Q6_K) {
      found.scale[0] = scale * from_s8(group + 64 + 32 * i);
      found.scale[1] = scale * from_s8(group + 80 + 32 * i);
    } else {
      found.scale[0] = scale * from_u8(group + 64 + 32 * i);
      found.negative_minimum = negative_minimum * from_u8(group + 80 + 32 * i);
    }
    return found;
  }
};

// --------------------------------------------------------------------------------------- products

// Bytes of a panel that are prefetched ahead: the next panels. Fewer come too late, more fall out
// of the cache before they are used.
#ifndef AHEAD
constexpr int64_t AHEAD = 8192;
#endif

inline __attribute__((always_inline)) void prefetch_ahead(const uint8_t* p, int64_t bytes) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + AHEAD + i);
}

template <int LIMBS>
inline __attribute__((always_inline)) f32x16 combined(const i32x16* limbs) {
  if (LIMBS == 1) return __builtin_convertvector(limbs[0], f32x16);
  return multiply_add(__builtin_convertvector(limbs[0], f32x16), broadcast(65536.0f),
                      __builtin_convertvector((limbs[1] << 8) + limbs[2], f32x16));
}

// Adds a unit's products to the sums of T tokens.
template <int64_t KIND, int LIMBS, int T>
inline __attribute__((always_inline)) void add_unit(const u8x64* integers, const UnitScales& scales,
                                                    const Unit<LIMBS>* units, int64_t stride,
                                                    f32x16* sums) {
  constexpr int HALVES = has_halves(KIND) ? 2 : 1, offset = offset_bits(KIND);
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const Unit<LIMBS>& unit = units[t * stride];
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      i32x16 limbs[LIMBS];
#pragma GCC unroll 3
      for (int l = 0; l < LIMBS; l++) {
        limbs[l] = i32x16{};
        if (offset) limbs[l] = broadcast(unit.negative_sums[HALVES == 2 ? half : 2][l]) << offset;
#pragma GCC unroll 8
        for (int g = half * 4; g < (half + 1) * 8 / HALVES; g++)
          limbs[l] = dot4<offset == 7>(limbs[l], integers[g], unit.x[l] + 4 * g);
      }
      sums[t] =
          multiply_add(combined<LIMBS>(limbs), scales.scale[half] * broadcast(unit.scale), sums[t]);
    }
    if (has_minimum(KIND))
      sums[t] = multiply_add(scales.negative_minimum, broadcast(unit.sum), sums[t]);
  }
}

// Adds the products of a group of 8 units of a K kind, with int8 inputs that share a scale, to the
// sums of T tokens. The scales of the units are integers: only the group's sum is made a float.
template <int64_t KIND, int T>
inline __attribute__((always_inline)) void add_group(const uint8_t* group, const Unit<1>* units,
                                                     int64_t stride, f32x16* sums) {
  constexpr PanelKind kind = panel_kind(KIND);
  constexpr int HALVES = has_halves(KIND) ? 2 : 1;
  i32x16 totals[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) totals[t] = i32x16{};
  prefetch_ahead(group, kind.scale_bytes);
  const uint8_t *data = group + kind.scale_bytes, *scales = group + 64;
  for (int64_t i = 0; i < kind.units; i++, data += kind.unit_bytes) {
    prefetch_ahead(data, kind.unit_bytes);
    u8x64 integers[8];
    unit_integers<KIND>(data, integers);
    const i32x16 scale[2] = {
        HALVES == 2 ? integers_of_s8(scales + 32 * i) : integers_of_u8(scales + 32 * i),
        HALVES == 2 ? integers_of_s8(scales + 32 * i + 16) : i32x16{}};
    const int8_t* x[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      x[t] = units[t * stride + i].x[0];
      asm("" : "+r"(x[t]));  // else a register for each 4 g, most of which are in memory
    }
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      i32x16 products[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) products[t] = i32x16{};
      // All tokens in turn: a sum waits for its last product.
#pragma GCC unroll 8
      for (int g = half * 4; g < (half + 1) * 8 / HALVES; g++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
          products[t] = dot4<false>(products[t], integers[g], x[t] + 4 * g);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) totals[t] += products[t] * scale[half];
    }
  }
  // What the inputs' sums are multiplied with, in pairs: the minima of two units, or the scales of
  // a unit's halves for the offset.
  i32x16 pairs[8];
  constexpr int step = HALVES == 2 ? 1 : 2;
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += step)
    pairs[i] =
        HALVES == 2
            ? pair_of(integers_of_s8(scales + 32 * i), integers_of_s8(scales + 32 * i + 16))
            : pair_of(integers_of_u8(scales + 16 + 32 * i), integers_of_u8(scales + 48 + 32 * i));
  const f32x16 factor = from_f16(group);
  const f32x16 negative_minimum = HALVES == 2 ? f32x16{} : -from_f16(group + 32);
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const Unit<1>* of_token = units + t * stride;
    i32x16 total = {};
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += step)
      total = dot2(total, pairs[i], HALVES == 2 ? of_token[i].half_sums : of_token[i].pair_sums);
    const f32x16 scale = broadcast(of_token->scale);
    if (HALVES == 2) totals[t] -= total << offset_bits(KIND);
    sums[t] = multiply_add(__builtin_convertvector(totals[t], f32x16), factor * scale, sums[t]);
    if (HALVES == 1)
      sums[t] =
          multiply_add(__builtin_convertvector(total, f32x16), negative_minimum * scale, sums[t]);
  }
}

// Adds the products of a panel, or a part of it, to the sums of its 16 outputs for T tokens.
template <int64_t KIND, int LIMBS, int T>
void panel_block(const uint8_t* panel, int64_t num_units, const Unit<LIMBS>* units, int64_t stride,
                 f32x16* out) {
  constexpr PanelKind kind = panel_kind(KIND);
  f32x16 sums[T];  // a copy that stays in registers
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) sums[t] = out[t];
  for (int64_t u = 0; u < num_units; u += kind.units, panel += kind.group_bytes()) {
    if constexpr (LIMBS == 1 && is_k_kind(KIND)) {
      add_group<KIND, T>(panel, units, stride, sums);
      units += kind.units;
      continue;
    }
    const GroupScales<KIND> scales(panel);
    prefetch_ahead(panel, kind.scale_bytes);
    const uint8_t* data = panel + kind.scale_bytes;
    // The last group of a kind with two units may have one.
    const int64_t count = num_units - u < kind.units ? num_units - u : kind.units;
    for (int64_t i = 0; i < count; i++, data += kind.unit_bytes, units++) {
      prefetch_ahead(data, kind.unit_bytes);
      u8x64 integers[8];
      unit_integers<KIND>(data, integers);
      add_unit<KIND, LIMBS, T>(integers, scales.unit(i), units, stride, sums);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) out[t] = sums[t];
}

// ---------------------------------------------------------------------------------------- outputs

// Tokens of one pass over a panel: their sums and limbs fit the registers.
constexpr int64_t max_panel_tokens(int limbs) {
  return REGISTERS < 32 ? (limbs == 1 ? 4 : 2) : limbs == 1 ? 8 : 4;
}

template <int LIMBS>
using PanelBlock = void (*)(const uint8_t*, int64_t, const Unit<LIMBS>*, int64_t, f32x16*);

// Tokens of the next pass, of those that are left. There is no code for every number: each takes a
// second to compile for all kinds, and a panel that was just read is in the cache.
constexpr int64_t pass_tokens(int64_t left, int64_t most) {
  return left >= most ? most : left < 4 ? left : 4;
}

template <int64_t KIND, int LIMBS>
PanelBlock<LIMBS> panel_block_of(int64_t num_tokens) {
  constexpr int most = max_panel_tokens(LIMBS);
  switch (num_tokens) {
    case 1:
      return panel_block<KIND, LIMBS, 1>;
    case 2:
      return panel_block<KIND, LIMBS, 2>;
    case 3:
      return panel_block<KIND, LIMBS, (most < 3 ? 1 : 3)>;
    case 4:
      return panel_block<KIND, LIMBS, (most < 4 ? 1 : 4)>;
    default:
      return panel_block<KIND, LIMBS, most>;
  }
}

// Writes 16 outputs, from n on, of some tokens.
inline void write_panel(const Weights& w, const f32x16* sums, int64_t num_tokens, float* y,
                        int64_t stride, int64_t n, Output output) {
  const int64_t count = w.out_features - n;
  const bool whole = count >= PANEL_ROWS;
  f32x16 bias = {};
  if (w.bias) bias = whole ? load(w.bias + n) : load_partial(w.bias + n, count);
  for (int64_t t = 0; t < num_tokens; t++) {
    float* out = y + t * stride + n;
    f32x16 value = sums[t] + bias;
    if (output == Output::ADD) value += whole ? load(out) : load_partial(out, count);
    if (whole) store(out, value);
    else std::memcpy(out, &value, count * sizeof(float));
  }
}

// Tokens that use a part of a panel before the next part is read. Of more, the inputs would be read
// from further away than the second-level cache; fewer read the panel more often.
constexpr int64_t SHARING_TOKENS = 64;
// Units of such a part: it stays in the first-level cache beside the inputs of a block of tokens.
// Longer parts fall out of it; shorter ones load and store sums more often.
constexpr int64_t PART_UNITS = 24;

// Outputs [begin, end) of tokens whose units lie token by token; begin is a multiple of PANEL_ROWS.
template <int64_t KIND, int LIMBS>
void panel_outputs(const Weights& w, const void* inputs, int64_t num_tokens, float* y,
                   int64_t stride, int64_t begin, int64_t end, Output output) {
  constexpr int64_t most = max_panel_tokens(LIMBS);
  constexpr PanelKind kind = panel_kind(KIND);
  const int64_t num_units = w.in_features / UNIT, size = panel_bytes(KIND, w.in_features);
  const int64_t part = num_tokens > pass_tokens(num_tokens, most) ? PART_UNITS : num_units;
  for (int64_t first = 0; first < num_tokens; first += SHARING_TOKENS) {
    const Unit<LIMBS>* units = static_cast<const Unit<LIMBS>*>(inputs) + first * num_units;
    const int64_t count = num_tokens - first < SHARING_TOKENS ? num_tokens - first : SHARING_TOKENS;
    for (int64_t n = begin; n < end; n += PANEL_ROWS) {
      const uint8_t* panel = static_cast<const uint8_t*>(w.panels) + n / PANEL_ROWS * size;
      f32x16 sums[SHARING_TOKENS];
      for (int64_t t = 0; t < count; t++) sums[t] = f32x16{};
      for (int64_t u = 0; u < num_units; u += part, panel += part / kind.units * kind.group_bytes())
        for (int64_t t = 0, pass; t < count; t += pass) {
          pass = pass_tokens(count - t, most);
          panel_block_of<KIND, LIMBS>(pass)(panel, num_units - u < part ? num_units - u : part,
                                            units + t * num_units + u, num_units, sums + t);
        }
      write_panel(w, sums, count, y + first * stride, stride, n, output);
    }
  }
}

typedef void (*PanelOutputs)(const Weights&, const void*, int64_t, float*, int64_t, int64_t,
                             int64_t, Output);
template <int LIMBS>
PanelOutputs panel_outputs_of(int64_t kind) {
  switch (kind) {
    case Q4_0:
      return panel_outputs<Q4_0, LIMBS>;
    case Q4_1:
      return panel_outputs<Q4_1, LIMBS>;
    case Q5_0:
      return panel_outputs<Q5_0, LIMBS>;
    case Q5_1:
      return panel_outputs<Q5_1, LIMBS>;
    case Q8_0:
      return panel_outputs<Q8_0, LIMBS>;
    case Q4_K:
      return panel_outputs<Q4_K, LIMBS>;
    case Q5_K:
      return panel_outputs<Q5_K, LIMBS>;
    default:
      return panel_outputs<Q6_K, LIMBS>;
  }
}

// -------------------------------------------------------------------------------- rows to panels

// Scales of a block of the row that becomes lane `lane`. `to`: of the panel's same group; `unit`:
// number of the block's first unit in the group.
inline void pack_scales(int64_t kind, const uint8_t* b, int64_t lane, int64_t unit, uint8_t* to) {
  auto copy_half = [&](const uint8_t* from, int64_t offset) {
    std::memcpy(to + offset + 2 * lane, from, 2);
  };
  switch (kind) {
    case Q6_K:
      copy_half(b + 208, 0);
      for (int i = 0; i < 16; i++) to[64 + 16 * i + lane] = b[192 + i];
      return;
    case Q4_K:
    case Q5_K: {
      const u8x16 scales = sub_block_scales(b);
      copy_half(b, 0);
      copy_half(b + 2, 32);
      for (int i = 0; i < 8; i++) {
        to[64 + 32 * i + lane] = scales[i];
        to[80 + 32 * i + lane] = scales[8 + i];
      }
      return;
    }
    case Q4_1:
    case Q5_1:
      copy_half(b + 2, 32);
      [[fallthrough]];
    default:
      copy_half(b, 32 * unit);
  }
}

// A unit of a panel from the integers [16][UNIT] of its rows, which lie `stride` bytes apart.
inline void pack_unit(int64_t kind, const uint8_t* q, int64_t stride, uint8_t* to) {
  auto four = [&](int row, int g) {
    uint32_t bytes;
    std::memcpy(&bytes, q + row * stride + 4 * g, 4);
    return bytes;
  };
  auto put = [&](int64_t at, int row, uint32_t bytes) {
    std::memcpy(to + at + 4 * row, &bytes, 4);
  };
  for (int row = 0; row < PANEL_ROWS; row++) {
    if (kind == Q8_0) {
      for (int g = 0; g < 8; g++) put(64 * g, row, four(row, g));
      continue;
    }
    uint32_t high = 0, next = 0;
    for (int g = 0; g < 4; g++) {
      const uint32_t a = four(row, g), b = four(row, g + 4);
      put(64 * g, row, (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4);
      if (kind == Q6_K) {
        high |= (a >> 4 & 0x03030303) << 2 * g;
        next |= (b >> 4 & 0x03030303) << 2 * g;
      } else {
        high |= (a >> 4 & 0x01010101) << g | (b >> 4 & 0x01010101) << (g + 4);
      }
    }
    if (panel_kind(kind).unit_bytes > 256) put(256, row, high);
    if (kind == Q6_K) put(320, row, next);
  }
}

// Panel `number` of a matrix: outputs from 16 * number on.
void make_panel(const Weights& w, int64_t number, uint8_t* panel) {
  const PanelKind kind = panel_kind(w.kind);
  const BlockSize block = block_size(w.kind);
  const int64_t units = w.in_features / UNIT, per_block = block.weights / UNIT;
  const uint8_t* rows = static_cast<const uint8_t*>(w.data) + number * PANEL_ROWS * row_bytes(w);
  uint8_t integers[PANEL_ROWS][256] = {};
  for (int64_t u = 0; u < units; u += per_block) {
    uint8_t* group = panel + u / kind.units * kind.group_bytes();
    const int64_t first = u % kind.units;                 // of the block's units in the group
    if (!first) std::memset(group, 0, kind.scale_bytes);  // outputs that are not there have scale 0
    for (int64_t lane = 0; lane < PANEL_ROWS && number * PANEL_ROWS + lane < w.out_features;
         lane++) {
      const uint8_t* b = rows + lane * row_bytes(w) + u / per_block * block.bytes;
      block_integers(w.kind, b, integers[lane]);
      pack_scales(w.kind, b, lane, first, group);
    }
    uint8_t* data = group + kind.scale_bytes + first * kind.unit_bytes;
    for (int64_t i = 0; i < per_block; i++, data += kind.unit_bytes)
      pack_unit(w.kind, integers[0] + i * UNIT, sizeof integers[0], data);
  }
}

}  // namespace
