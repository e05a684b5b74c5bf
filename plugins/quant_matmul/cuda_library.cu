// W8A8 by cuBLASLt. Where it scales sums by row and column itself (e4m3 on compute capability 9.0) results come out of
// the product; elsewhere sums do, and a kernel makes results of them.
#include "cuda_library.h"

#include <climits>

#include "../cuda_cublas_lt.h"
#include "../elementwise/cuda.h"
#include "cuda_rows.h"

namespace kiln::cuda {
namespace {

using namespace cublas;

// Values of cublasLt.h, which never change.
constexpr int kEpilogue = 7, kBiasPointer = 8, kBiasType = 26;
constexpr int kScaleA = 17, kScaleB = 18, kScaleModeA = 31, kScaleModeB = 32, kOuterVector = 3, kAddBias = 4;

}  // namespace

// How calls of one shape run.
struct QuantLibrary::Plan {
  LtProduct product;
  Algorithm algorithm = {};
  bool is_int8, usable = false;

  Plan(void* handle, const QuantLinear& call, bool direct)
      : product(types_of(call, direct), call.depth, weight_rows(call),
                call.format == WeightFormat::kInt8 ? padded_rows(call.rows) : call.rows),  // nobody reads the padding's
        is_int8(call.format == WeightFormat::kInt8) {
    bool set = product.complete;
    if (direct) {
      set = set && give(kScaleModeA, kOuterVector) && give(kScaleModeB, kOuterVector) && point(call, call.scale);
      if (call.bias) set = set && give(kEpilogue, kAddBias) && give(kBiasType, data_type(call.element));
    }
    Heuristic found = {};
    if (!set || product.find(handle, &found, 1) != 1) return;
    algorithm = found.algorithm;
    usable = true;
  }

  static LtProduct::Types types_of(const QuantLinear& call, bool direct) {
    const bool int8 = call.format == WeightFormat::kInt8;
    const int sums = int8 ? kInt32Data : kFloatData;
    return {int8 ? kInt8Data : kFloat8Data, direct ? data_type(call.element) : sums, int8 ? kInt32Sums : kFloatSums,
            sums};
  }
  template <typename Value>
  bool give(int attribute, Value value) {
    return product.give(attribute, value);
  }
  // Where a direct product finds its scales and its bias.
  bool point(const QuantLinear& call, const float* row_scale) {
    return give(kScaleA, call.scale) && give(kScaleB, row_scale) && (!call.bias || give(kBiasPointer, call.bias));
  }
};

QuantLibrary::QuantLibrary(const char** error) {
  *error = nullptr;
  if (!lt().library.complete()) {
    *error = "cuBLASLt is not there: expected libcublasLt.so.13 or .12 on the library path";
  } else if (lt().create(&handle_) != kSuccess) {
    *error = "cuBLASLt cannot be started on this device";
  } else if (cudaMalloc(&workspace_, kWorkspaceBytes) != cudaSuccess) {
    *error = "no device memory for cuBLASLt's workspace of 32 MiB";
  }
}

QuantLibrary::~QuantLibrary() {
  for (auto& [key, plan] : plans_) delete plan;
  if (handle_) lt().destroy(handle_);
  if (workspace_) cudaFree(workspace_);
}

QuantLibrary::Plan* QuantLibrary::plan_of(const QuantLinear& call, bool direct) {
  const int64_t kind = static_cast<int64_t>(call.format) * 8 + static_cast<int64_t>(call.element) * 4 +
                       (call.bias ? 2 : 0) + direct;
  const int64_t rows = call.format == WeightFormat::kInt8 ? padded_rows(call.rows) : call.rows;
  Plan*& plan = plans_[{rows, call.depth, weight_rows(call), kind}];
  if (!plan) plan = new Plan(handle_, call, direct);
  return plan->usable ? plan : nullptr;
}

const char* QuantLibrary::run(const QuantLinear& call, const QuantBuffers& buffers, cudaStream_t stream) {
  if (call.rows == 0 || call.width == 0) return nullptr;
  if (const char* problem = unsupported_by_library(call)) return problem;
  cudaError_t error = quantize_rows(call, buffers.q, buffers.row_scale, stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  Plan* plan = call.format == WeightFormat::kFloat8 ? plan_of(call, true) : nullptr;
  const bool direct = plan != nullptr;
  if (!plan) plan = plan_of(call, false);
  if (!plan) return "cuBLASLt cannot do this product on this device";
  if (direct && !plan->point(call, buffers.row_scale)) return "cuBLASLt refuses the scales";
  const float one = 1.0f, none = 0.0f;
  const int32_t whole_one = 1, whole_none = 0;
  const void* alpha = plan->is_int8 ? static_cast<const void*>(&whole_one) : &one;
  const void* beta = plan->is_int8 ? static_cast<const void*>(&whole_none) : &none;
  void* result = direct && !call.swiglu ? call.y : buffers.sums;
  if (!plan->product.run(handle_, alpha, call.weight, buffers.q, beta, result, plan->algorithm, workspace_, stream))
    return "cuBLASLt failed in this product";
  if (!direct) {
    error = finish_sums(call, buffers.sums, buffers.row_scale, stream);
  } else if (call.swiglu) {
    SwiGlu gated = {};
    gated.gate = buffers.sums;
    gated.up = static_cast<const uint16_t*>(buffers.sums) + call.width;
    gated.output = call.y;
    gated.rows = call.rows;
    gated.width = call.width;
    gated.stride = 2 * call.width;
    gated.alpha = 1.0f;
    gated.element = call.element;
    error = kiln::cuda::run(gated, stream);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* unsupported_by_library(const QuantLinear& call) {
  if (call.format == WeightFormat::kInt4) return "weights of 4 bits have no product by rows of 8 bits";
  if (call.group != 0) return "products of 8-bit rows take one scale for each weight row: expected group 0";
  if (call.depth % 16 || call.width % 16) return "cuBLASLt expects a depth and width of multiples of 16";
  if (call.rows > INT_MAX || weight_rows(call) > INT_MAX || call.depth > INT_MAX)
    return "a dimension is larger than cuBLASLt takes";
  return nullptr;
}

}  // namespace kiln::cuda

// For tests and benchmarks, which keep a library of their own.
#define KILN_EXPORT extern "C" __attribute__((visibility("default")))

// A library, or null where there can be none.
KILN_EXPORT void* kiln_cuda_quant_library_create() {
  return kiln::cuda::cublas::created_or_null<kiln::cuda::QuantLibrary>();
}
KILN_EXPORT void kiln_cuda_quant_library_destroy(void* library) {
  delete static_cast<kiln::cuda::QuantLibrary*>(library);
}
// Null, or what failed.
KILN_EXPORT const char* kiln_cuda_quant_library_run(void* library, const kiln::cuda::QuantLinear* call,
                                                    const kiln::cuda::QuantBuffers* buffers, void* stream) {
  return static_cast<kiln::cuda::QuantLibrary*>(library)->run(*call, *buffers, static_cast<cudaStream_t>(stream));
}
