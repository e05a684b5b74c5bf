// Products with 16-bit weights on an NVIDIA GPU, for the few rows of a decode step: one call's operands and the entry
// points. Semantics are in schema.py; sums are float32. Knows nothing of ONNX Runtime. Owns and allocates no memory,
// never waits for the device, and can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../cuda_element.h"

namespace kiln::cuda {

// All pointers are device pointers, aligned to 16 bytes.
struct Linear {
  const void* x;       // [rows, depth]
  const void* weight;  // [width, depth]; with swiglu [2 * width, depth], the gate's rows before the up projection's
  const void* bias;    // [width] or [2 * width], or null
  void* y;             // [rows, width]
  void* scratch;       // scratch_bytes() of memory, zero at first and then left to the calls of one stream
  int64_t rows, depth, width;
  bool swiglu;  // y = gate * sigmoid(gate) * up of the two halves of the product
  Element element;
};

// Of so many rows at most; beyond, cuBLAS is as fast or faster (measured on an H200).
constexpr int64_t kLinearRows = 32;

// What `scratch` must hold on the current device, for calls of any shape. Zero on failure.
size_t linear_scratch_bytes();

// Null if the kernels can do this call, else what was found and what was expected. Looks at shapes and pointers alone.
const char* unsupported(const Linear& call);

// `call` must be supported. The portable kernel runs on any device from compute capability 8.0 on and is what `run`
// takes where it has nothing better; both give the same bits for a row whatever the other rows are.
cudaError_t run(const Linear& call, cudaStream_t stream);
cudaError_t run_portable(const Linear& call, cudaStream_t stream);

}  // namespace kiln::cuda
