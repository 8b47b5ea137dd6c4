// Dot products of bytes, by the instruction set. Sums are whole numbers: the same in all of them.

#pragma once

#include "vectors.h"

namespace {

#if defined(__AVX512VNNI__)

// Adds to each lane the products of 4 weights and 4 inputs, the same in all lanes. BYTE: weights
// may exceed 127.
template <bool BYTE>
inline __attribute__((always_inline)) i32x16 dot4(i32x16 total, u8x64 weights, const int8_t* x) {
  // With the inputs as a memory operand: compilers load them by an instruction of its own.
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(total)
      : "v"(weights), "m"(*reinterpret_cast<const int8_t (*)[4]>(x)));
  return total;
}

#elif defined(__AVX512BW__)

template <bool BYTE>
inline __attribute__((always_inline)) i32x16 dot4(i32x16 total, u8x64 weights, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  const __m512i w = (__m512i)weights, bytes = _mm512_set1_epi32(four);
  if (!BYTE)
    return total + (i32x16)_mm512_madd_epi16(_mm512_maddubs_epi16(w, bytes), _mm512_set1_epi16(1));
  // Pairs of products exceed 16 bits: even and odd bytes each as 16 bits.
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
  const __m512i odd = _mm512_srai_epi16(bytes, 8), mask = _mm512_set1_epi16(255);
  return total + (i32x16)_mm512_madd_epi16(_mm512_and_si512(w, mask), even) +
         (i32x16)_mm512_madd_epi16(_mm512_srli_epi16(w, 8), odd);
}

#elif defined(__AVX2__)

template <bool BYTE>
inline __attribute__((always_inline)) i32x16 dot4(i32x16 total, u8x64 weights, const int8_t* x) {
  union {
    i32x16 whole;
    __m256i half[2];
  } sum = {total};
  union {
    u8x64 whole;
    __m256i half[2];
  } w = {weights};
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  const __m256i bytes = _mm256_set1_epi32(four);
  for (int i = 0; i < 2; i++) {
    __m256i products;
    if (BYTE) {  // pairs of products exceed 16 bits: even and odd bytes each as 16 bits
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
      const __m256i mask = _mm256_set1_epi16(255);
      products = _mm256_add_epi32(
          _mm256_madd_epi16(_mm256_and_si256(w.half[i], mask), even),
          _mm256_madd_epi16(_mm256_srli_epi16(w.half[i], 8), _mm256_srai_epi16(bytes, 8)));
    } else {
      products = _mm256_madd_epi16(_mm256_maddubs_epi16(w.half[i], bytes), _mm256_set1_epi16(1));
    }
    sum.half[i] = _mm256_add_epi32(sum.half[i], products);
  }
  return sum.whole;
}

#elif defined(__aarch64__)

// The same for 4 lanes, of weights up to 127.
inline __attribute__((always_inline)) int32x4_t dot4_quarter(int32x4_t total, int8x16_t w,
                                                             int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(total, w, x);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(w, x));
  return vaddq_s32(total, vpaddq_s32(low, high));
#endif
}

template <bool BYTE>
inline __attribute__((always_inline)) i32x16 dot4(i32x16 total, u8x64 weights, const int8_t* x) {
  union {
    i32x16 whole;
    int32x4_t quarter[4];
  } sum = {total};
  union {
    u8x64 whole;
    uint8x16_t quarter[4];
  } w = {weights};
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  const int8x16_t bytes = vreinterpretq_s8_s32(vdupq_n_s32(four));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    if (BYTE) {  // w = 128 * its highest bit + the rest: both are bytes with a sign
      const int8x16_t top = vreinterpretq_s8_u8(vshrq_n_u8(w.quarter[i], 7));
      const int32x4_t tops = dot4_quarter(vdupq_n_s32(0), top, bytes);
      sum.quarter[i] = vaddq_s32(sum.quarter[i], vshlq_n_s32(tops, 7));
      w.quarter[i] = vandq_u8(w.quarter[i], vdupq_n_u8(127));
    }
    sum.quarter[i] = dot4_quarter(sum.quarter[i], vreinterpretq_s8_u8(w.quarter[i]), bytes);
  }
  return sum.whole;
}

#else

template <bool BYTE>
inline __attribute__((always_inline)) i32x16 dot4(i32x16 total, u8x64 weights, const int8_t* x) {
  for (int lane = 0; lane < 16; lane++)
    for (int j = 0; j < 4; j++) total[lane] += int32_t(weights[4 * lane + j]) * x[j];
  return total;
}

#endif

// Numbers of 16 bits in pairs, lane by lane.
inline __attribute__((always_inline)) i32x16 pair_of(i32x16 first, i32x16 second) {
  return (first & 0xffff) | (second << 16);
}

// Adds to each lane the products of a pair of weights and a pair of inputs, the same in all lanes.
inline __attribute__((always_inline)) i32x16 dot2(i32x16 total, i32x16 weights, const int16_t* x) {
#if defined(__AVX512VNNI__)
  int32_t two;
  std::memcpy(&two, x, sizeof two);
  return (i32x16)_mm512_dpwssd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(two));
#else
  return total + (weights << 16 >> 16) * x[0] + (weights >> 16) * x[1];
#endif
}

}  // namespace
