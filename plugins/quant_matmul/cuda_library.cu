// W8A8 by cuBLASLt. Where it scales sums by row and column itself (e4m3 on compute capability 9.0) results come out of
// the product; elsewhere sums do, and a kernel makes results of them.
#include "cuda_library.h"

#include <climits>

#include "../cuda_cublas.h"
#include "../elementwise/cuda.h"
#include "cuda_rows.h"

namespace kiln::cuda {
namespace {

using namespace cublas;

// Values of cublasLt.h, which never change.
constexpr int kTransposeA = 3, kEpilogue = 7, kBiasPointer = 8, kBiasType = 26;
constexpr int kScaleA = 17, kScaleB = 18, kScaleModeA = 31, kScaleModeB = 32, kOuterVector = 3, kAddBias = 4;
constexpr int kWorkspaceLimit = 1;

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

struct CublasLt {
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*create_operation)(void** operation, int compute, int scale_type) = nullptr;
  int (*destroy_operation)(void* operation) = nullptr;
  int (*set)(void* operation, int attribute, const void* value, size_t bytes) = nullptr;
  int (*create_layout)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*destroy_layout)(void* layout) = nullptr;
  int (*create_preference)(void** preference) = nullptr;
  int (*destroy_preference)(void* preference) = nullptr;
  int (*set_preference)(void* preference, int attribute, const void* value, size_t bytes) = nullptr;
  int (*find)(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int wanted,
              Heuristic* found, int* count) = nullptr;
  int (*multiply)(void* handle, void* operation, const void* alpha, const void* a, void* a_layout, const void* b,
                  void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                  const Algorithm* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream) = nullptr;
  Library library{"libcublasLt.so.13", "libcublasLt.so.12"};

  CublasLt() {
    library.find("cublasLtCreate", &create);
    library.find("cublasLtDestroy", &destroy);
    library.find("cublasLtMatmulDescCreate", &create_operation);
    library.find("cublasLtMatmulDescDestroy", &destroy_operation);
    library.find("cublasLtMatmulDescSetAttribute", &set);
    library.find("cublasLtMatrixLayoutCreate", &create_layout);
    library.find("cublasLtMatrixLayoutDestroy", &destroy_layout);
    library.find("cublasLtMatmulPreferenceCreate", &create_preference);
    library.find("cublasLtMatmulPreferenceDestroy", &destroy_preference);
    library.find("cublasLtMatmulPreferenceSetAttribute", &set_preference);
    library.find("cublasLtMatmulAlgoGetHeuristic", &find);
    library.find("cublasLtMatmul", &multiply);
  }
};

const CublasLt& lt() {
  static const CublasLt functions;
  return functions;
}

}  // namespace

// How calls of one shape run. To cuBLASLt matrices are stored by columns: y^T [width, rows] = weight x^T.
struct QuantLibrary::Plan {
  void *operation = nullptr, *weight = nullptr, *x = nullptr, *y = nullptr;
  Algorithm algorithm = {};
  bool is_int8 = false, usable = false;

  Plan(void* handle, const QuantLinear& call, bool direct) : is_int8(call.format == WeightFormat::kInt8) {
    const int type = is_int8 ? kInt8Data : kFloat8Data, sums = is_int8 ? kInt32Data : kFloatData;
    const int element = data_type(call.element);
    const uint64_t depth = call.depth, width = weight_rows(call);
    const uint64_t rows = is_int8 ? padded_rows(call.rows) : call.rows;  // what padding gives, nobody reads
    if (lt().create_operation(&operation, is_int8 ? kInt32Sums : kFloatSums, sums) != kSuccess ||
        lt().create_layout(&weight, type, depth, width, call.depth) != kSuccess ||
        lt().create_layout(&x, type, depth, rows, call.depth) != kSuccess ||
        lt().create_layout(&y, direct ? element : sums, width, rows, weight_rows(call)) != kSuccess)
      return;
    bool set = give(kTransposeA, kTranspose);
    if (direct) {
      set = set && give(kScaleModeA, kOuterVector) && give(kScaleModeB, kOuterVector) && point(call, call.scale);
      if (call.bias) set = set && give(kEpilogue, kAddBias) && give(kBiasType, element);
    }
    void* preference = nullptr;
    if (!set || lt().create_preference(&preference) != kSuccess) return;
    Heuristic found = {};
    int count = 0;
    if (lt().set_preference(preference, kWorkspaceLimit, &kWorkspaceBytes, sizeof(kWorkspaceBytes)) == kSuccess &&
        lt().find(handle, operation, weight, x, y, y, preference, 1, &found, &count) == kSuccess && count == 1) {
      algorithm = found.algorithm;
      usable = true;
    }
    lt().destroy_preference(preference);
  }
  ~Plan() {
    if (operation) lt().destroy_operation(operation);
    for (void* layout : {weight, x, y})
      if (layout) lt().destroy_layout(layout);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  template <typename Value>
  bool give(int attribute, Value value) {
    return lt().set(operation, attribute, &value, sizeof(value)) == kSuccess;
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
  if (lt().multiply(handle_, plan->operation, alpha, call.weight, plan->weight, buffers.q, plan->x, beta, result,
                    plan->y, result, plan->y, &plan->algorithm, workspace_, kWorkspaceBytes, stream) != kSuccess)
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
  const char* problem = nullptr;
  auto* library = new kiln::cuda::QuantLibrary(&problem);
  if (!problem) return library;
  delete library;
  return nullptr;
}
KILN_EXPORT void kiln_cuda_quant_library_destroy(void* library) {
  delete static_cast<kiln::cuda::QuantLibrary*>(library);
}
// Null, or what failed.
KILN_EXPORT const char* kiln_cuda_quant_library_run(void* library, const kiln::cuda::QuantLinear* call,
                                                    const kiln::cuda::QuantBuffers* buffers, void* stream) {
  return static_cast<kiln::cuda::QuantLibrary*>(library)->run(*call, *buffers, static_cast<cudaStream_t>(stream));
}
