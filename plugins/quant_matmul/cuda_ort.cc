// Binds the products to ONNX Runtime as the custom operators kiln::QuantLinear and kiln::QuantLinearSwiGlu
// (cuda_schema.py has the contract), for CUDAExecutionProvider: checks shapes, and takes the kernels for few rows and
// cuBLASLt for more. Launches go to the session's stream; nothing waits. Knows nothing of how either works.
#include "../dense/cuda_product.h"
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

template <typename Which>
struct Kernel {
  static constexpr const char* kName = Which::kName;
  static constexpr size_t kInputs = kOperands, kOutputs = 1;

  OrtApi api;
  int64_t format, group, kernel_rows, few_rows;
  cuda::Element element;

  Kernel(OrtApi api, const OrtKernelInfo* info, int type)
      : api(api),
        format(attribute(api, info, "format", int64_t{-1})),
        group(attribute(api, info, "group_size", int64_t{0})),
        kernel_rows(attribute(api, info, "kernel_rows", cuda::kEqualRows)),
        few_rows(attribute(api, info, "few_rows", cuda::kFewRows)),
        element(element_of(type)) {
    if (format < 0 || format > 2) fail("format must be 0 (int8), 1 (float8e4m3fn) or 2 (int4): found ", format);
    if (kernel_rows < 0 || kernel_rows > cuda::kQuantLinearRows)
      fail("kernel_rows must be 0 (always W8A8) to ", cuda::kQuantLinearRows, ": found ", kernel_rows);
  }

  void compute(OrtKernelContext* context) const {
    const ProductOperands operands(api, context, kBias, "bytes");
    const Tensor scale = input_tensor(api, context, kScale);
    cuda::QuantLinear call = {};
    call.format = static_cast<cuda::WeightFormat>(format);
    call.depth = operands.depth();
    call.group = group;
    call.few_rows = few_rows;
    const int64_t rows = operands.weight_rows(), groups = group > 0 ? (call.depth + group - 1) / group : 1;
    expect_shape(operands.weight, "weight", {rows, cuda::row_bytes(call)});
    expect_shape(scale, "weight_scale", {groups, rows});
    call.scale = static_cast<const float*>(scale.data);
    operands.fill(call, api, context, Which::kSwiGlu, element);
    run(call, stream_of(api, context));
  }

 private:
  void run(cuda::QuantLinear& call, cudaStream_t stream) const {
    if (call.rows <= kernel_rows || call.format == cuda::WeightFormat::kInt4) {
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

template <typename Which>
TypedOperator make_operator(int type) {
  TypedOperator op = typed_operator<Kernel<Which>>(type);
  op.GetInputType = [](const OrtCustomOp* base, size_t i) -> int {
    if (i == kWeight) return kUint8;
    return i == kScale ? int{kFloat} : type_of(base);
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int { return i == kBias ? kOptional : kRequired; };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::cuda_quant_matmul_operators() {
  static const TypedOperator operators[] = {
      make_operator<QuantLinearKernel>(kFloat16), make_operator<QuantLinearKernel>(kBfloat16),
      make_operator<QuantLinearSwiGluKernel>(kFloat16), make_operator<QuantLinearSwiGluKernel>(kBfloat16)};
  return {&operators[0], &operators[1], &operators[2], &operators[3]};
}
