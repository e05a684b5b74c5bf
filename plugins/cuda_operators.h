// The custom operators of the CUDA library, by folder; cuda_register.cc hands them to ONNX Runtime.
#pragma once

#include <vector>

#include "ort_abi.h"

namespace kiln::ort {

// The operators live as long as the library.
std::vector<const OrtCustomOp*> cuda_paged_attention_operators();
std::vector<const OrtCustomOp*> cuda_dense_operators();
std::vector<const OrtCustomOp*> cuda_elementwise_operators();
std::vector<const OrtCustomOp*> cuda_quant_matmul_operators();
std::vector<const OrtCustomOp*> cuda_sampling_operators();

}  // namespace kiln::ort
