// Writes the new tokens' keys (rotated) and values to their slots of the caches. Knows nothing of attention.
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

// A warp takes one token and 32 vectors of 8 elements, keys first.
template <typename T>
__global__ void __launch_bounds__(kWriteThreads) write_kernel(const __grid_constant__ PagedAttention call) {
  wait_for_previous();
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

}  // namespace kiln::cuda
