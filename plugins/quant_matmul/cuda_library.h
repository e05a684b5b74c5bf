// Products of 8-bit rows by 8-bit weights (W8A8) on the tensor cores, by cuBLASLt: int8 with int32 sums, or e4m3 with
// float32 sums. cuBLASLt is found at run time, where ONNX Runtime or torch has it; the library neither links against it
// nor ships it.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "cuda.h"

namespace kiln::cuda {

// Rows that the products of int8 have in truth: for some numbers of rows in between cuBLASLt takes longer than for more
// (H200, width 4096, depth 14336: 96 rows 40.5 us, 128 rows 33.6).
inline int64_t padded_rows(int64_t rows) { return rows <= 64 ? (rows + 15) / 16 * 16 : (rows + 63) / 64 * 64; }

// What a call needs for the time it runs, with rows padded.
struct QuantBuffers {
  void* q;           // [rows, depth] bytes
  float* row_scale;  // [rows]
  void* sums;        // [rows, weight rows] of 4 bytes
};

// cuBLASLt and its workspace for calls of one stream at a time, on the current device. Remembers how each shape runs.
class QuantLibrary {
 public:
  // Loads cuBLASLt and allocates: not while a CUDA graph is captured. `error` says what failed, or is null.
  explicit QuantLibrary(const char** error);
  ~QuantLibrary();
  QuantLibrary(const QuantLibrary&) = delete;
  QuantLibrary& operator=(const QuantLibrary&) = delete;

  // Quantises the rows of x by themselves, multiplies, scales, adds the bias. One scale for each weight row; the call's
  // scratch is not used. Null, or what failed.
  const char* run(const QuantLinear& call, const QuantBuffers& buffers, cudaStream_t stream);

 private:
  struct Plan;
  using Key = std::array<int64_t, 4>;
  Plan* plan_of(const QuantLinear& call, bool direct);

  void* handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Key, Plan*> plans_;
};

// Null if the library takes this call, else what was found and what was expected.
const char* unsupported_by_library(const QuantLinear& call);

}  // namespace kiln::cuda
