// Binds the products to ONNX Runtime as the custom operators kiln::Linear and kiln::LinearSwiGlu (schema.py has the
// contract), for CUDAExecutionProvider: checks shapes, and takes Kiln's kernels for a few rows and cuBLAS for more.
// Launches go to the session's stream; nothing waits. Knows nothing of how either works.
#include "cuda.h"
#include "cuda_library.h"
#include "cuda_product.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

enum Operand { kX, kWeight, kBias, kOperands };

struct LinearKernel {
  static constexpr const char* kName = "Linear";
  static constexpr bool kSwiGlu = false;
};

struct LinearSwiGluKernel {
  static constexpr const char* kName = "LinearSwiGlu";
  static constexpr bool kSwiGlu = true;
};

template <typename Which>
struct Kernel {
  static constexpr const char* kName = Which::kName;
  static constexpr size_t kInputs = kOperands, kOutputs = 1;

  OrtApi api;
  int64_t kernel_rows;
  cuda::Element element;
  cuda::Algorithms algorithms;

  Kernel(OrtApi api, const OrtKernelInfo* info, int type)
      : api(api), kernel_rows(attribute(api, info, "kernel_rows", int64_t{0})), element(element_of(type)) {
    const char* problem = nullptr;
    algorithms = cuda::Algorithms(attribute(api, info, "algorithms", std::string()), &problem);
    if (problem) fail(problem);
    if (kernel_rows < 0 || kernel_rows > cuda::kLinearRows)
      fail("kernel_rows must be 0 (always cuBLAS) to ", cuda::kLinearRows, ": found ", kernel_rows);
  }

  void compute(OrtKernelContext* context) const {
    const ProductOperands operands(api, context, kBias, "depth");
    expect_shape(operands.weight, "weight", {operands.weight_rows(), operands.depth()});
    cuda::Linear call = {};
    operands.fill(call, api, context, Which::kSwiGlu, element);
    const cudaStream_t stream = stream_of(api, context);
    if (call.rows <= kernel_rows) {
      call.scratch = scratch_of(stream, &kScratch, cuda::linear_scratch_bytes());
      if (const char* problem = cuda::unsupported(call)) fail(problem);
      require_cuda(cuda::run(call, stream), "the kernel cannot be launched");
      return;
    }
    const size_t bytes = Which::kSwiGlu ? static_cast<size_t>(call.rows) * call.width * 4 : 0;
    void* packed = bytes ? varying_scratch_of(stream, bytes) : nullptr;
    const auto& library = library_of<cuda::LinearLibrary>(stream);
    if (const char* trouble = library.run(call, algorithms.of(call.rows), packed, stream)) fail(trouble);
  }

 private:
  static inline const char kScratch = 0;  // its address is the purpose, and one for all calls of a kind
};

template <typename Which>
TypedOperator make_operator(int type) {
  TypedOperator op = typed_operator<Kernel<Which>>(type);
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int { return i == kBias ? kOptional : kRequired; };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::cuda_dense_operators() {
  static const TypedOperator operators[] = {
      make_operator<LinearKernel>(kFloat16), make_operator<LinearKernel>(kBfloat16),
      make_operator<LinearSwiGluKernel>(kFloat16), make_operator<LinearSwiGluKernel>(kBfloat16)};
  return {&operators[0], &operators[1], &operators[2], &operators[3]};
}
