// Products of 16-bit rows with weights of 8 or 4 bits on an NVIDIA GPU: one call's operands and the entry points.
// Semantics and layouts are in cuda_schema.py and cuda_packing.py. Knows nothing of ONNX Runtime. Owns and allocates no
// memory, never waits for the device, and can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../cuda_element.h"

namespace kiln::cuda {

enum class WeightFormat { kInt8, kFloat8, kInt4 };

// All pointers are device pointers, aligned to 16 bytes.
struct QuantLinear {
  const void* x;       // [rows, depth]
  const void* weight;  // [width, bytes of depth]; with swiglu 2 * width rows, the gate's before the up projection's
  const float* scale;  // [groups, width] or [groups, 2 * width]
  const void* bias;    // [width] or [2 * width], or null
  void* y;             // [rows, width]
  void* scratch;       // quant_linear_scratch_bytes(): zero at first and then left to the calls of one stream
  int64_t rows, depth, width, group;  // group: values of depth that share a scale; 0: all
  int64_t few_rows;                   // up to so many rows are integers where that pays, kFewRows at most
  bool swiglu;
  Element element;
  WeightFormat format;
};

inline int64_t weight_rows(const QuantLinear& call) { return call.swiglu ? 2 * call.width : call.width; }
inline int64_t row_bytes(const QuantLinear& call) {
  return call.format == WeightFormat::kInt4 ? call.depth / 2 : call.depth;
}

// What a launch of the kernels takes at most; `run` cuts more rows into pieces, which read the weights again.
constexpr int64_t kQuantLinearRows = 64;

constexpr int64_t kEqualRows = 32, kFewRows = 4;

// What `scratch` must hold on the current device, for calls of any shape. Zero on failure.
size_t quant_linear_scratch_bytes();

// Null if the kernels can do this call, else what was found and what was expected. Looks at shapes and pointers alone.
const char* unsupported(const QuantLinear& call);

// Multiplies x as it is: weights become 16-bit numbers on their way to the tensor cores, exactly. `call` must be
// supported. `run_portable` needs nothing that compute capability 8.0 lacks, `run` takes Hopper's kernels where it can:
// with int8 weights, up to `few_rows` rows become integers of 16 bits (cuda_few_rows.cuh). Up to kEqualRows rows a
// row's result depends on that row and on whether it is an integer alone, to the bit; more are summed in another order.
cudaError_t run(const QuantLinear& call, cudaStream_t stream);
cudaError_t run_portable(const QuantLinear& call, cudaStream_t stream);

}  // namespace kiln::cuda
