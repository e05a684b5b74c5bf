// What the dispatcher (cpu.cc) and the kernels, compiled once per instruction set (kernels.cc), share.
#pragma once

#include "cpu.h"

namespace kiln {

struct ElementwiseKernels {
  void (*add_rms_norm)(const AddRmsNorm&, int64_t begin, int64_t end);  // rows
  void (*swiglu)(const SwiGlu&, int64_t begin, int64_t end);            // elements
};

const ElementwiseKernels& elementwise_plain();
const ElementwiseKernels& elementwise_avx2();
const ElementwiseKernels& elementwise_avx512();

}  // namespace kiln
