// The CPU library's entry point for ONNX Runtime: the operators of all folders.
#include "operators.h"
#include "ort_register.h"

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  using namespace kiln::ort;
  return register_operators(options, base, [] {
    return joined({paged_attention_operators(), elementwise_operators(), quant_matmul_operators(),
                   sampling_operators()});
  });
}
