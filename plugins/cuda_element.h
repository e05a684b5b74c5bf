// The element types that CUDA kernels take: one for all operands of a call, sums are float32. Knows no operator.
#pragma once

namespace kiln::cuda {

enum class Element { kFloat16, kBfloat16 };

}  // namespace kiln::cuda
