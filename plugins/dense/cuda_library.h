// Products of any number of rows by cuBLAS, with the same operands and meaning. cuBLAS is found at run time, where ONNX
// Runtime or torch has it; the library neither links against it nor ships it.
#pragma once

#include "cuda.h"
#include "cuda_algorithms.h"

namespace kiln::cuda {

// cuBLAS and its workspace for calls of one stream at a time, on the current device.
class LinearLibrary {
 public:
  // Loads cuBLAS and allocates: not while a CUDA graph is captured. `error` says what failed, or is null.
  explicit LinearLibrary(const char** error);
  ~LinearLibrary();
  LinearLibrary(const LinearLibrary&) = delete;
  LinearLibrary& operator=(const LinearLibrary&) = delete;

  // By one of cuBLASLt's algorithms, or by cuBLAS's own choice where it is null or cannot do the call. With SwiGLU,
  // `packed` is memory for [rows, 2 * width] values, both halves of the product, rounded; else unused. The call's
  // scratch is not used. Null, or what failed.
  const char* run(const Linear& call, const cublas::Algorithm* algorithm, void* packed, cudaStream_t stream) const;

  // Times the algorithms for a call, whose weight stands `copies` times at `weights`, together more than the L2 cache
  // holds: at most `most` of them, cuBLAS's own choice first. Their number, or -1 where the device fails. Waits.
  int time(const Linear& call, const void* const* weights, int copies, void* packed, cudaStream_t stream,
           TimedAlgorithm* found, int most) const;

 private:
  bool multiply(const Linear& call, const cublas::Algorithm* algorithm, void* product, cudaStream_t stream) const;

  void* handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace kiln::cuda
