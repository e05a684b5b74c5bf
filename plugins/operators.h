// The custom operators of the library, by folder; register.cc hands them to ONNX Runtime.
#pragma once

#include <vector>

#include "ort_abi.h"

namespace kiln::ort {

// The operators live as long as the library.
std::vector<const OrtCustomOp*> paged_attention_operators();
std::vector<const OrtCustomOp*> elementwise_operators();
std::vector<const OrtCustomOp*> quant_matmul_operators();
std::vector<const OrtCustomOp*> sampling_operators();

}  // namespace kiln::ort
