// What stands before and after a product of 8-bit rows by 8-bit weights: rows are quantised, sums become results. Knows
// no product.
#pragma once

#include "cuda.h"

namespace kiln::cuda {

// x of the call to q [rows, depth], in the order of depth that weights have, and scale [rows]: int8 or e4m3 as the
// call's format is. A row of zeros, or nearly so, has the scale 0; one with a NaN or an infinity has NaN.
cudaError_t quantize_rows(const QuantLinear& call, void* q, float* scale, cudaStream_t stream);

// y = sums * row_scale * scale + bias, then SwiGLU. sums [rows, weight rows]: int32 of int8, float32 of float8.
cudaError_t finish_sums(const QuantLinear& call, const void* sums, const float* row_scale, cudaStream_t stream);

}  // namespace kiln::cuda
