// Vectors as wide as the CPU's registers. f32x16 (vectors.h) is the same on every CPU because sums
// run across its lanes; where none does, the number of lanes changes no bit, and compilers make
// much better code of vectors that fit into a register.

#pragma once

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
typedef f32x16 f32xN;
#elif defined(__AVX__)
constexpr int LANES = 8;
typedef f32x8 f32xN;
#else
constexpr int LANES = 4;
typedef f32x4 f32xN;
#endif
typedef float f32xN_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline __attribute__((always_inline)) f32xN load_lanes(const float* p) {
  return *reinterpret_cast<const f32xN_unaligned*>(p);
}
inline __attribute__((always_inline)) void store_lanes(float* p, f32xN v) {
  *reinterpret_cast<f32xN_unaligned*>(p) = v;
}
inline __attribute__((always_inline)) f32xN broadcast_lanes(float v) { return v - f32xN{}; }

// As in_register in vectors.h: keeps a compiler from loading a vector again at each use.
inline __attribute__((always_inline)) f32xN pinned(f32xN v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__)
  asm("" : "+x"(v));
#endif
  return v;
}

// As multiply_add in vectors.h, to the bit.
inline __attribute__((always_inline)) f32xN multiply_add_lanes(f32xN a, f32xN b, f32xN c) {
#if defined(__AVX512F__)
  return multiply_add(a, b, c);
#elif defined(__FMA__)
  return (f32xN)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

}  // namespace
