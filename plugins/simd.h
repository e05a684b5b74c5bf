// Vectors of the instruction set that this file is compiled for: loads, conversions, exp, exp2, tanh, reductions.
//
// Included only by the folders' kernels.cc, which are compiled once per instruction set. Everything has internal linkage, and no
// inline function of the C++ library is used here: the linker could keep the copy built with AVX-512 for all callers.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define KILN_INLINE static inline __attribute__((always_inline))

// KILN_JOIN(kernels_, KILN_ISA) is kernels_plain, say, and KILN_STRING(KILN_ISA) is "plain".
#define KILN_JOIN_(a, b) a##b
#define KILN_JOIN(a, b) KILN_JOIN_(a, b)
#define KILN_STRING_(a) #a
#define KILN_STRING(a) KILN_STRING_(a)

namespace kiln::KILN_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));
typedef double DoubleVec __attribute__((vector_size(kWidth * 4)));  // half as many lanes
typedef Vec UnalignedVec __attribute__((aligned(4), may_alias));
typedef HalfVec UnalignedHalfVec __attribute__((aligned(2), may_alias));

// Storage types of the caches; 16-bit ones are raw bits.
typedef float F32;
struct F16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

KILN_INLINE Vec broadcast(float x) { return x - Vec{}; }
KILN_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
KILN_INLINE void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

// a > b ? a : b, which keeps a NaN in b.
KILN_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
// a < b ? a : b, which keeps a NaN in b.
KILN_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

KILN_INLINE Vec vec_from_half_bits(HalfVec bits, F16) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps((__m128i)bits);
#else
  // Shift exponent and mantissa into place, then correct the bias; infinities and subnormals apart.
  UintVec wide = __builtin_convertvector(bits, UintVec);
  UintVec magnitude = (wide & 0x7fff) << 13;
  UintVec exponent = magnitude & 0x0f800000;
  UintVec biased = magnitude + 0x38000000;
  UintVec subnormal = (UintVec)((Vec)(magnitude + 0x38800000) - (Vec)(UintVec{} + 0x38800000));
  UintVec special = biased + 0x38000000;
  UintVec result = exponent == 0 ? subnormal : (exponent == 0x0f800000 ? special : biased);
  return (Vec)(result | ((wide & 0x8000) << 16));
#endif
}

KILN_INLINE Vec vec_from_half_bits(HalfVec bits, Bf16) {
#if defined(__AVX512F__)  // GCC 12 widens halves one by one for the portable form
  return (Vec)((UintVec)_mm512_cvtepu16_epi32((__m256i)bits) << 16);
#elif defined(__AVX2__)
  return (Vec)((UintVec)_mm256_cvtepu16_epi32((__m128i)bits) << 16);
#else
  return (Vec)(__builtin_convertvector(bits, UintVec) << 16);
#endif
}

KILN_INLINE Vec load(const F16* p) { return vec_from_half_bits(*reinterpret_cast<const UnalignedHalfVec*>(p), F16{}); }
KILN_INLINE Vec load(const Bf16* p) {
  return vec_from_half_bits(*reinterpret_cast<const UnalignedHalfVec*>(p), Bf16{});
}

// The first n < kWidth elements, the rest zero; reads nothing beyond them.
#if defined(__AVX512F__)
KILN_INLINE Vec load_part(const float* p, int n) {
  return (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
template <typename Half>
KILN_INLINE Vec load_part(const Half* p, int n) {
  return vec_from_half_bits((HalfVec)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p), Half{});
}
#else
KILN_INLINE Vec load_part(const float* p, int n) {
  Vec v = {};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}
template <typename Half>
KILN_INLINE Vec load_part(const Half* p, int n) {
  HalfVec v = {};
  for (int i = 0; i < n; i++) v[i] = p[i].bits;
  return vec_from_half_bits(v, Half{});
}
#endif

// Writes the first n < kWidth elements.
KILN_INLINE void store_part(float* p, Vec v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
#else
  for (int i = 0; i < n; i++) p[i] = v[i];
#endif
}

// The lower and the upper half of the lanes. (Intrinsics without a mask make GCC 12 warn of uninitialized variables.)
KILN_INLINE DoubleVec doubles_from_low(Vec v) {
#if defined(__AVX512F__)
  return (DoubleVec)_mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, (__m512)v, 0));
#elif defined(__AVX2__)
  return (DoubleVec)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
#else
  return DoubleVec{v[0], v[1]};
#endif
}

KILN_INLINE DoubleVec doubles_from_high(Vec v) {
#if defined(__AVX512F__)
  return (DoubleVec)_mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, (__m512)v, 1));
#elif defined(__AVX2__)
  return (DoubleVec)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
  return DoubleVec{v[2], v[3]};
#endif
}

KILN_INLINE F16 f16_from_float(float x) {
#if defined(__AVX2__)
  return {static_cast<uint16_t>(_cvtss_sh(x, 0))};  // 0: to nearest, ties to even
#else
  union {
    float f;
    uint32_t u;
  } v = {x};
  uint32_t sign = (v.u >> 16) & 0x8000;
  v.u &= 0x7fffffff;
  if (v.u > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};   // NaN
  if (v.u >= 0x47800000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65536 and above: infinity
  if (v.u < 0x38800000) {  // subnormal in half precision: let a float addition round it
    v.f += 0.5f;
    return {static_cast<uint16_t>(sign | (v.u - 0x3f000000))};
  }
  v.u += 0xc8000fff + ((v.u >> 13) & 1);  // correct the bias, round ties to even
  return {static_cast<uint16_t>(sign | (v.u >> 13))};
#endif
}

KILN_INLINE Bf16 bf16_from_float(float x) {
  union {
    float f;
    uint32_t u;
  } v = {x};
  if ((v.u & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((v.u >> 16) | 0x40)};  // NaN stays NaN
  return {static_cast<uint16_t>((v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16)};
}

KILN_INLINE void put(float* p, float x) { *p = x; }
KILN_INLINE void put(F16* p, float x) { *p = f16_from_float(x); }
KILN_INLINE void put(Bf16* p, float x) { *p = bf16_from_float(x); }

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: added to x, it leaves round(x) in the low bits

// 2^(fraction + n) for |fraction| <= 0.5 and shifted = n + kRounder, -127 <= n <= 128: 0 at n = -127, infinity at 128.
// Minimax polynomial of degree 5.
KILN_INLINE Vec exp2_of_parts(Vec fraction, Vec shifted) {
  Vec y = broadcast(1.327647199e-3f);
  y = y * fraction + broadcast(9.675541334e-3f);
  y = y * fraction + broadcast(5.550713273e-2f);
  y = y * fraction + broadcast(2.402211972e-1f);
  y = y * fraction + broadcast(6.931469671e-1f);
  y = y * fraction + broadcast(1.0f);
  return y * (Vec)(((UintVec)shifted << 23) + 0x3f800000);
}

// 2^x for x <= 128, relative error below 2e-7; exactly 0 below -126.5 (so also for -infinity). NaN stays NaN.
KILN_INLINE Vec exp2(Vec x) {
  x = larger(broadcast(-127.0f), x);
  Vec shifted = x + broadcast(kRounder);
  return exp2_of_parts(x - (shifted - broadcast(kRounder)), shifted);
}

// e^x, relative error below 3e-7; exactly 0 below log(2^-126.5) = -87.7, infinity above log(2^127.5) = 88.4. NaN stays
// NaN. The remainder x - n log(2) is taken in two steps (Cody and Waite): x / log(2) alone would lose up to 7 bits.
KILN_INLINE Vec exp(Vec x) {
  const Vec per_log2 = broadcast(1.442695041f);
  x = larger(broadcast(-88.0f), smaller(broadcast(89.0f), x));
  Vec shifted = x * per_log2 + broadcast(kRounder);
  Vec n = shifted - broadcast(kRounder);
  Vec remainder = (x - n * broadcast(0.693359375f)) - n * broadcast(-2.12194440e-4f);  // n times the first is exact
  return exp2_of_parts(remainder * per_log2, shifted);
}

// tanh, relative error below 3e-7: an odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel.
KILN_INLINE Vec tanh(Vec x) {
  UintVec sign = (UintVec)x & 0x80000000;
  Vec a = smaller(broadcast(10.0f), (Vec)((UintVec)x & 0x7fffffff));  // tanh(10) rounds to 1
  Vec square = a * a;
  Vec p = broadcast(-5.665333625e-3f);
  p = p * square + broadcast(2.060670781e-2f);
  p = p * square + broadcast(-5.373094092e-2f);
  p = p * square + broadcast(1.333135437e-1f);
  p = p * square + broadcast(-3.333327957e-1f);
  Vec near = a + a * square * p;
  Vec far = 1.0f - 2.0f / (exp2(a * broadcast(2.885390082f)) + 1.0f);
  return (Vec)((UintVec)(a < broadcast(0.625f) ? near : far) | sign);
}

KILN_INLINE float max_of(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < kWidth; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

KILN_INLINE float sum_of(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = v[0];
  for (int i = 1; i < kWidth; i++) s += v[i];
  return s;
#endif
}

KILN_INLINE double sum_of(DoubleVec v) {
  double s = v[0];
  for (int i = 1; i < kWidth / 2; i++) s += v[i];
  return s;
}

// Lane i of the result is i.
KILN_INLINE Vec iota() {
  Vec v = {};
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; i++) v[i] = static_cast<float>(i);
  return v;
}

// Sums over groups of four lanes of a, b, c, d: lanes 4k .. 4k+3 of the result hold the sum over lanes 4k .. 4k+3
// of a, b, c and d.
KILN_INLINE Vec sums_of_four(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
#define KILN_LOW(x, y) (Vec) _mm512_unpacklo_ps((__m512)(x), (__m512)(y))
#define KILN_HIGH(x, y) (Vec) _mm512_unpackhi_ps((__m512)(x), (__m512)(y))
#define KILN_LOW2(x, y) (Vec) _mm512_unpacklo_pd((__m512d)(x), (__m512d)(y))
#define KILN_HIGH2(x, y) (Vec) _mm512_unpackhi_pd((__m512d)(x), (__m512d)(y))
#elif defined(__AVX2__)
#define KILN_LOW(x, y) (Vec) _mm256_unpacklo_ps((__m256)(x), (__m256)(y))
#define KILN_HIGH(x, y) (Vec) _mm256_unpackhi_ps((__m256)(x), (__m256)(y))
#define KILN_LOW2(x, y) (Vec) _mm256_unpacklo_pd((__m256d)(x), (__m256d)(y))
#define KILN_HIGH2(x, y) (Vec) _mm256_unpackhi_pd((__m256d)(x), (__m256d)(y))
#else
#define KILN_LOW(x, y) __builtin_shufflevector(x, y, 0, 4, 1, 5)
#define KILN_HIGH(x, y) __builtin_shufflevector(x, y, 2, 6, 3, 7)
#define KILN_LOW2(x, y) __builtin_shufflevector(x, y, 0, 1, 4, 5)
#define KILN_HIGH2(x, y) __builtin_shufflevector(x, y, 2, 3, 6, 7)
#endif
  Vec ab = KILN_LOW(a, b) + KILN_HIGH(a, b);  // a0+a2 b0+b2 a1+a3 b1+b3
  Vec cd = KILN_LOW(c, d) + KILN_HIGH(c, d);
  return KILN_LOW2(ab, cd) + KILN_HIGH2(ab, cd);
}

// dst[16] = the sixteen sums that four results of sums_of_four stand for: four per quad, over all lanes.
KILN_INLINE void store_sixteen(float* dst, Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
  // Adding 128-bit lanes 0 + 1 and 2 + 3 of two vectors, twice, leaves quads in order.
  auto pairs = [](Vec x, Vec y) __attribute__((always_inline)) {
    return (Vec)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88) +
           (Vec)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xdd);
  };
  store(dst, pairs(pairs(a, b), pairs(c, d)));
#elif defined(__AVX2__)
  auto halves = [](Vec x, Vec y) __attribute__((always_inline)) {
    return (Vec)_mm256_permute2f128_ps((__m256)x, (__m256)y, 0x20) +
           (Vec)_mm256_permute2f128_ps((__m256)x, (__m256)y, 0x31);
  };
  store(dst, halves(a, b));
  store(dst + 8, halves(c, d));
#else
  store(dst, a);
  store(dst + 4, b);
  store(dst + 8, c);
  store(dst + 12, d);
#endif
}

// Transposes the kWidth x kWidth matrix of row vectors in place: stage s swaps the off-diagonal s x s blocks.
template <int kStage>
KILN_INLINE void transpose_stage(Vec (&rows)[kWidth]) {
  IntVec low, high;
#pragma GCC unroll 16
  for (int lane = 0; lane < kWidth; lane++) {
    low[lane] = (lane & kStage) ? lane - kStage + kWidth : lane;
    high[lane] = (lane & kStage) ? lane + kWidth : lane + kStage;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; i++) {
    if (i & kStage) continue;
    Vec a = rows[i], b = rows[i + kStage];
#if defined(__clang__)
    for (int lane = 0; lane < kWidth; lane++) {
      rows[i][lane] = low[lane] < kWidth ? a[low[lane]] : b[low[lane] - kWidth];
      rows[i + kStage][lane] = high[lane] < kWidth ? a[high[lane]] : b[high[lane] - kWidth];
    }
#else
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + kStage] = __builtin_shuffle(a, b, high);
#endif
  }
}

KILN_INLINE void transpose(Vec (&rows)[kWidth]) {
  transpose_stage<1>(rows);
  transpose_stage<2>(rows);
  if constexpr (kWidth > 4) transpose_stage<4>(rows);
  if constexpr (kWidth > 8) transpose_stage<8>(rows);
}

}  // namespace kiln::KILN_ISA
