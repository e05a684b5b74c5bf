// The two 16-bit element types in device code: conversions, pairs, 16-byte vectors. Knows no kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kiln::cuda {

__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two neighbours in one register, the first in the low half.
template <typename T>
__device__ uint32_t pack_pair(float x, float y);
template <>
__device__ inline uint32_t pack_pair<__half>(float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ inline uint32_t pack_pair<__nv_bfloat16>(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename T>
__device__ float2 unpack_pair(uint32_t pair);
template <>
__device__ inline float2 unpack_pair<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
template <>
__device__ inline float2 unpack_pair<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

// Eight neighbours, 16 bytes.
constexpr int kVector = 8;

template <typename T>
__device__ void unpack_vector(const uint4& vector, float (&x)[kVector]) {
  const uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_pair<T>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ uint4 pack_vector(const float (&x)[kVector]) {
  return {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(x[4], x[5]), pack_pair<T>(x[6], x[7])};
}

// gate * sigmoid(alpha * gate) * up
__device__ inline float swiglu(float gate, float up, float alpha = 1.0f) {
  return __fdividef(gate, 1.0f + __expf(-alpha * gate)) * up;
}

}  // namespace kiln::cuda
