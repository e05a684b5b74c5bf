// Scratch memory of the CUDA kernels: one buffer for each stream and purpose, allocated in the first call and kept.
// Calls of one stream run one after another, so they share it. Knows no kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <tuple>

#include "ort_binding.h"

namespace kiln::ort {

inline void require_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(what, ": ", cudaGetErrorString(error));
}

// `purpose` is any address that names it. The memory is zero at first; its size must not change.
inline void* scratch_of(cudaStream_t stream, const void* purpose, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, cudaStream_t, const void*>, void*> buffers;
  int device = 0;
  require_cuda(cudaGetDevice(&device), "the CUDA device does not answer");
  std::lock_guard<std::mutex> lock(mutex);
  void*& buffer = buffers[{device, stream, purpose}];
  if (!buffer) {
    cudaStreamCaptureStatus status;
    require_cuda(cudaStreamIsCapturing(stream, &status), "the CUDA stream does not answer");
    if (status != cudaStreamCaptureStatusNone)
      fail("scratch memory cannot be allocated while a CUDA graph is captured: run the session once before");
    void* fresh = nullptr;
    require_cuda(cudaMalloc(&fresh, bytes), "no device memory for the kernels' scratch buffer");
    require_cuda(cudaMemsetAsync(fresh, 0, bytes, stream), "the scratch buffer cannot be cleared");
    buffer = fresh;
  }
  return buffer;
}

}  // namespace kiln::ort
