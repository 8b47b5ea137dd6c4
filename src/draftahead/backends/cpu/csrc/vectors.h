// SIMD vectors of sixteen float32 (f32x16) or int32 (i32x16), written with GCC/Clang vector
// extensions: the compiler maps them to AVX-512, AVX2 or NEON. The order of every reduction is
// fixed.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16_unaligned __attribute__((vector_size(64), aligned(4), may_alias));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int8_t i8x16_unaligned __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16_unaligned __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t u16x16_unaligned __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint8_t u8x64 __attribute__((vector_size(64), may_alias));
typedef uint8_t u8x64_unaligned __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t u16x32 __attribute__((vector_size(64), may_alias));

// Vectors that fit the registers: 32 of 64 bytes with AVX-512, 16 of 32 bytes with AVX2, 32 of 16
// bytes with NEON. Sums of more are stored and loaded at each use, and take minutes to compile.
#if defined(__AVX512F__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 8;
#endif

// Adding and subtracting 1.5 * 2^23 rounds a float32 of magnitude below 2^22 to an integer.
constexpr float ROUND_TO_INTEGER = 12582912.0f;

inline f32x16 load(const float* p) { return *reinterpret_cast<const f32x16_unaligned*>(p); }
inline void store(float* p, f32x16 v) { *reinterpret_cast<f32x16_unaligned*>(p) = v; }
inline f32x16 broadcast(float v) { return f32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
inline i32x16 broadcast(int32_t v) {
  return i32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v};
}

inline f32x16 load_partial(const float* p, long count) {  // the first `count` lanes; zeros behind
  float lanes[16] = {0};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}

// ------------------------------------------------------------------------------ bytes and halves

inline __attribute__((always_inline)) u8x64 load_bytes(const uint8_t* p) {
  return *reinterpret_cast<const u8x64_unaligned*>(p);
}
inline __attribute__((always_inline)) void store_bytes64(uint8_t* p, u8x64 v) {
  *reinterpret_cast<u8x64_unaligned*>(p) = v;
}
// Shifts by pairs of bytes: bits that enter a byte from its neighbour must be masked.
inline __attribute__((always_inline)) u8x64 shift_right(u8x64 v, int bits) {
  return (u8x64)((u16x32)v >> bits);
}
inline __attribute__((always_inline)) u8x64 shift_left(u8x64 v, int bits) {
  return (u8x64)((u16x32)v << bits);
}
// The lowest 8 bits of each integer.
inline __attribute__((always_inline)) void store_bytes(int8_t* p, i32x16 v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
  *reinterpret_cast<i8x16_unaligned*>(p) = __builtin_convertvector(v, i8x16_unaligned);
#endif
}
inline __attribute__((always_inline)) u8x16 load_16_bytes(const uint8_t* p) {
  return *reinterpret_cast<const u8x16_unaligned*>(p);
}
// 0 or 1 in each byte, by the bits of a number, the lowest first.
inline __attribute__((always_inline)) u8x16 bytes_of_bits(uint16_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return (u8x16)_mm_maskz_set1_epi8(bits, 1);
#else
  const u8x16 low = u8x16{} + uint8_t(bits), high = u8x16{} + uint8_t(bits >> 8);
  const u8x16 both =
      __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
  const u8x16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  return (u8x16)((both & bit) != 0) & 1;
#endif
}
inline __attribute__((always_inline)) i32x16 integers_of_u8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtepu8_epi32((__m128i)load_16_bytes(p));
#else
  return __builtin_convertvector(load_16_bytes(p), i32x16);
#endif
}
inline __attribute__((always_inline)) i32x16 integers_of_s8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtepi8_epi32((__m128i)load_16_bytes(p));
#else
  return __builtin_convertvector(*reinterpret_cast<const i8x16_unaligned*>(p), i32x16);
#endif
}
inline __attribute__((always_inline)) f32x16 from_u8(u8x16 v) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)v));
#else
  return __builtin_convertvector(v, f32x16);
#endif
}
inline __attribute__((always_inline)) f32x16 from_u8(const uint8_t* p) {
  return __builtin_convertvector(integers_of_u8(p), f32x16);
}
inline __attribute__((always_inline)) f32x16 from_s8(const uint8_t* p) {
  return __builtin_convertvector(integers_of_s8(p), f32x16);
}

inline float half_to_float(const uint8_t* p) {
#if defined(__F16C__)
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _cvtsh_ss(bits);
#elif defined(__ARM_FP16_FORMAT_IEEE)
  __fp16 half;
  std::memcpy(&half, p, sizeof half);
  return half;
#else
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = uint32_t(bits & 0x7fff) << 13;
  // Moved to float32's exponent by a product, which also normalizes what is subnormal.
  float value;
  std::memcpy(&value, &rest, sizeof value);
  value *= 5.192296858534828e33f;  // 2^112
  uint32_t out;
  std::memcpy(&out, &value, sizeof out);
  if ((bits & 0x7c00) == 0x7c00) out = 0x7f800000 | rest;  // infinity or NaN
  out |= sign;
  std::memcpy(&value, &out, sizeof value);
  return value;
#endif
}
inline __attribute__((always_inline)) f32x16 from_f16(const uint8_t* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  union {
    f32x16 whole;
    __m256 half[2];
  } v;
  v.half[0] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  v.half[1] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
  return v.whole;
#elif defined(__aarch64__)
  union {
    f32x16 whole;
    float32x4_t quarter[4];
  } v;
  for (int i = 0; i < 4; i++) v.quarter[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)));
  return v.whole;
#else
  f32x16 v;
  for (int i = 0; i < 16; i++) v[i] = half_to_float(p + 2 * i);
  return v;
#endif
}

inline __attribute__((always_inline)) f32x16 from_bf16(const uint8_t* p) {
  const auto bits = *reinterpret_cast<const u16x16_unaligned*>(p);
  return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

// ------------------------------------------------------------------------------------ arithmetic

inline __attribute__((always_inline)) f32x16 absolute(f32x16 v) {
  return (f32x16)((i32x16)v & 0x7fffffff);
}

// The nearest integers, the even one of two: of numbers below 2^31; NaN and others give any.
inline __attribute__((always_inline)) i32x16 round_to_integers(f32x16 v) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  union {
    f32x16 whole;
    __m256 half[2];
  } x = {v};
  union {
    __m256i half[2];
    i32x16 whole;
  } y;
  for (int i = 0; i < 2; i++) y.half[i] = _mm256_cvtps_epi32(x.half[i]);
  return y.whole;
#elif defined(__aarch64__)
  union {
    f32x16 whole;
    float32x4_t quarter[4];
  } x = {v};
  union {
    int32x4_t quarter[4];
    i32x16 whole;
  } y;
  for (int i = 0; i < 4; i++) y.quarter[i] = vcvtnq_s32_f32(x.quarter[i]);
  return y.whole;
#else
  i32x16 y;
  for (int i = 0; i < 16; i++)
    y[i] = int32_t(__builtin_fabsf(v[i]) < 2e9f ? __builtin_rintf(v[i]) : 0.0f);
  return y;
#endif
}

// Whether any lane of a comparison is true.
inline __attribute__((always_inline)) bool any(i32x16 v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < 16; i++) found |= v[i];
  return found != 0;
#endif
}

// a * b + c with one rounding where the CPU has FMA. It is explicit because a compiler that may
// contract (-ffp-contract=off forbids it) fuses in one loop and not in the next: the bits of a sum
// would then depend on the code around it.
inline __attribute__((always_inline)) f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union {
    f32x16 whole;
    __m256 half[2];
  } x = {a}, y = {b}, z = {c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#elif defined(__aarch64__)
  union {
    f32x16 whole;
    float32x4_t quarter[4];
  } x = {a}, y = {b}, z = {c};
  for (int i = 0; i < 4; i++) z.quarter[i] = vfmaq_f32(z.quarter[i], x.quarter[i], y.quarter[i]);
  return z.whole;
#else
  return a * b + c;
#endif
}

// Keeps a vector in a register. Without it some compilers load the value again at each use, and
// most CPUs issue fewer loads per cycle than additions.
inline __attribute__((always_inline)) f32x16 in_register(f32x16 v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Sum of the 16 lanes: halves are added, then quarters, and so on.
inline float sum_lanes(f32x16 v) {
  union {
    f32x16 whole;
    f32x8 half[2];
  } a = {v};
  union {
    f32x8 whole;
    f32x4 half[2];
  } b = {a.half[0] + a.half[1]};
  f32x4 c = b.half[0] + b.half[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// sum_lanes of eight vectors at once, added in the same order.
inline __attribute__((always_inline)) void sum_lanes8(const f32x16* v, float* out) {
  auto halves = [](f32x16 a, f32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30,
                                   31);
  };
  auto quarters = [](f32x16 a, f32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                   31);
  };
  f32x16 a = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
  f32x16 b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  f32x16 c =
      __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
      __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  f32x16 d = __builtin_shufflevector(c, c, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) +
             __builtin_shufflevector(c, c, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
  std::memcpy(out, &d, 8 * sizeof(float));
}

inline float max_lane(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float largest = v[0];
  for (int i = 1; i < 16; i++) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// exp(x) = 2^n * p(r) with a relative error of about 1e-7, for x clamped to [-87, 88]: beyond 88,
// 2^n would overflow into the sign bit. NaN stays NaN.
template <class Vector>
inline __attribute__((always_inline)) Vector fast_exp(Vector x) {
  x = x < -87.0f ? Vector{} - 87.0f : x;
  x = x > 88.0f ? Vector{} + 88.0f : x;
  Vector n = x * 1.44269504f + ROUND_TO_INTEGER;
  n -= ROUND_TO_INTEGER;
  Vector r = x - n * 0.693145752f - n * 1.42860677e-6f;
  Vector p = Vector{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  auto bits = (__builtin_convertvector(n, decltype(n < n)) + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

}  // namespace
