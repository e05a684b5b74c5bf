// The part of ONNX Runtime's C ABI that Kiln's custom operators use, declared by ourselves because the
// onnxruntime wheels ship no headers. Function pointers are found by their index in the OrtApi table; the
// table is append-only, so an index never changes. Knows nothing of any operator.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;

typedef const void* const* OrtApi;  // table of function pointers, see OrtFunction

struct OrtApiBase {
  OrtApi (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
};

// Fields and their order are ABI (OrtCustomOp, version 24). Unused ones stay null.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, OrtApi, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, OrtApi, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // extern "C"

namespace kiln::ort {

constexpr uint32_t kApiVersion = 24;

enum ElementType { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBfloat16 = 16 };
enum Characteristic { kRequired = 0, kOptional = 1 };
enum ErrorCode { kFail = 1, kInvalidArgument = 2 };

// Typed entry of the table: call as Function<kIndex, Signature>::of(api)(arguments...).
template <size_t kIndex, typename Signature>
struct Function {
  static Signature* of(OrtApi api) { return reinterpret_cast<Signature*>(const_cast<void*>(api[kIndex])); }
};

using CreateStatus = Function<0, OrtStatus*(int code, const char* message)>;
using GetErrorMessage = Function<2, const char*(const OrtStatus*)>;
using CreateCustomOpDomain = Function<26, OrtStatus*(const char* name, OrtCustomOpDomain**)>;
using CustomOpDomainAdd = Function<27, OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*)>;
using AddCustomOpDomain = Function<28, OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>;
using GetTensorMutableData = Function<51, OrtStatus*(OrtValue*, void**)>;
using GetDimensionsCount = Function<61, OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>;
using GetDimensions = Function<62, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>;
using GetTensorTypeAndShape = Function<65, OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>;
using KernelInfoGetAttributeFloat = Function<85, OrtStatus*(const OrtKernelInfo*, const char*, float*)>;
using KernelInfoGetAttributeInt64 = Function<86, OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)>;
using KernelInfoGetAttributeString = Function<87, OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)>;
using KernelContextGetInputCount = Function<88, OrtStatus*(const OrtKernelContext*, size_t*)>;
using KernelContextGetInput = Function<90, OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>;
using KernelContextGetOutput =
    Function<91, OrtStatus*(OrtKernelContext*, size_t, const int64_t* dims, size_t rank, OrtValue**)>;
using ReleaseStatus = Function<93, void(OrtStatus*)>;
using ReleaseTensorTypeAndShapeInfo = Function<99, void(OrtTensorTypeAndShapeInfo*)>;
using KernelContextGetGpuComputeStream = Function<193, OrtStatus*(const OrtKernelContext*, void** stream)>;
using KernelContextParallelFor = Function<274, OrtStatus*(const OrtKernelContext*, void (*)(void* user, size_t index),
                                                          size_t total, size_t batches, void* user)>;

}  // namespace kiln::ort
