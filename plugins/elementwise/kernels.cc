// The kernels of one instruction set. Compiled once per set, with -DKILN_ISA=plain, avx2 or avx512 and the matching
// machine flags; only elementwise_<isa>() is visible outside.
#include "kernels.h"

#include "rows.h"

namespace kiln {
namespace KILN_ISA {

// The second pass over a row finds it in the nearest cache.
static void add_rms_norm(const AddRmsNorm& call, int64_t begin, int64_t end) {
  const int64_t n = call.hidden;
  for (int64_t row = begin; row < end; row++) {
    float* out = call.normalized + row * n;
    float* total = call.sum ? call.sum + row * n : out;
    const double squares = add_row(call.x + row * n, call.skip + row * n, total, n);
    scale_row(total, call.gamma, norm_factor(squares, n, call.epsilon), out, n);
  }
}

static void swiglu(const SwiGlu& call, int64_t begin, int64_t end) {
  gate_row(call.gate + begin, call.up + begin, call.alpha, call.output + begin, end - begin);
}

}  // namespace KILN_ISA

const ElementwiseKernels& KILN_JOIN(elementwise_, KILN_ISA)() {
  static const ElementwiseKernels kernels = {KILN_ISA::add_rms_norm, KILN_ISA::swiglu};
  return kernels;
}

}  // namespace kiln
