// Products of any number of rows by cuBLAS, with the same operands and meaning. cuBLAS is found at run time, where ONNX
// Runtime or torch has it; the library neither links against it nor ships it.
#pragma once

#include <algorithm>

#include "cuda.h"
#include "cuda_algorithms.h"

namespace kiln::cuda {

// Rows of one product of cuBLAS where a call of so many is cut into pieces of at most `most` rows, for which large
// products are cut evenly; 0: never. A call of a few rows more than `most` is worth no cut.
inline int64_t piece_rows(int64_t rows, int64_t most) {
  if (most <= 0 || rows <= most + most / 3) return rows;
  constexpr int64_t kWhole = 128;  // of cuBLAS's tiles
  const int64_t pieces = (rows + most - 1) / most;
  return ((rows + pieces - 1) / pieces + kWhole - 1) / kWhole * kWhole;
}

// cuBLAS and its workspace for calls of one stream at a time, on the current device.
class LinearLibrary {
 public:
  // Loads cuBLAS and allocates: not while a CUDA graph is captured. `error` says what failed, or is null.
  explicit LinearLibrary(const char** error);
  ~LinearLibrary();
  LinearLibrary(const LinearLibrary&) = delete;
  LinearLibrary& operator=(const LinearLibrary&) = delete;

  // Multiplies `piece` rows at a time. With SwiGLU, `packed` is memory for [piece, 2 * width] values, both halves of
  // their product, rounded; else unused. The call's scratch is not used. Null, or what failed.
  const char* run(const Linear& call, int64_t piece, const Algorithms& algorithms, void* packed,
                  cudaStream_t stream) const;

  // Times the algorithms for a call, whose weight stands `copies` times at `weights`, together more than the L2 cache
  // holds: at most `most` of them, cuBLAS's own choice first. Their number, or -1 where the device fails. Waits.
  int time(const Linear& call, const void* const* weights, int copies, void* packed, cudaStream_t stream,
           TimedAlgorithm* found, int most) const;

 private:
  const char* run_piece(const Linear& call, const cublas::Algorithm* algorithm, void* packed,
                        cudaStream_t stream) const;
  bool multiply(const Linear& call, const cublas::Algorithm* algorithm, void* product, cudaStream_t stream) const;

  void* handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace kiln::cuda
