// Choosing tokens from logits, on the CPU: one call's operands and the entry point. Semantics are in schema.py.
// Knows nothing of ONNX Runtime: threads come in as a function, operands as pointers. Owns no memory of the caller's.
#pragma once

#include <cstdint>

#include "../parallel.h"

namespace kiln {

struct Sample {
  const float* logits;  // [rows, vocabulary]
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int32_t* position;
  int32_t* tokens;  // [rows], as all above
  int64_t rows;
  int64_t vocabulary;
};

// A row's token depends on that row only.
void run(const Sample& call, Parallel& parallel);

}  // namespace kiln
