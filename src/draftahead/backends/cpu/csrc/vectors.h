// SIMD vectors of sixteen float32 (f32x16) or int32 (i32x16), written with GCC/Clang vector
// extensions: the compiler maps them to AVX-512, AVX2 or NEON. The order of every reduction is
// fixed.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16_unaligned __attribute__((vector_size(64), aligned(4), may_alias));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int8_t i8x16_unaligned __attribute__((vector_size(16), aligned(1), may_alias));

// Adding and subtracting 1.5 * 2^23 rounds a float32 of magnitude below 2^22 to an integer.
constexpr float ROUND_TO_INTEGER = 12582912.0f;

inline f32x16 load(const float* p) { return *reinterpret_cast<const f32x16_unaligned*>(p); }
inline void store(float* p, f32x16 v) { *reinterpret_cast<f32x16_unaligned*>(p) = v; }
// v - 0 is v for every v, so no subtraction is left of it; 0 + v is not, for -0.
inline f32x16 broadcast(float v) { return v - f32x16{}; }

inline f32x16 load_partial(const float* p, long count) {  // the first `count` lanes; zeros behind
  float lanes[16] = {0};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
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
