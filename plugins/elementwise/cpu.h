// A residual sum with its RMS norm, and the gate of SwiGLU, on the CPU: one call's operands and the entry points.
//
// Semantics are in schema.py. Knows nothing of ONNX Runtime: threads come in as a function, operands as pointers.
// Nothing here owns memory. An output may be the very buffer of an input, gamma excepted; two outputs may not.
#pragma once

#include <cstdint>

#include "../parallel.h"

namespace kiln {

struct AddRmsNorm {
  const float* x;  // [rows, hidden]
  const float* skip;
  const float* gamma;  // [hidden]
  float* normalized;   // [rows, hidden]
  float* sum;          // [rows, hidden], or null: nobody reads it
  int64_t rows;
  int64_t hidden;
  float epsilon;
};

struct SwiGlu {
  const float* gate;  // [size]
  const float* up;
  float* output;
  int64_t size;
  float alpha;
};

// A row's result depends on that row only, to the bit: not on the others, nor on the number of threads.
void run(const AddRmsNorm& call, Parallel& parallel);
void run(const SwiGlu& call, Parallel& parallel);

}  // namespace kiln
