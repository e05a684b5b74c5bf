// Sums of four 8-bit products in each lane, as this instruction set does them.
//
// A byte vector holds, for kWidth outputs, four consecutive weights each; activations come as four bytes, the same in
// every lane. vpdpbusd and vpmaddubsw multiply unsigned by signed bytes: weights are the unsigned ones, which is how
// they are stored (+ 128 or + 8), and the sum then is too large by that offset times the sum of the activations. Where
// 255 * 127 * 2 would saturate (vpmaddubsw on 8-bit weights), the sign of the weight goes to the activation instead.
#pragma once

#include "../simd.h"

namespace kiln::KILN_ISA {

typedef int8_t ByteVec __attribute__((vector_size(kWidth * 4)));
typedef ByteVec UnalignedByteVec __attribute__((aligned(1), may_alias));
typedef int32_t UnalignedInt __attribute__((aligned(1), may_alias));

KILN_INLINE ByteVec load_bytes(const void* p) { return *static_cast<const UnalignedByteVec*>(p); }
// The four bytes at p in every lane.
KILN_INLINE ByteVec broadcast_four(const int8_t* p) {
  return (ByteVec)(*reinterpret_cast<const UnalignedInt*>(p) + IntVec{});
}

// Runs over the steps [s, end) of a panel: load(s) fetches a vector, add(s, odd) uses the step that it is, or the even
// (0) or odd (1) one of the two 4-bit steps that it holds.
template <int kBits, typename Load, typename Add>
KILN_INLINE void for_steps(int64_t s, int64_t end, Load load, Add add) {
  constexpr int kPerVector = 8 / kBits;
  if (s % kPerVector && s < end) {
    load(s);
    add(s++, 1);
  }
  for (; s + kPerVector <= end; s += kPerVector) {
    load(s);
    add(s, 0);
    if (kBits == 4) add(s + 1, 1);
  }
  if (s < end) {
    load(s);
    add(s, 0);
  }
}

// The even (0) or the odd (1) step of a vector of 4-bit weights.
KILN_INLINE ByteVec nibbles(ByteVec packed, int odd) { return (ByteVec)((UintVec)packed >> (4 * odd) & 0x0f0f0f0f); }

// sums + unsigned weights . activations
KILN_INLINE IntVec add_unsigned(IntVec sums, ByteVec weights, ByteVec activations) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)activations);
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)activations);
  return sums + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)activations);
  return sums + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < kWidth * 4; i++) sums[i / 4] += static_cast<uint8_t>(weights[i]) * activations[i];
  return sums;
#endif
}

// Weights as the product wants them, made once for all rows. kOffset is what their bytes are above their values.
template <int kBits>
struct Weights {
  static constexpr int kOffset = 1 << (kBits - 1);
  ByteVec bytes;
  __attribute__((always_inline)) void set(ByteVec stored) { bytes = stored; }
  __attribute__((always_inline)) IntVec added_to(IntVec sums, ByteVec activations) const {
    return add_unsigned(sums, bytes, activations);
  }
};

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
template <>
struct Weights<8> {
  static constexpr int kOffset = 0;
  __m512i magnitudes;
  __mmask64 negative;
  __attribute__((always_inline)) void set(ByteVec stored) {
    const __m512i values = _mm512_xor_si512((__m512i)stored, _mm512_set1_epi8(-128));
    magnitudes = _mm512_abs_epi8(values);
    negative = _mm512_movepi8_mask(values);
  }
  __attribute__((always_inline)) IntVec added_to(IntVec sums, ByteVec activations) const {
    const __m512i a = (__m512i)activations;
    return add_unsigned(sums, (ByteVec)magnitudes,
                        (ByteVec)_mm512_mask_sub_epi8(a, negative, _mm512_setzero_si512(), a));
  }
};
#elif defined(__AVX2__) && !defined(__AVX512VNNI__)
template <>
struct Weights<8> {
  static constexpr int kOffset = 0;
  __m256i values, magnitudes;
  __attribute__((always_inline)) void set(ByteVec stored) {
    values = _mm256_xor_si256((__m256i)stored, _mm256_set1_epi8(-128));
    magnitudes = _mm256_abs_epi8(values);
  }
  __attribute__((always_inline)) IntVec added_to(IntVec sums, ByteVec activations) const {
    return add_unsigned(sums, (ByteVec)magnitudes, (ByteVec)_mm256_sign_epi8((__m256i)activations, values));
  }
};
#endif

}  // namespace kiln::KILN_ISA
