// What the CUDA operators' bindings to ONNX Runtime share: the stream, element types, and the fields of an operator
// that is there once for each type of its operands. Knows no operator.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda_element.h"
#include "cuda_operators.h"
#include "cuda_scratch.h"
#include "ort_binding.h"

namespace kiln::ort {

inline cudaStream_t stream_of(OrtApi api, OrtKernelContext* context) {
  void* handle = nullptr;
  require(api, KernelContextGetGpuComputeStream::of(api)(context, &handle));
  return static_cast<cudaStream_t>(handle);
}

// Of kFloat16 or kBfloat16.
inline cuda::Element element_of(int type) {
  return type == kFloat16 ? cuda::Element::kFloat16 : cuda::Element::kBfloat16;
}

// The operator for operands of one type. OrtCustomOp comes first: ONNX Runtime hands back its address.
struct TypedOperator : OrtCustomOp {
  int type;
};

inline int type_of(const OrtCustomOp* base) { return static_cast<const TypedOperator*>(base)->type; }

// With kInputs inputs and kOutputs outputs of that type, all required; an operator with others changes those fields.
// `Kernel` is constructed from the API, the node and the type.
template <typename Kernel>
TypedOperator typed_operator(int type) {
  TypedOperator op = {};
  fill_common<Kernel>(op);
  op.type = type;
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CUDAExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{Kernel::kInputs}; };
  op.GetInputType = [](const OrtCustomOp* base, size_t) { return type_of(base); };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{Kernel::kOutputs}; };
  op.GetOutputType = [](const OrtCustomOp* base, size_t) { return type_of(base); };
  op.CreateKernelV2 = [](const OrtCustomOp* base, OrtApi api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, Kernel::kName, [&] { *kernel = new Kernel(api, info, type_of(base)); });
  };
  return op;
}

}  // namespace kiln::ort
