// Writes the new tokens' keys (rotated) and values to their slots of the caches, as they are or as int8 with a scale
// for each head. Knows nothing of attention.
#pragma once

#include "cuda_device.cuh"

namespace kiln::cuda {

constexpr int kWriteThreads = 128;

// Last sequence that starts at or before a token; called by whole warps, for one token.
__device__ __forceinline__ int sequence_of(const PagedAttention& call, int token) {
  const int lane = threadIdx.x % 32;
  int low = 0, count = call.seqs;
  while (count > 1) {
    const int step = (count + 31) / 32, at = lane * step;
    const unsigned before = __ballot_sync(kAll, at < count && call.cumulative[low + at] <= token);
    const int skipped = max(__popc(before) - 1, 0) * step;
    low += skipped;
    count = min(step, count - skipped);
  }
  return low;
}

// A warp takes one token and 32 vectors of 8 elements, keys first. Where there is one, the counter becomes 0.
template <typename T>
__global__ void __launch_bounds__(kWriteThreads)
    write_kernel(const __grid_constant__ PagedAttention call, int* counter) {
  wait_for_previous();
  if (counter && blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
  let_next_start();  // only now: the next kernel reads queries before it waits for this one
  const int size = call.kv_heads * call.head_dim, vectors = size / 8, parts = (2 * vectors + 31) / 32;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kWriteThreads + threadIdx.x) / 32;
  const int token = static_cast<int>(warp / parts);
  int vector = static_cast<int>(warp % parts) * 32 + threadIdx.x % 32;
  if (token >= call.tokens) return;
  const int slot = call.slots[token];
  if (slot < 0 || slot >= call.blocks * static_cast<int64_t>(call.block_size)) return;
  const Sequence of(call, sequence_of(call, token));
  if (vector >= 2 * vectors || token < of.first || token >= of.first + of.count) return;
  const bool is_value = vector >= vectors;
  if (is_value) vector -= vectors;
  const T* from = static_cast<const T*>(is_value ? call.value : call.key) +
                  token * (is_value ? call.value_stride : call.key_stride) + vector * 8;
  T* cache = static_cast<T*>(is_value ? call.value_cache : call.key_cache);
  T* to = cache + static_cast<int64_t>(slot) * size + vector * 8;
  const int dim = vector * 8 % call.head_dim;
  const uint4 data = is_value ? __ldg(reinterpret_cast<const uint4*>(from))
                              : rotated_vector(call, from - dim, dim, of.past + token - of.first);
  *reinterpret_cast<uint4*>(to) = data;
}

// Stores a head's 8 values of this lane as int8 and their scale, max|x| / 127 of the head. A head with a NaN or an
// infinity has the scale NaN. Called by whole warps; lanes beyond the head have zeros and `inside` false.
__device__ __forceinline__ void store_quantised(const float (&x)[8], bool inside, int8_t* to, float* scale) {
  float largest = 0, zeros = 0;  // 0 * x is NaN for what is not finite
#pragma unroll
  for (int i = 0; i < 8; i++) {
    largest = fmaxf(largest, fabsf(x[i]));
    zeros += x[i] * 0.0f;
  }
  for (int d = 16; d > 0; d /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, d));
    zeros += __shfl_xor_sync(kAll, zeros, d);
  }
  const float step = zeros == 0 ? largest / 127.0f : __int_as_float(0x7fffffff);
  uint32_t packed[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float level = step > 0 ? fminf(fmaxf(x[i] / step, -127.0f), 127.0f) : 0.0f;
    packed[i / 4] |= (static_cast<uint32_t>(__float2int_rn(level)) & 0xff) << i % 4 * 8;
  }
  if (inside) *reinterpret_cast<uint2*>(to) = {packed[0], packed[1]};
  if (threadIdx.x % 32 == 0) *scale = step;
}

// The same where a cache is int8: a warp takes one head of a token's keys or values. Rotated keys are not rounded
// before they are quantised.
template <typename T>
__global__ void __launch_bounds__(kWriteThreads) write_quantised_kernel(const __grid_constant__ PagedAttention call) {
  wait_for_previous();
  let_next_start();
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kWriteThreads + threadIdx.x) / 32;
  const int token = static_cast<int>(warp / (2 * call.kv_heads));
  const int of_token = static_cast<int>(warp % (2 * call.kv_heads));
  if (token >= call.tokens) return;
  const int slot = call.slots[token];
  if (slot < 0 || slot >= call.blocks * static_cast<int64_t>(call.block_size)) return;
  const Sequence of(call, sequence_of(call, token));
  if (token < of.first || token >= of.first + of.count) return;
  const bool is_value = of_token >= call.kv_heads;
  const int head = is_value ? of_token - call.kv_heads : of_token, dim = threadIdx.x % 32 * 8;
  const bool inside = dim < call.head_dim;
  const T* from = static_cast<const T*>(is_value ? call.value : call.key) +
                  token * (is_value ? call.value_stride : call.key_stride) + head * call.head_dim;
  const int position = of.past + token - of.first;
  const int64_t row = static_cast<int64_t>(slot) * call.kv_heads + head, at = row * call.head_dim + dim;
  void* cache = is_value ? call.value_cache : call.key_cache;
  float* scales = is_value ? call.value_scale : call.key_scale;
  if (!scales) {
    if (!inside) return;
    *reinterpret_cast<uint4*>(static_cast<T*>(cache) + at) = is_value
                                                                 ? __ldg(reinterpret_cast<const uint4*>(from + dim))
                                                                 : rotated_vector(call, from, dim, position);
    return;
  }
  float x[8] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = is_value ? Numbers<T>::unpack(__ldg(reinterpret_cast<const uint32_t*>(from + dim + i)))
                                   : rotated(call, from, dim + i, position);
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  }
  store_quantised(x, inside, static_cast<int8_t*>(cache) + at, scales + row);
}

}  // namespace kiln::cuda
