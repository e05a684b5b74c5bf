// The CUDA library's entry point for ONNX Runtime: the operators of all folders, for CUDAExecutionProvider. Its domain
// is the CPU library's, so a session takes one of the two.
#include "cuda_operators.h"
#include "ort_register.h"

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  using namespace kiln::ort;
  return register_operators(options, base, [] {
    return joined({cuda_paged_attention_operators(), cuda_dense_operators(), cuda_elementwise_operators(),
                   cuda_quant_matmul_operators(), cuda_sampling_operators()});
  });
}
