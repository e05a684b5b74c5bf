// Between the files of the CUDA library that hold kernels: what they know of the device, and how they launch.
#pragma once

#include <utility>

#include "cuda_attention.h"

namespace kiln::cuda {

struct Device {
  int major, multiprocessors, shared_bytes;  // shared memory that a block may have
};

// Of the current device; read once.
cudaError_t current_device(Device* device);

// The kernel may start before the one launched before it is done, if it waits for that by itself (sm_90 on).
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, cudaStream_t stream,
                   bool overlapping, Arguments&&... arguments) {
  const void* address = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlapping ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
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
cudaError_t launch_prefill(const PagedAttention& call, const Device& device, cudaStream_t stream);
cudaError_t launch_hopper(const PagedAttention& call, const Device& device, cudaStream_t stream);

}  // namespace kiln::cuda
