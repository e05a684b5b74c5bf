// Numbers of 8 and 4 bits in device code: four bytes at a time become pairs of a 16-bit type, exactly. Knows no kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kiln::cuda {

template <typename T>
struct PairOf;
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// x - y and x * y of pairs that stand in one register.
template <typename T>
__device__ __forceinline__ uint32_t difference_of_pairs(uint32_t x, uint32_t y) {
  using Pair = typename PairOf<T>::Type;
  const Pair z = __hsub2(reinterpret_cast<const Pair&>(x), reinterpret_cast<const Pair&>(y));
  return reinterpret_cast<const uint32_t&>(z);
}
template <typename T>
__device__ __forceinline__ uint32_t product_of_pairs(uint32_t x, uint32_t y) {
  using Pair = typename PairOf<T>::Type;
  const Pair z = __hmul2(reinterpret_cast<const Pair&>(x), reinterpret_cast<const Pair&>(y));
  return reinterpret_cast<const uint32_t&>(z);
}

// Four signed integers: bytes 0 and 1 to `low`, 2 and 3 to `high`.
template <typename T>
__device__ __forceinline__ void expand(uint32_t bytes, uint32_t& low, uint32_t& high);
template <>
__device__ __forceinline__ void expand<__half>(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const uint32_t shifted = bytes ^ 0x80808080u;  // 0x64xx is 1024 + xx
  low = difference_of_pairs<__half>(__byte_perm(shifted, 0x64646464u, 0x4140), 0x64806480u);
  high = difference_of_pairs<__half>(__byte_perm(shifted, 0x64646464u, 0x4342), 0x64806480u);
}
template <>
__device__ __forceinline__ void expand<__nv_bfloat16>(uint32_t bytes, uint32_t& low, uint32_t& high) {
  // 0x43xx is 128 + the low seven bits, less 128 or, where the sign bit is set, 256.
  const uint32_t first = __byte_perm(bytes, 0x43434343u, 0x4140), second = __byte_perm(bytes, 0x43434343u, 0x4342);
  low = difference_of_pairs<__nv_bfloat16>(first & 0xff7fff7fu, first & 0xff80ff80u);
  high = difference_of_pairs<__nv_bfloat16>(second & 0xff7fff7fu, second & 0xff80ff80u);
}

// Four numbers of 8 bits with 4 of exponent and 3 of mantissa (e4m3), finite ones: shifted to where the 16-bit type has
// its own, then multiplied by the power of two between the two biases, which also puts subnormals right.
template <typename T>
__device__ __forceinline__ void expand_float8(uint32_t bytes, uint32_t& low, uint32_t& high) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kMask = kIsHalf ? 0x3f803f80u : 0x07f007f0u, kShift = kIsHalf ? 1 : 4;
  constexpr uint32_t kPower = kIsHalf ? 0x5c005c00u : 0x7b807b80u;  // 2^8, 2^120
  const auto number = [](uint32_t pair) {
    return product_of_pairs<T>((pair >> kShift & kMask) | (pair & 0x80008000u), kPower);
  };
  low = number(__byte_perm(bytes, 0, 0x1404));
  high = number(__byte_perm(bytes, 0, 0x3424));
}

// Eight integers of 4 bits + 8: nibbles i and i + 4 of the word are pair i.
template <typename T>
__device__ __forceinline__ void expand_nibbles(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kBase = kIsHalf ? 0x64006400u : 0x43004300u;    // 1024, 128
  constexpr uint32_t kOffset = kIsHalf ? 0x64086408u : 0x43084308u;  // and 8 more
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = difference_of_pairs<T>((word >> 4 * i & 0x000f000fu) | kBase, kOffset);
}

// Four bytes of shared memory.
__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

}  // namespace kiln::cuda
