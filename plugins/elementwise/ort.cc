// Binds the kernels to ONNX Runtime as the custom operators kiln::AddRmsNorm and kiln::SwiGlu (schema.py has the
// contract): checks shapes and lends ONNX Runtime's thread pool. Knows nothing of how the kernels work.
#include "../ort_binding.h"

#include <cmath>
#include <vector>

#include "../operators.h"
#include "cpu.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.data); }

// Operands in schema.py's order.
struct AddRmsNormKernel {
  static constexpr const char* kName = "AddRmsNorm";
  static constexpr size_t kInputs = 3, kOutputs = 2;
  static constexpr size_t kRequiredOutputs = 1;  // without the sum where nobody reads it

  OrtApi api;
  float epsilon;

  AddRmsNormKernel(OrtApi api, const OrtKernelInfo* info) : api(api), epsilon(attribute(api, info, "epsilon", 1e-5f)) {
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) fail("epsilon must be 0 or positive: found ", epsilon);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = input_tensor(api, context, 0), skip = input_tensor(api, context, 1);
    const Tensor gamma = input_tensor(api, context, 2);
    if (x.shape.empty()) fail("x has the wrong rank: found [], expected [..., hidden]");
    expect_shape(skip, "skip", x.shape);
    expect_shape(gamma, "gamma", {x.shape.back()});
    AddRmsNorm call = {};
    call.x = floats(x);
    call.skip = floats(skip);
    call.gamma = floats(gamma);
    call.normalized = static_cast<float*>(output_data(api, context, 0, x.shape));
    call.sum = static_cast<float*>(output_data(api, context, 1, x.shape));
    call.hidden = x.shape.back();
    call.rows = call.hidden ? elements(x.shape) / call.hidden : 0;
    call.epsilon = epsilon;
    Pool pool(api, context);
    kiln::run(call, pool);
  }
};

struct SwiGluKernel {
  static constexpr const char* kName = "SwiGlu";
  static constexpr size_t kInputs = 2, kOutputs = 1;
  static constexpr size_t kRequiredOutputs = 1;

  OrtApi api;
  float alpha;

  SwiGluKernel(OrtApi api, const OrtKernelInfo* info) : api(api), alpha(attribute(api, info, "alpha", 1.0f)) {
    if (!std::isfinite(alpha)) fail("alpha must be finite: found ", alpha);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor gate = input_tensor(api, context, 0), up = input_tensor(api, context, 1);
    expect_shape(up, "up", gate.shape);
    SwiGlu call = {};
    call.gate = floats(gate);
    call.up = floats(up);
    call.output = static_cast<float*>(output_data(api, context, 0, gate.shape));
    call.size = elements(gate.shape);
    call.alpha = alpha;
    Pool pool(api, context);
    kiln::run(call, pool);
  }
};

// Every output may take the buffer of either of the first two inputs, if nobody reads it afterwards.
template <typename Kernel>
size_t may_inplace(int** inputs, int** outputs) {
  static int from[] = {0, 1, 0, 1}, to[] = {0, 0, 1, 1};
  static_assert(Kernel::kOutputs <= 2);
  *inputs = from;
  *outputs = to;
  return 2 * Kernel::kOutputs;
}

template <typename Kernel>
OrtCustomOp make_operator() {
  OrtCustomOp op = {};
  fill_common<Kernel>(op);
  op.GetInputTypeCount = [](const OrtCustomOp*) { return Kernel::kInputs; };
  op.GetInputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return Kernel::kOutputs; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return i < Kernel::kRequiredOutputs ? kRequired : kOptional;
  };
  op.CreateKernelV2 = [](const OrtCustomOp*, OrtApi api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, Kernel::kName, [&] { *kernel = new Kernel(api, info); });
  };
  op.GetMayInplace = may_inplace<Kernel>;
  op.ReleaseMayInplace = [](int*, int*) {};
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::elementwise_operators() {
  static const OrtCustomOp operators[] = {make_operator<AddRmsNormKernel>(), make_operator<SwiGluKernel>()};
  return {&operators[0], &operators[1]};
}
