// Choosing tokens on an NVIDIA GPU: operands of a call and the entry points. Semantics are in schema.py. Knows nothing
// of ONNX Runtime. Owns and allocates no memory, never waits for the device, and can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kiln::cuda {

enum class LogitType { kFloat32, kFloat16, kBfloat16 };

struct Sample {
  const void* logits;  // [rows, vocabulary]
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int32_t* position;
  int32_t* tokens;  // [rows], as all above
  int64_t rows, vocabulary;
  LogitType type;
};

struct FeedTokens {
  const int32_t* ids;       // [tokens]
  const int32_t* feed;      // [tokens]
  const int32_t* previous;  // [max_rows]
  int32_t* fed;             // [tokens]
  int64_t tokens, max_rows;
};

cudaError_t run(const Sample& call, cudaStream_t stream);
cudaError_t run(const FeedTokens& call, cudaStream_t stream);

}  // namespace kiln::cuda
