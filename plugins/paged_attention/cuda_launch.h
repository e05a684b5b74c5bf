// Between the files of the CUDA library that hold kernels: what they know of the device, and how they launch.
#pragma once

#include "../cuda_launch.cuh"
#include "cuda_attention.h"

namespace kiln::cuda {

struct Device {
  int major, multiprocessors, shared_bytes;  // shared memory that a block may have
};

// Of the current device; read once.
cudaError_t current_device(Device* device);

// Whether keys, or keys and values, or values are int8.
inline bool is_quantised(const PagedAttention& call) { return call.key_scale || call.value_scale; }

// `launch` of a kernel with more shared memory than any kernel may have unasked.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_large(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, cudaStream_t stream,
                         const Arguments&... arguments) {
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                static_cast<size_t>(shared_bytes), stream, arguments...);
}

// At least as many tiles as the prefill path can find in a call, whatever its lengths.
inline int most_tiles(const PagedAttention& call, int rows_per_tile) {
  const int64_t rows = static_cast<int64_t>(call.tokens) * (call.heads / call.kv_heads);
  const int64_t broken = rows / (call.decode_rows + 1);  // so many sequences can end with a tile that is not full
  return static_cast<int>(rows / rows_per_tile + (broken < call.seqs ? broken : call.seqs));
}

size_t decode_scratch_bytes(const Device& device);
bool decode_fits(const PagedAttention& call, const Device& device);
cudaError_t launch_decode(const PagedAttention& call, const Device& device, cudaStream_t stream);
cudaError_t launch_prefill(const PagedAttention& call, cudaStream_t stream);
// `next_tile` is 0 when the kernel before ends, where no cache is int8.
cudaError_t launch_hopper(const PagedAttention& call, const Device& device, int* next_tile, cudaStream_t stream);

}  // namespace kiln::cuda
