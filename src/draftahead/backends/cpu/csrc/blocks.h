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

// Scales and minimums (6 bits each) of the eight sub-blocks of a Q4_K or Q5_K block.
inline void sub_block_scales(const uint8_t* b, uint8_t* scales, uint8_t* minimums) {
  uint32_t s[3], low = 0x3f3f3f3f, nibble = 0x0f0f0f0f, two = 0x03030303;
  std::memcpy(s, b + 4, sizeof s);  // the upper 2 bits of the last four lie above the first eight
  const uint32_t parts[4] = {s[0] & low, (s[2] & nibble) | (s[0] >> 6 & two) << 4,  //
                             s[1] & low, (s[2] >> 4 & nibble) | (s[1] >> 6 & two) << 4};
  std::memcpy(scales, parts, 8);
  std::memcpy(minimums, parts + 2, 8);
}

// --------------------------------------------------------------------------------------- float32

// A block of a row, or 16 weights of a kind without blocks, as float32. Each weight is rounded
// once, as by the `gguf` package: scale * integer is exact, for float32 has twice their bits.
template <int64_t KIND>
struct RowBlock {
  static constexpr int64_t WEIGHTS = block_size(KIND).weights < 16 ? 16 : block_size(KIND).weights;
  static constexpr bool IS_K = WEIGHTS == 256;

  const uint8_t* b;
  alignas(64) float scales[IS_K ? 16 : 1], minimums[IS_K ? 16 : 1];  // of sub-blocks

  inline __attribute__((always_inline)) explicit RowBlock(const uint8_t* block) : b(block) {
    if (KIND == Q4_K || KIND == Q5_K) {
      alignas(16) uint8_t parts[2][16] = {};
      sub_block_scales(b, parts[0], parts[1]);
      store(scales, from_u8(parts[0]) * broadcast(half_to_float(b)));
      store(minimums, from_u8(parts[1]) * broadcast(half_to_float(b + 2)));
    } else if (KIND == Q6_K) {
      store(scales, from_s8(b + 192) * broadcast(half_to_float(b + 208)));
    } else if (IS_BLOCK) {
      scales[0] = half_to_float(b);
      if (KIND == Q4_1 || KIND == Q5_1) minimums[0] = half_to_float(b + 2);
    }
  }

  // Pieces of 16 weights whose code differs: the others repeat it.
  static constexpr int PIECES = IS_K ? 4 : WEIGHTS / 16;

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
        return multiply_add(nibbles(b + 4, j), broadcast(scales[0]), broadcast(minimums[0]));
      case Q5_0:
        return (five_bits(b + 6, b + 2, j) - 16.0f) * scales[0];
      case Q5_1:
        return multiply_add(five_bits(b + 8, b + 4, j), broadcast(scales[0]),
                            broadcast(minimums[0]));
      case Q4_K: {
        const f32x16 q = nibbles(b + 16 + 8 * p + 16 * (j % 2), j / 2);
        const int sub = p / 2 + j / 2;
        return multiply_add(q, broadcast(scales[sub]), broadcast(-minimums[sub]));
      }
      case Q5_K: {
        const int sub = p / 2 + j / 2;
        const u8x16 v = load_16_bytes(b + 48 + 8 * p + 16 * (j % 2));
        const u8x16 high = load_16_bytes(b + 16 + 16 * (j % 2)) >> uint8_t(sub) & 1;
        const f32x16 q = from_u8((j / 2 ? v >> 4 : v & 15) | high << 4);
        return multiply_add(q, broadcast(scales[sub]), broadcast(-minimums[sub]));
      }
      default: {  // Q6_K
        const int half = p / 8, upper = p / 4 % 2, at = 16 * (j % 2);
        const u8x16 v = load_16_bytes(b + 64 * half + 32 * (j / 2) + at);
        const u8x16 high =
            load_16_bytes(b + 128 + 32 * half + at) >> uint8_t(4 * upper + j / 2 * 2) & 3;
        const f32x16 q = from_u8((v >> uint8_t(4 * upper) & 15) | high << 4);
        return (q - 32.0f) * scales[p + j];
      }
    }
  }

 private:
  static constexpr bool IS_BLOCK = WEIGHTS == 32;

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
