// Sixteen floats at a time, in plain C++ with GCC/Clang vector extensions; the compiler maps them to
// what the CPU has. Every sum runs in one order.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float f16 __attribute__((vector_size(64)));
typedef float f16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef int8_t b16u __attribute__((vector_size(16), aligned(1), may_alias));

inline f16 load(const float* p) { return *reinterpret_cast<const f16u*>(p); }
inline void store(float* p, f16 v) { *reinterpret_cast<f16u*>(p) = v; }
inline f16 all(float v) { return f16{} + v; }

inline f16 load_some(const float* p, long count) {  // the first `count` of 16, zeros behind
  float full[16] = {0};
  std::memcpy(full, p, count * sizeof(float));
  return load(full);
}

// a * b + c, rounded once where the CPU can. Said outright: a compiler that may choose (and
// -ffp-contract=off forbids it to) fuses in one loop and not in the next, and bits would differ.
inline __attribute__((always_inline)) f16 fused(f16 a, f16 b, f16 c) {
#if defined(__AVX512F__)
  return (f16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { f16 whole; __m256 half[2]; } x = {a}, y = {b}, z = {c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}

// Keeps a vector in a register: some compilers would rather load it again for every use, and on
// most CPUs there are fewer loads a cycle than additions.
inline __attribute__((always_inline)) f16 held(f16 v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Halves are added, then quarters, and so on: one order for all sums.
inline float sum(f16 v) {
  union { f16 whole; f8 half[2]; } a = {v};
  union { f8 whole; f4 half[2]; } b = {a.half[0] + a.half[1]};
  f4 c = b.half[0] + b.half[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// Eight such sums at once, in that very order.
inline __attribute__((always_inline)) void sum8(const f16* v, float* out) {
  auto halves = [](f16 a, f16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  auto quarters = [](f16 a, f16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  f16 a = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
  f16 b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  f16 c = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
          __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  f16 d = __builtin_shufflevector(c, c, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) +
          __builtin_shufflevector(c, c, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
  std::memcpy(out, &d, 8 * sizeof(float));
}

inline float biggest(f16 v) {
  float best = v[0];
  for (int i = 1; i < 16; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// exp by 2^n * p(r), about 1e-7 off, within [-87, 88]; NaN stays NaN.
inline f16 exp16(f16 x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;  // beyond, 2^n would run into the sign bit
  f16 n = x * 1.44269504f + 12582912.0f;  // rounds to the nearest whole number
  n -= 12582912.0f;
  f16 r = x - n * 0.693145752f - n * 1.42860677e-6f;
  f16 p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i16 bits = (__builtin_convertvector(n, i16) + 127) << 23;
  f16 scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

}  // namespace
