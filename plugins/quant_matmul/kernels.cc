// The kernels of one instruction set. Compiled once per set, with -DKILN_ISA=plain, avx2, avx512 or avx512vnni and the
// matching machine flags; only quant_matmul_<isa>() is visible outside.
#include "kernels.h"

#include "float_product.h"
#include "int8_product.h"
#include "quantize.h"

namespace kiln {

const QuantMatMulKernels& KILN_JOIN(quant_matmul_, KILN_ISA)() {
  using namespace KILN_ISA;
  static const QuantMatMulKernels kernels = {
      {quantize_rows, no_scratch}, {add_rms_norm_quantize, row_scratch}, {swiglu_quantize, row_scratch},
      {int8_matmul, int8_scratch}, {weight_matmul, float_scratch},
  };
  return kernels;
}

}  // namespace kiln
