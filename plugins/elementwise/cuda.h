// The token-wise operators on an NVIDIA GPU: operands of a call and the entry points. Semantics are in schema.py; all
// operands have one 16-bit type, arithmetic is float32. Knows nothing of ONNX Runtime. Owns and allocates no memory,
// never waits for the device, and can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../cuda_element.h"

namespace kiln::cuda {

// Any output may be one of the first two inputs.
struct AddRmsNorm {
  const void* x;      // [rows, hidden]
  const void* skip;   // [rows, hidden]
  const void* gamma;  // [hidden]
  void* normalized;   // [rows, hidden]
  void* sum;          // [rows, hidden] or null
  int64_t rows, hidden;
  float epsilon;
  Element element;
};

struct SwiGlu {
  const void* gate;  // [rows, width], rows `stride` apart
  const void* up;    // likewise
  void* output;      // [rows, width], dense
  int64_t rows, width, stride;
  float alpha;
  Element element;
};

cudaError_t run(const AddRmsNorm& call, cudaStream_t stream);
cudaError_t run(const SwiGlu& call, cudaStream_t stream);

}  // namespace kiln::cuda
