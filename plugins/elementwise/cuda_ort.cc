// Binds the CUDA kernels to ONNX Runtime as the custom operators kiln::AddRmsNorm and kiln::SwiGlu (schema.py has the
// contract), for CUDAExecutionProvider and 16-bit operands: checks shapes and launches on the session's stream. Knows
// nothing of how the kernels work.
#include <cmath>

#include "../cuda_binding.h"
#include "cuda.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

struct AddRmsNormKernel {
  static constexpr const char* kName = "AddRmsNorm";
  static constexpr size_t kInputs = 3, kOutputs = 2;
  static constexpr size_t kRequiredOutputs = 1;  // without the sum where nobody reads it

  OrtApi api;
  float epsilon;
  cuda::Element element;

  AddRmsNormKernel(OrtApi api, const OrtKernelInfo* info, int type)
      : api(api), epsilon(attribute(api, info, "epsilon", 1e-5f)), element(element_of(type)) {
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) fail("epsilon must be 0 or positive: found ", epsilon);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = input_tensor(api, context, 0), skip = input_tensor(api, context, 1);
    const Tensor gamma = input_tensor(api, context, 2);
    if (x.shape.empty()) fail("x has the wrong rank: found [], expected [..., hidden]");
    expect_shape(skip, "skip", x.shape);
    expect_shape(gamma, "gamma", {x.shape.back()});
    cuda::AddRmsNorm call = {};
    call.x = x.data;
    call.skip = skip.data;
    call.gamma = gamma.data;
    call.normalized = output_data(api, context, 0, x.shape);
    call.sum = output_data(api, context, 1, x.shape);
    call.hidden = x.shape.back();
    call.rows = call.hidden ? elements(x.shape) / call.hidden : 0;
    call.epsilon = epsilon;
    call.element = element;
    require_cuda(cuda::run(call, stream_of(api, context)), "the kernel cannot be launched");
  }
};

struct SwiGluKernel {
  static constexpr const char* kName = "SwiGlu";
  static constexpr size_t kInputs = 2, kOutputs = 1;
  static constexpr size_t kRequiredOutputs = 1;

  OrtApi api;
  float alpha;
  cuda::Element element;

  SwiGluKernel(OrtApi api, const OrtKernelInfo* info, int type)
      : api(api), alpha(attribute(api, info, "alpha", 1.0f)), element(element_of(type)) {
    if (!std::isfinite(alpha)) fail("alpha must be finite: found ", alpha);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor gate = input_tensor(api, context, 0), up = input_tensor(api, context, 1);
    expect_shape(up, "up", gate.shape);
    cuda::SwiGlu call = {};
    call.gate = gate.data;
    call.up = up.data;
    call.output = output_data(api, context, 0, gate.shape);
    call.width = gate.shape.empty() ? 1 : gate.shape.back();
    call.rows = call.width ? elements(gate.shape) / call.width : 0;
    call.stride = call.width;
    call.alpha = alpha;
    call.element = element;
    require_cuda(cuda::run(call, stream_of(api, context)), "the kernel cannot be launched");
  }
};

template <typename Kernel>
TypedOperator make_operator(int type) {
  TypedOperator op = typed_operator<Kernel>(type);
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return i < Kernel::kRequiredOutputs ? kRequired : kOptional;
  };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::cuda_elementwise_operators() {
  static const TypedOperator operators[] = {
      make_operator<AddRmsNormKernel>(kFloat16), make_operator<AddRmsNormKernel>(kBfloat16),
      make_operator<SwiGluKernel>(kFloat16), make_operator<SwiGluKernel>(kBfloat16)};
  return {&operators[0], &operators[1], &operators[2], &operators[3]};
}
