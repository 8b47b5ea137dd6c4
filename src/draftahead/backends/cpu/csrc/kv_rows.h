// How a key or a value lies in the KV cache: a row of float32, of bfloat16, or of int8 in blocks
// with a scale each. Attention reads rows as float32; those of the other formats are widened in
// tiles that stay in the first-level cache.
//
// Everything reads what is stored, also a drafted token its own key: rounded numbers do not depend
// on whether a token was drafted, so its logits do not either.

#pragma once

#include <cmath>

#include "abi.h"
#include "vectors.h"

namespace {

inline int64_t kv_blocks(int64_t head_dim) { return (head_dim + KV_BLOCK - 1) / KV_BLOCK; }

// Bytes of a key or a value. int8: the scales of its blocks, then its numbers.
inline int64_t kv_row_size(const Model& m) {
  if (m.kv_format == KV_FLOAT32) return m.head_dim * sizeof(float);
  if (m.kv_format == KV_BFLOAT16) return m.head_dim * sizeof(uint16_t);
  return kv_blocks(m.head_dim) * sizeof(float) + m.head_dim;
}

// To the nearest, ties to even. NaN stays NaN.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// Turns the blocks of a key that is stored in int8, and of the queries that read it, by a Hadamard
// matrix: see `mixed` in kv/formats.py. The products stay what they were.
inline void mix(const Model& m, float* x) {
  for (int64_t begin = 0; begin < m.head_dim; begin += KV_BLOCK) {
    const int64_t rest = m.head_dim - begin, size = rest < KV_BLOCK ? rest : KV_BLOCK;
    float* block = x + begin;
    const float factor = 1.0 / std::sqrt(double(size));
    for (int64_t i = 0; i < size; i++) block[i] *= factor;
    for (int64_t half = 1; half < size; half *= 2)
      for (int64_t i = 0; i < size; i++)
        if (!(i & half)) {
          const float one = block[i], other = block[i + half];
          block[i] = one + other, block[i + half] = one - other;
        }
  }
}

// One block of an int8 row: numbers in [-127, 127], and their scale. The scale is NaN if a number
// is not finite, and 0 if all are too small for one.
inline float quantize_block(const float* x, int64_t count, int8_t* numbers) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; i++) {
    finite &= bool(std::isfinite(x[i]));
    largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  }
  const bool usable = finite && largest > 1e-30f;  // 127 / largest is finite
  const float inverse = usable ? 127.0f / largest : 0.0f;
  for (int64_t i = 0; i < count; i++)
    numbers[i] = usable ? int8_t((x[i] * inverse + ROUND_TO_INTEGER) - ROUND_TO_INTEGER) : 0;
  return !finite ? NAN : usable ? largest / 127.0f : 0.0f;
}

// Stores x [head_dim] as a row.
inline void store_row(const Model& m, const float* x, char* row) {
  const int64_t d = m.head_dim;
  if (m.kv_format == KV_FLOAT32) {
    std::memcpy(row, x, d * sizeof(float));
  } else if (m.kv_format == KV_BFLOAT16) {
    for (int64_t i = 0; i < d; i++) {
      const uint16_t rounded = to_bfloat16(x[i]);
      std::memcpy(row + 2 * i, &rounded, sizeof rounded);
    }
  } else {
    int8_t* numbers = reinterpret_cast<int8_t*>(row + kv_blocks(d) * sizeof(float));
    for (int64_t i = 0; i < d; i += KV_BLOCK) {
      const int64_t count = d - i < KV_BLOCK ? d - i : KV_BLOCK;
      const float scale = quantize_block(x + i, count, numbers + i);
      std::memcpy(row + i / KV_BLOCK * sizeof(float), &scale, sizeof scale);
    }
  }
}

// Whether x can be stored in a row without becoming infinite or NaN.
inline bool is_storable(const Model& m, float x) {
  if (m.kv_format != KV_BFLOAT16) return std::isfinite(x);
  return (to_bfloat16(x) & 0x7f80) != 0x7f80;  // the largest float32 numbers round to infinity
}

// Sixteen numbers of a row, from bfloat16, or from int8 times their scale.
inline void widen_bfloat16(const char* from, float* to) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  _mm512_storeu_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
#else
  for (int i = 0; i < 16; i++) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    const uint32_t bits = uint32_t(half) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
#endif
}

inline void widen_int8(const char* from, float scale, float* to) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  _mm512_storeu_ps(to, _mm512_mul_ps(numbers, _mm512_set1_ps(scale)));
#else
  for (int i = 0; i < 16; i++) to[i] = float(static_cast<signed char>(from[i])) * scale;
#endif
}

// Byte of a row at which a channel's number lies.
inline int64_t channel_offset(const Model& m, int64_t channel) {
  if (m.kv_format == KV_FLOAT32) return channel * sizeof(float);
  if (m.kv_format == KV_BFLOAT16) return channel * sizeof(uint16_t);
  return kv_blocks(m.head_dim) * sizeof(float) + channel;
}

// Requests channels [begin, end) of the next rows from memory, a part of them at each of `times`
// calls of `some`: the requests of a whole tile at once would wait for each other.
class Prefetch {
 public:
  Prefetch(const Model& m, const char* rows, int64_t count, int64_t begin, int64_t end,
           int64_t times)
      : at_(rows + channel_offset(m, begin)),
        width_(channel_offset(m, end) - channel_offset(m, begin)),
        size_(kv_row_size(m)),
        rows_(count > 0 ? count : 0),
        part_(times > 1 ? (rows_ + times - 1) / times : rows_) {}

  void some() {
    for (int64_t r = 0; r < part_ && rows_ > 0; r++, rows_--, at_ += size_)
      for (int64_t i = 0; i < width_; i += 64) __builtin_prefetch(at_ + i, 0, 2);
  }

 private:
  const char* at_;
  const int64_t width_, size_;
  int64_t rows_;
  const int64_t part_;
};

// Adjacent rows as float32, or some channels of them.
struct Rows {
  const float* data;
  int64_t stride;  // floats from a row to the next
};

// Channels [begin, end) of `count` rows; `buffer` takes count * (end - begin) floats.
inline Rows widened(const Model& m, const char* rows, int64_t count, int64_t begin, int64_t end,
                    float* buffer) {
  const int64_t d = m.head_dim, size = kv_row_size(m), width = end - begin;
  if (m.kv_format == KV_FLOAT32) return {reinterpret_cast<const float*>(rows) + begin, d};
  for (int64_t j = 0; j < count; j++, rows += size) {
    float* to = buffer + j * width - begin;
    if (m.kv_format == KV_BFLOAT16) {
      for (int64_t i = begin; i < end; i += 16) widen_bfloat16(rows + 2 * i, to + i);
    } else {
      const char* numbers = rows + kv_blocks(d) * sizeof(float);
      for (int64_t i = begin; i < end; i += 16) {
        float scale;
        std::memcpy(&scale, rows + i / KV_BLOCK * sizeof(float), sizeof scale);
        widen_int8(numbers + i, scale, to + i);
      }
    }
  }
  return {buffer, width};
}

}  // namespace
