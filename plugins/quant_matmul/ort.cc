// Binds the kernels to ONNX Runtime as custom operators (schema.py has the contract): checks attributes and shapes and
// lends ONNX Runtime's thread pool. Knows nothing of how the kernels work.
#include "../ort_binding.h"

#include <cmath>
#include <vector>

#include "../operators.h"
#include "cpu.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

// Rows before the last dimension.
int64_t rows_of(const std::vector<int64_t>& shape) { return elements(with_last(shape, 1)); }

void require_rows(const Tensor& tensor, const char* name) {
  if (tensor.shape.empty()) fail(name, " has the wrong rank: found [], expected [..., k]");
}

int64_t group_attribute(OrtApi api, const OrtKernelInfo* info, const char* name) {
  const int64_t size = attribute(api, info, name, int64_t{0});
  if (size < 0 || size % kStep || size > kDeepestGroup)
    fail(name, " must be 0 (whole rows) or a multiple of ", kStep, " up to ", kDeepestGroup, ": found ", size);
  return size;
}

// Makes the outputs q and scale for rows of `shape`.
Quantised quantised_outputs(OrtApi api, OrtKernelContext* context, const std::vector<int64_t>& shape, int64_t group) {
  Quantised out;
  out.q = static_cast<int8_t*>(output_data(api, context, 0, shape));
  out.scale =
      static_cast<float*>(output_data(api, context, 1, with_last(shape, groups_of(shape.back(), group))));
  out.group_size = group;
  return out;
}

template <typename Call>
void run_or_fail(const Call& call, OrtApi api, OrtKernelContext* context) {
  Pool pool(api, context);
  const std::string error = kiln::run(call, pool);
  if (!error.empty()) fail(error);
}

// Element types of the operands, in schema.py's order. The first so many are required.
struct Operands {
  std::vector<int> inputs, outputs;
  size_t required_inputs, required_outputs;
};

struct QuantizeRowsKernel {
  static constexpr const char* kName = "QuantizeRows";
  static Operands operands() { return {{kFloat}, {kInt8, kFloat}, 1, 2}; }

  OrtApi api;
  int64_t group_size;

  QuantizeRowsKernel(OrtApi api, const OrtKernelInfo* info)
      : api(api), group_size(group_attribute(api, info, "group_size")) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = input_tensor(api, context, 0);
    require_rows(x, "x");
    QuantizeRows call = {};
    call.x = data<float>(x);
    call.out = quantised_outputs(api, context, x.shape, group_size);
    call.rows = rows_of(x.shape);
    call.depth = x.shape.back();
    run_or_fail(call, api, context);
  }
};

struct AddRmsNormQuantizeKernel {
  static constexpr const char* kName = "AddRmsNormQuantize";
  static Operands operands() { return {{kFloat, kFloat, kFloat}, {kInt8, kFloat, kFloat}, 3, 2}; }

  OrtApi api;
  float epsilon;
  int64_t group_size;

  AddRmsNormQuantizeKernel(OrtApi api, const OrtKernelInfo* info)
      : api(api),
        epsilon(attribute(api, info, "epsilon", 1e-5f)),
        group_size(group_attribute(api, info, "group_size")) {
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) fail("epsilon must be 0 or positive: found ", epsilon);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = input_tensor(api, context, 0), skip = input_tensor(api, context, 1);
    const Tensor gamma = input_tensor(api, context, 2);
    require_rows(x, "x");
    expect_shape(skip, "skip", x.shape);
    expect_shape(gamma, "gamma", {x.shape.back()});
    AddRmsNormQuantize call = {};
    call.x = data<float>(x);
    call.skip = data<float>(skip);
    call.gamma = data<float>(gamma);
    call.out = quantised_outputs(api, context, x.shape, group_size);
    call.sum = static_cast<float*>(output_data(api, context, 2, x.shape));
    call.rows = rows_of(x.shape);
    call.depth = x.shape.back();
    call.epsilon = epsilon;
    run_or_fail(call, api, context);
  }
};

struct SwiGluQuantizeKernel {
  static constexpr const char* kName = "SwiGluQuantize";
  static Operands operands() { return {{kFloat, kFloat}, {kInt8, kFloat}, 2, 2}; }

  OrtApi api;
  float alpha;
  int64_t group_size;

  SwiGluQuantizeKernel(OrtApi api, const OrtKernelInfo* info)
      : api(api), alpha(attribute(api, info, "alpha", 1.0f)), group_size(group_attribute(api, info, "group_size")) {
    if (!std::isfinite(alpha)) fail("alpha must be finite: found ", alpha);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor gate = input_tensor(api, context, 0), up = input_tensor(api, context, 1);
    require_rows(gate, "gate");
    expect_shape(up, "up", gate.shape);
    SwiGluQuantize call = {};
    call.gate = data<float>(gate);
    call.up = data<float>(up);
    call.out = quantised_outputs(api, context, gate.shape, group_size);
    call.rows = rows_of(gate.shape);
    call.depth = gate.shape.back();
    call.alpha = alpha;
    run_or_fail(call, api, context);
  }
};

// What both products know of their weights before they see them.
struct WeightAttributes {
  int64_t n, bits, group_size;

  WeightAttributes(OrtApi api, const OrtKernelInfo* info)
      : n(attribute(api, info, "n", int64_t{-1})),
        bits(attribute(api, info, "bits", int64_t{8})),
        group_size(group_attribute(api, info, "group_size")) {
    if (n < 0) fail("attribute n, the number of outputs, is missing or negative");
    if (bits != 8 && bits != 4) fail("bits must be 8 or 4: found ", bits);
  }

  // The inputs from number `first` on: weight, weight_scale, bias, weight_zero.
  PackedWeights weights(OrtApi api, OrtKernelContext* context, size_t first, int64_t depth) const {
    size_t given = 0;
    require(api, KernelContextGetInputCount::of(api)(context, &given));
    const Tensor packed = input_tensor(api, context, first), scale = input_tensor(api, context, first + 1);
    auto optional = [&](size_t i) { return i < given ? input_tensor(api, context, i) : Tensor{}; };
    const Tensor bias = optional(first + 2), zero = optional(first + 3);
    PackedWeights weights = {};
    weights.data = data<uint8_t>(packed);
    weights.scale = data<float>(scale);
    weights.zero = data<float>(zero);
    weights.bias = data<float>(bias);
    weights.depth = depth;
    weights.width = n;
    weights.group_size = group_size;
    weights.bits = static_cast<int>(bits);
    expect_shape(packed, "weight", {panels_of(weights) * panel_bytes_of(weights)});
    expect_shape(scale, "weight_scale", {panels_of(weights), groups_of(depth, group_size), kPanel});
    if (bias.present) expect_shape(bias, "bias", {n});
    if (zero.present) expect_shape(zero, "weight_zero", scale.shape);
    return weights;
  }
};

struct Int8MatMulKernel {
  static constexpr const char* kName = "Int8MatMul";
  static Operands operands() { return {{kInt8, kFloat, kUint8, kFloat, kFloat, kFloat}, {kFloat}, 4, 1}; }

  OrtApi api;
  WeightAttributes attributes;
  int64_t group_size;

  Int8MatMulKernel(OrtApi api, const OrtKernelInfo* info)
      : api(api), attributes(api, info), group_size(group_attribute(api, info, "activation_group_size")) {
    if (group_size && attributes.group_size && group_size != attributes.group_size)
      fail("group_size and activation_group_size must be the same unless one is 0: found ", attributes.group_size,
           " and ", group_size);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor q = input_tensor(api, context, 0), scale = input_tensor(api, context, 1);
    require_rows(q, "q");
    const int64_t depth = q.shape.back();
    if (!group_size && !attributes.group_size && depth > kDeepestGroup)
      fail("k is ", depth, ", more than 32 bits can sum: expected groups of up to ", kDeepestGroup);
    expect_shape(scale, "scale", with_last(q.shape, groups_of(depth, group_size)));
    Int8MatMul call = {};
    call.q = data<int8_t>(q);
    call.scale = data<float>(scale);
    call.weights = attributes.weights(api, context, 2, depth);
    call.y = static_cast<float*>(output_data(api, context, 0, with_last(q.shape, attributes.n)));
    call.rows = rows_of(q.shape);
    call.group_size = group_size;
    run_or_fail(call, api, context);
  }
};

struct WeightMatMulKernel {
  static constexpr const char* kName = "WeightMatMul";
  static Operands operands() { return {{kFloat, kUint8, kFloat, kFloat, kFloat}, {kFloat}, 3, 1}; }

  OrtApi api;
  WeightAttributes attributes;

  WeightMatMulKernel(OrtApi api, const OrtKernelInfo* info) : api(api), attributes(api, info) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = input_tensor(api, context, 0);
    require_rows(x, "x");
    WeightMatMul call = {};
    call.x = data<float>(x);
    call.weights = attributes.weights(api, context, 1, x.shape.back());
    call.y = static_cast<float*>(output_data(api, context, 0, with_last(x.shape, attributes.n)));
    call.rows = rows_of(x.shape);
    run_or_fail(call, api, context);
  }
};

template <typename Kernel>
const Operands& operands_of() {
  static const Operands operands = Kernel::operands();
  return operands;
}

template <typename Kernel>
OrtCustomOp make_operator() {
  OrtCustomOp op = {};
  fill_common<Kernel>(op);
  op.GetInputTypeCount = [](const OrtCustomOp*) { return operands_of<Kernel>().inputs.size(); };
  op.GetInputType = [](const OrtCustomOp*, size_t i) { return operands_of<Kernel>().inputs[i]; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return i < operands_of<Kernel>().required_inputs ? kRequired : kOptional;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return operands_of<Kernel>().outputs.size(); };
  op.GetOutputType = [](const OrtCustomOp*, size_t i) { return operands_of<Kernel>().outputs[i]; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return i < operands_of<Kernel>().required_outputs ? kRequired : kOptional;
  };
  op.CreateKernelV2 = [](const OrtCustomOp*, OrtApi api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, Kernel::kName, [&] { *kernel = new Kernel(api, info); });
  };
  return op;
}

// The sum may take the buffer of either summand, if nobody reads it afterwards.
OrtCustomOp make_norm_operator() {
  OrtCustomOp op = make_operator<AddRmsNormQuantizeKernel>();
  op.GetMayInplace = [](int** inputs, int** outputs) -> size_t {
    static int from[] = {0, 1}, to[] = {2, 2};
    *inputs = from;
    *outputs = to;
    return 2;
  };
  op.ReleaseMayInplace = [](int*, int*) {};
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::quant_matmul_operators() {
  static const OrtCustomOp operators[] = {make_operator<QuantizeRowsKernel>(), make_norm_operator(),
                                          make_operator<SwiGluQuantizeKernel>(), make_operator<Int8MatMulKernel>(),
                                          make_operator<WeightMatMulKernel>()};
  std::vector<const OrtCustomOp*> all;
  for (const OrtCustomOp& op : operators) all.push_back(&op);
  return all;
}
