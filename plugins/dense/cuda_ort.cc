// Binds the products to ONNX Runtime as the custom operators kiln::Linear and kiln::LinearSwiGlu (schema.py has the
// contract), for CUDAExecutionProvider: checks shapes, and takes Kiln's kernels for a few rows and cuBLAS for more.
// Launches go to the session's stream; nothing waits. Knows nothing of how either works.
#include "../cuda_operators.h"
#include "../cuda_scratch.h"
#include "cuda.h"
#include "cuda_library.h"

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

  OrtApi api;
  int64_t kernel_rows;
  cuda::Element element;

  void compute(OrtKernelContext* context) const {
    size_t given = 0;
    require(api, KernelContextGetInputCount::of(api)(context, &given));
    const Tensor x = input_tensor(api, context, kX), weight = input_tensor(api, context, kWeight);
    const Tensor bias = given > kBias ? input_tensor(api, context, kBias) : Tensor{};
    if (x.shape.empty()) fail("x has the wrong rank: found [], expected [..., depth]");
    if (weight.shape.size() != 2)
      fail("weight has the wrong rank: found ", text(weight.shape), ", expected [width, depth]");
    const int64_t depth = x.shape.back(), weight_rows = weight.shape[0];
    expect_shape(weight, "weight", {weight_rows, depth});
    if (bias.present) expect_shape(bias, "bias", {weight_rows});
    if (Which::kSwiGlu && weight_rows % 2)
      fail("weight must have the gate's and as many rows of the up projection: found ", weight_rows, " rows");
    cuda::Linear call = {};
    call.rows = 1;
    for (size_t i = 0; i + 1 < x.shape.size(); i++) call.rows *= x.shape[i];
    call.depth = depth;
    call.width = Which::kSwiGlu ? weight_rows / 2 : weight_rows;
    call.swiglu = Which::kSwiGlu;
    call.element = element;
    call.x = x.data;
    call.weight = weight.data;
    call.bias = bias.data;
    std::vector<int64_t> shape = x.shape;
    shape.back() = call.width;
    call.y = output_data(api, context, 0, shape);
    run(call, context);
  }

 private:
  void run(cuda::Linear& call, OrtKernelContext* context) const {
    void* handle = nullptr;
    require(api, KernelContextGetGpuComputeStream::of(api)(context, &handle));
    const cudaStream_t stream = static_cast<cudaStream_t>(handle);
    if (call.rows <= kernel_rows) {
      call.scratch = scratch_of(stream, &kScratch, cuda::linear_scratch_bytes());
      if (const char* problem = cuda::unsupported(call)) fail(problem);
      require_cuda(cuda::run(call, stream), "the kernel cannot be launched");
      return;
    }
    const size_t bytes = Which::kSwiGlu ? static_cast<size_t>(call.rows) * call.width * 4 : 0;
    void* packed = bytes ? varying_scratch_of(stream, bytes) : nullptr;
    if (const char* problem = library_of<cuda::LinearLibrary>(stream).run(call, packed, stream)) fail(problem);
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
  op.GetInputType = [](const OrtCustomOp* base, size_t) -> int { return static_cast<const Operator*>(base)->element; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.GetOutputType = [](const OrtCustomOp* base, size_t) -> int { return static_cast<const Operator*>(base)->element; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int { return i == kBias ? kOptional : kRequired; };
  op.CreateKernelV2 = [](const OrtCustomOp* base, OrtApi api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, Which::kName, [&] {
      const int64_t rows = attribute(api, info, "kernel_rows", int64_t{0});
      if (rows < 0 || rows > cuda::kLinearRows)
        fail("kernel_rows must be 0 (always cuBLAS) to ", cuda::kLinearRows, ": found ", rows);
      const int element = static_cast<const Operator*>(base)->element;
      *kernel = new Kernel<Which>{api, rows, element == kFloat16 ? cuda::Element::kFloat16 : cuda::Element::kBfloat16};
    });
  };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::cuda_dense_operators() {
  static const Operator operators[] = {
      make_operator<LinearKernel>(kFloat16), make_operator<LinearKernel>(kBfloat16),
      make_operator<LinearSwiGluKernel>(kFloat16), make_operator<LinearSwiGluKernel>(kBfloat16)};
  return {&operators[0], &operators[1], &operators[2], &operators[3]};
}
