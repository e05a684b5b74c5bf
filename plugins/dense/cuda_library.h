// Products of any number of rows by cuBLAS, with the same operands and meaning. cuBLAS is found at run time, where ONNX
// Runtime or torch has it; the library neither links against it nor ships it.
#pragma once

#include "cuda.h"

namespace kiln::cuda {

// cuBLAS and its workspace for calls of one stream at a time, on the current device.
class LinearLibrary {
 public:
  // Loads cuBLAS and allocates: not while a CUDA graph is captured. `error` says what failed, or is null.
  explicit LinearLibrary(const char** error);
  ~LinearLibrary();
  LinearLibrary(const LinearLibrary&) = delete;
  LinearLibrary& operator=(const LinearLibrary&) = delete;

  // With SwiGLU, `packed` is memory for [rows, 2 * width] values, both halves of the product, rounded; else unused.
  // The call's scratch is not used. Null, or what failed.
  const char* run(const Linear& call, void* packed, cudaStream_t stream) const;

 private:
  void* handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace kiln::cuda
