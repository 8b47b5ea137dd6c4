// Weights as GGUF and safetensors files store them: rows of blocks, each with its scales.
//
//   RowBlock<KIND>: its weights as float32, 16 at a time, with the bits of the `gguf` package
//   block_integers, sub_block_scales: its parts, from which panels.h makes panels

#pragma once

#include <array>
#include <utility>

#include "abi.h"
#include "vectors.h"

namespace {

enum class Output { STORE, ADD };  // write the result, or add it to what is there

struct BlockSize {
  int64_t weights, bytes;
};

constexpr BlockSize block_size(int64_t kind) {
  switch (kind) {
    case F32:
      return {1, 4};
    case F16:
    case BF16:
      return {1, 2};
    case Q4_0:
      return {32, 18};
    case Q4_1:
      return {32, 20};
    case Q5_0:
      return {32, 22};
    case Q5_1:
      return {32, 24};
    case Q8_0:
      return {32, 34};
    case Q4_K:
      return {256, 144};
    case Q5_K:
      return {256, 176};
    case Q6_K:
      return {256, 210};
    default:
      return {0, 0};
  }
}
inline int64_t row_bytes(const Weights& w) {
  const BlockSize size = block_size(w.kind);
  return w.in_features / size.weights * size.bytes;
}

// Eight scales, then eight minimums, of 6 bits each: of the sub-blocks of a Q4_K or Q5_K block.
inline __attribute__((always_inline)) u8x16 sub_block_scales(const uint8_t* b) {
  typedef uint32_t u32x4 __attribute__((vector_size(16)));
  uint32_t s[3];
  std::memcpy(s, b + 4, sizeof s);  // the upper 2 bits of the last four lie above the first eight
  const uint32_t low = 0x3f3f3f3f, nibble = 0x0f0f0f0f, upper = 0x30303030;
  return (u8x16)u32x4{s[0] & low, (s[2] & nibble) | (s[0] >> 2 & upper),  //
                      s[1] & low, (s[2] >> 4 & nibble) | (s[1] >> 2 & upper)};
}

// --------------------------------------------------------------------------------------- float32

// A block of a row, or 16 weights of a kind without blocks, as float32. Each weight is rounded
// once, as by the `gguf` package: scale * integer is exact, for float32 has twice their bits.
template <int64_t KIND>
struct RowBlock {
  static constexpr int64_t WEIGHTS = block_size(KIND).weights < 16 ? 16 : block_size(KIND).weights;
  static constexpr bool IS_K = WEIGHTS == 256;

  const uint8_t* b;
  // Of sub-blocks; of Q4_K and Q5_K, eight scales and eight minimums, which are negative.
  alignas(64) float scales[IS_K ? 16 : 2];

  inline __attribute__((always_inline)) explicit RowBlock(const uint8_t* block) : b(block) {
    if (KIND == Q4_K || KIND == Q5_K) {
      const f32x16 d = broadcast(half_to_float(b)), minimum = broadcast(-half_to_float(b + 2));
      const i32x16 is_scale = {-1, -1, -1, -1, -1, -1, -1, -1};
      store(scales, from_u8(sub_block_scales(b)) * (is_scale ? d : minimum));
    } else if (KIND == Q6_K) {
      store(scales, from_s8(b + 192) * broadcast(half_to_float(b + 208)));
    } else if (WEIGHTS == 32) {
      scales[0] = half_to_float(b);
      if (KIND == Q4_1 || KIND == Q5_1) scales[1] = half_to_float(b + 2);
    }
  }

  // Pieces of 16 weights whose code differs: the others repeat it.
  static constexpr int PIECES = KIND == Q6_K ? 8 : IS_K ? 4 : WEIGHTS / 16;

  // Piece p + j, where p is a multiple of PIECES.
  inline __attribute__((always_inline)) f32x16 weights(int p, int j) const {
    switch (KIND) {
      case F16:
        return from_f16(b);
      case BF16:
        return from_bf16(b);
      case Q8_0:
        return from_s8(b + 2 + 16 * j) * scales[0];
      case Q4_0:
        return (nibbles(b + 2, j) - 8.0f) * scales[0];
      case Q4_1:
        return multiply_add(nibbles(b + 4, j), broadcast(scales[0]), broadcast(scales[1]));
      case Q5_0:
        return (five_bits(b + 6, b + 2, j) - 16.0f) * scales[0];
      case Q5_1:
        return multiply_add(five_bits(b + 8, b + 4, j), broadcast(scales[0]), broadcast(scales[1]));
      case Q4_K: {
        const uint8_t* q = b + 16 + 8 * p + 16 * (j % 2);
        const f32x16 scale = broadcast(scales[p / 2 + j / 2]);
        const f32x16 minimum = broadcast(scales[8 + p / 2 + j / 2]);
#if defined(__AVX512F__)
        // The 16 weights that a sub-block can have; two pieces look them up.
        const f32x16 table = multiply_add(
            f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, scale, minimum);
        const __m512i bytes = _mm512_cvtepu8_epi32((__m128i)load_16_bytes(q));
        const __m512i index =
            j / 2 ? (__m512i)((u32x16)bytes >> 4) : bytes;  // its lowest four bits
        return (f32x16)_mm512_permutexvar_ps(index, (__m512)table);
#else
        return multiply_add(nibbles(q, j / 2), scale, minimum);
#endif
      }
      case Q5_K: {
        const int sub = p / 2 + j / 2;
        const u8x16 v = load_16_bytes(b + 48 + 8 * p + 16 * (j % 2));
        const uint8_t bit_of_sub = 1 << sub;
        const u8x16 high = load_16_bytes(b + 16 + 16 * (j % 2)), bit = u8x16{} + bit_of_sub;
        const u8x16 sixteen = (u8x16)((high & bit) != 0) & 16;
        const f32x16 q = from_u8((j / 2 ? v >> 4 : v & 15) | sixteen);
        return multiply_add(q, broadcast(scales[sub]), broadcast(scales[8 + sub]));
      }
      default: {  // Q6_K
        const int half = p / 8, quarter = j / 2, at = 16 * (j % 2);
        const u8x16 v = load_16_bytes(b + 64 * half + 32 * (quarter % 2) + at);
        const u8x16 high = load_16_bytes(b + 128 + 32 * half + at);
#if defined(__AVX512F__)
        // Both parts of an integer are looked up as float32, by the lowest four bits of an index.
        const __m512 low_part =
            (__m512)f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512 high_part =
            (__m512)f32x16{-32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16};
        const __m512i low_bytes = _mm512_cvtepu8_epi32((__m128i)v);
        const __m512i high_bytes = _mm512_cvtepu8_epi32((__m128i)high);
        const __m512i index = quarter > 1 ? (__m512i)((u32x16)low_bytes >> 4) : low_bytes;
        const f32x16 q = (f32x16)_mm512_permutexvar_ps(index, low_part) +
                         (f32x16)_mm512_permutexvar_ps(
                             (__m512i)((u32x16)high_bytes >> (2 * quarter)), high_part);
        return q * scales[p + j];
#else
        const u8x16 bits =
            (quarter < 2 ? high << uint8_t(4 - 2 * quarter) : high >> uint8_t(2 * quarter - 4)) &
            48;
        return (from_u8((quarter > 1 ? v >> 4 : v & 15) | bits) - 32.0f) * scales[p + j];
#endif
      }
    }
  }

 private:
  static inline __attribute__((always_inline)) f32x16 nibbles(const uint8_t* q, int p) {
    const u8x16 v = load_16_bytes(q);
    return from_u8(p ? v >> 4 : v & 15);
  }
  static inline __attribute__((always_inline)) f32x16 five_bits(const uint8_t* q,
                                                                const uint8_t* high, int p) {
    const u8x16 v = load_16_bytes(q);
    uint16_t bits;
    std::memcpy(&bits, high + 2 * p, sizeof bits);
    return from_u8((p ? v >> 4 : v & 15) | bytes_of_bits(bits) << 4);
  }
};

template <int64_t KIND, int N, size_t... I>
inline __attribute__((always_inline)) std::array<RowBlock<KIND>, N> make_blocks(
    const uint8_t* rows, int64_t stride, std::index_sequence<I...>) {
  return {RowBlock<KIND>(rows + I * stride)...};
}

// ---------------------------------------------------------------------------------------- integers

// The integers of a block, one a byte; Q8_0's are raised by 128.
inline void block_integers(int64_t kind, const uint8_t* b, uint8_t* q) {
  const int64_t nibbles = kind == Q4_0 ? 2 : kind == Q4_1 ? 4 : kind == Q5_0 ? 6 : 8;
  switch (kind) {
    case Q4_0:
    case Q4_1:
    case Q5_0:
    case Q5_1: {
      uint32_t high = 0;
      if (kind == Q5_0 || kind == Q5_1) std::memcpy(&high, b + nibbles - 4, 4);
      for (int i = 0; i < 16; i++) {
        q[i] = (b[nibbles + i] & 15) | (high >> i & 1) << 4;
        q[i + 16] = b[nibbles + i] >> 4 | (high >> (i + 16) & 1) << 4;
      }
      return;
    }
    case Q8_0:
      for (int i = 0; i < 32; i++) q[i] = b[2 + i] ^ 128;
      return;
    case Q4_K:
      for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++) {
          q[64 * c + i] = b[16 + 32 * c + i] & 15;
          q[64 * c + 32 + i] = b[16 + 32 * c + i] >> 4;
        }
      return;
    case Q5_K:
      for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++) {
          const uint8_t v = b[48 + 32 * c + i], high = b[16 + i];
          q[64 * c + i] = (v & 15) | (high >> 2 * c & 1) << 4;
          q[64 * c + 32 + i] = v >> 4 | (high >> (2 * c + 1) & 1) << 4;
        }
      return;
    case Q6_K:
      for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
          const uint8_t v = b[64 * half + i], next = b[64 * half + 32 + i];
          const uint8_t high = b[128 + 32 * half + i];
          q[128 * half + i] = (v & 15) | (high & 3) << 4;
          q[128 * half + 32 + i] = (next & 15) | (high >> 2 & 3) << 4;
          q[128 * half + 64 + i] = v >> 4 | (high >> 4 & 3) << 4;
          q[128 * half + 96 + i] = next >> 4 | (high >> 6) << 4;
        }
  }
}

}  // namespace
