// What the CUDA kernels keep for each stream: scratch memory, and libraries with a workspace, made in the first call
// and kept, as captured graphs hold on to them. Calls of one stream run one after another, so they share it. Knows no
// kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <memory>
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

// Scratch memory of a size that varies: a buffer for each power of two, so that steps of other sizes share them and
// what a captured graph writes to stays where it is.
inline void* varying_scratch_of(cudaStream_t stream, size_t bytes) {
  static const char purposes[8 * sizeof(size_t)] = {};
  int power = 0;
  while ((size_t{1} << power) < bytes) power++;
  return scratch_of(stream, purposes + power, size_t{1} << power);
}

// A library's wrapper for a stream, whose calls share its workspace. Its constructor takes where to say what failed.
template <typename Library>
Library& library_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Library>> libraries;
  int device = 0;
  require_cuda(cudaGetDevice(&device), "the CUDA device does not answer");
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Library>& library = libraries[{device, stream}];
  if (!library) {
    const char* error = nullptr;
    auto fresh = std::make_unique<Library>(&error);
    if (error) fail(error);
    library = std::move(fresh);
  }
  return *library;
}

}  // namespace kiln::ort
