// Binds the products to ONNX Runtime as the custom operators kiln::QuantLinear and kiln::QuantLinearSwiGlu
// (cuda_schema.py has the contract), for CUDAExecutionProvider: checks shapes, and takes the kernels for few rows and
// cuBLASLt for more. Launches go to the session's stream; nothing waits. Knows nothing of how either works.
#include "../cuda_operators.h"
#include "../cuda_scratch.h"
#include "cuda.h"
#include "cuda_library.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

enum Operand { kX, kWeight, kScale, kBias, kOperands };

struct QuantLinearKernel {
  static constexpr const char* kName = "QuantLinear";
  static constexpr bool kSwiGlu = false;
};

struct QuantLinearSwiGluKernel {
  static constexpr const char* kName = "QuantLinearSwiGlu";
  static constexpr bool kSwiGlu = true;
};

struct QuantAttributes {
  int64_t format, group, kernel_rows;

  QuantAttributes(OrtApi api, const OrtKernelInfo* info)
      : format(attribute(api, info, "format", int64_t{-1})),
        group(attribute(api, info, "group_size", int64_t{0})),
        kernel_rows(attribute(api, info, "kernel_rows", cuda::kEqualRows)) {
    if (format < 0 || format > 2) fail("format must be 0 (int8), 1 (float8e4m3fn) or 2 (int4): found ", format);
    if (kernel_rows < 0 || kernel_rows > cuda::kQuantLinearRows)
      fail("kernel_rows must be 0 (always W8A8) to ", cuda::kQuantLinearRows, ": found ", kernel_rows);
  }
};

template <typename Which>
struct Kernel {
  static constexpr const char* kName = Which::kName;

  OrtApi api;
  QuantAttributes attributes;
  cuda::Element element;

  void compute(OrtKernelContext* context) const {
    size_t given = 0;
    require(api, KernelContextGetInputCount::of(api)(context, &given));
    const Tensor x = input_tensor(api, context, kX), weight = input_tensor(api, context, kWeight);
    const Tensor scale = input_tensor(api, context, kScale);
    const Tensor bias = given > kBias ? input_tensor(api, context, kBias) : Tensor{};
    if (x.shape.empty()) fail("x has the wrong rank: found [], expected [..., depth]");
    if (weight.shape.size() != 2)
      fail("weight has the wrong rank: found ", text(weight.shape), ", expected [width, bytes]");
    cuda::QuantLinear call = {};
    call.format = static_cast<cuda::WeightFormat>(attributes.format);
    call.depth = x.shape.back();
    call.group = attributes.group;
    const int64_t rows = weight.shape[0], groups = call.group > 0 ? (call.depth + call.group - 1) / call.group : 1;
    expect_shape(weight, "weight", {rows, cuda::row_bytes(call)});
    expect_shape(scale, "weight_scale", {groups, rows});
    if (bias.present) expect_shape(bias, "bias", {rows});
    if (Which::kSwiGlu && rows % 2)
      fail("weight must have the gate's and as many rows of the up projection: found ", rows, " rows");
    call.rows = 1;
    for (size_t i = 0; i + 1 < x.shape.size(); i++) call.rows *= x.shape[i];
    call.width = Which::kSwiGlu ? rows / 2 : rows;
    call.swiglu = Which::kSwiGlu;
    call.element = element;
    call.x = x.data;
    call.weight = weight.data;
    call.scale = static_cast<const float*>(scale.data);
    call.bias = bias.data;
    std::vector<int64_t> shape = x.shape;
    shape.back() = call.width;
    call.y = output_data(api, context, 0, shape);
    run(call, context);
  }

 private:
  void run(cuda::QuantLinear& call, OrtKernelContext* context) const {
    void* handle = nullptr;
    require(api, KernelContextGetGpuComputeStream::of(api)(context, &handle));
    const cudaStream_t stream = static_cast<cudaStream_t>(handle);
    if (call.rows <= attributes.kernel_rows || call.format == cuda::WeightFormat::kInt4) {
      call.scratch = scratch_of(stream, &kScratch, cuda::quant_linear_scratch_bytes());
      if (const char* problem = cuda::unsupported(call)) fail(problem);
      require_cuda(cuda::run(call, stream), "the kernel cannot be launched");
      return;
    }
    if (const char* problem = cuda::unsupported_by_library(call)) fail(problem);
    const auto rows = static_cast<size_t>(cuda::padded_rows(call.rows));
    const size_t q = rows * call.depth, scales = (rows * 4 + 15) / 16 * 16, sums = rows * cuda::weight_rows(call) * 4;
    char* buffer = static_cast<char*>(varying_scratch_of(stream, q + scales + sums));
    const cuda::QuantBuffers buffers = {buffer, reinterpret_cast<float*>(buffer + q), buffer + q + scales};
    if (const char* problem = library_of<cuda::QuantLibrary>(stream).run(call, buffers, stream)) fail(problem);
  }

  static inline const char kScratch = 0;  // its address is the purpose, and one for all calls of a kind
};

// The operator for one element type. OrtCustomOp comes first: ONNX Runtime hands back its address.
struct Operator : OrtCustomOp {
  int element;
};

template <typename Which>
Operator make_operator(int element) {
  Operator op = {};
  fill_common<Kernel<Which>>(op);
  op.element = element;
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CUDAExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{kOperands}; };
  op.GetInputType = [](const OrtCustomOp* base, size_t i) -> int {
    if (i == kWeight) return kUint8;
    return i == kScale ? int{kFloat} : static_cast<const Operator*>(base)->element;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.GetOutputType = [](const OrtCustomOp* base, size_t) -> int { return static_cast<const Operator*>(base)->element; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int { return i == kBias ? kOptional : kRequired; };
  op.CreateKernelV2 = [](const OrtCustomOp* base, OrtApi api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, Which::kName, [&] {
      const int element = static_cast<const Operator*>(base)->element;
      *kernel = new Kernel<Which>{api, QuantAttributes(api, info),
                                  element == kFloat16 ? cuda::Element::kFloat16 : cuda::Element::kBfloat16};
    });
  };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::cuda_quant_matmul_operators() {
  static const Operator operators[] = {
      make_operator<QuantLinearKernel>(kFloat16), make_operator<QuantLinearKernel>(kBfloat16),
      make_operator<QuantLinearSwiGluKernel>(kFloat16), make_operator<QuantLinearSwiGluKernel>(kBfloat16)};
  return {&operators[0], &operators[1], &operators[2], &operators[3]};
}
