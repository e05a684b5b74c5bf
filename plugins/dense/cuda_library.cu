// The product by cuBLAS. A bias is spread over y beforehand and the product added to it, in float32 and rounded once;
// SwiGLU is a kernel of its own.
#include "cuda_library.h"

#include "../cuda_cublas_lt.h"
#include "../cuda_launch.cuh"
#include "../cuda_numbers.cuh"
#include "../elementwise/cuda.h"
#include "cuda_clock.h"

namespace kiln::cuda {
namespace {

using namespace cublas;

constexpr int kAnyAlgorithm = -1, kNoReducedPrecision = 16;  // sums of parts stay in float32

struct Cublas {
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*set_stream)(void* handle, cudaStream_t stream) = nullptr;
  int (*set_workspace)(void* handle, void* memory, size_t bytes) = nullptr;
  int (*set_math_mode)(void* handle, int mode) = nullptr;
  int (*multiply)(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha, const void* a,
                  int a_type, int lda, const void* b, int b_type, int ldb, const void* beta, void* c, int c_type,
                  int ldc, int compute, int algorithm) = nullptr;
  Library library{"libcublas.so.13", "libcublas.so.12"};

  Cublas() {
    library.find("cublasCreate_v2", &create);
    library.find("cublasDestroy_v2", &destroy);
    library.find("cublasSetStream_v2", &set_stream);
    library.find("cublasSetWorkspace_v2", &set_workspace);
    library.find("cublasSetMathMode", &set_math_mode);
    library.find("cublasGemmEx", &multiply);
  }
};

const Cublas& functions() {
  static const Cublas found;
  return found;
}

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) spread_bias(const uint16_t* bias, uint16_t* y, int64_t width) {
  let_next_start();
  wait_for_previous();
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column < width) y[blockIdx.x * width + column] = bias[column];
}

LtProduct::Types linear_types(const Linear& call) {
  const int type = data_type(call.element);
  return {type, type, kFloatSums, kFloatData};
}

}  // namespace

LinearLibrary::LinearLibrary(const char** error) {
  *error = nullptr;
  if (!functions().library.complete()) {
    *error = "cuBLAS is not there: expected libcublas.so.13 or .12 on the library path";
  } else if (functions().create(&handle_) != kSuccess) {
    *error = "cuBLAS cannot be started on this device";
  } else if (cudaMalloc(&workspace_, kWorkspaceBytes) != cudaSuccess) {
    *error = "no device memory for cuBLAS's workspace of 32 MiB";
  } else if (functions().set_math_mode(handle_, kNoReducedPrecision) != kSuccess) {
    *error = "cuBLAS refuses float32 sums";
  }
}

LinearLibrary::~LinearLibrary() {
  if (handle_) functions().destroy(handle_);
  if (workspace_) cudaFree(workspace_);
}

bool LinearLibrary::multiply(const Linear& call, const Algorithm* algorithm, void* y, cudaStream_t stream) const {
  const int64_t width = call.swiglu ? 2 * call.width : call.width;
  const float alpha = 1.0f, beta = call.bias ? 1.0f : 0.0f;
  if (algorithm) {
    const LtProduct product(linear_types(call), call.depth, width, call.rows);
    if (product.complete && product.takes(handle_, *algorithm))
      return product.run(handle_, &alpha, call.weight, call.x, &beta, y, *algorithm, workspace_, stream);
  }
  // To cuBLAS, whose matrices are stored by columns: y^T [width, rows] = weight [width, depth] x^T.
  const int type = data_type(call.element), depth = static_cast<int>(call.depth), wide = static_cast<int>(width);
  return functions().set_stream(handle_, stream) == kSuccess &&
         functions().set_workspace(handle_, workspace_, kWorkspaceBytes) == kSuccess &&
         functions().multiply(handle_, kTranspose, kKeep, wide, static_cast<int>(call.rows), depth, &alpha, call.weight,
                              type, depth, call.x, type, depth, &beta, y, type, wide, kFloatSums,
                              kAnyAlgorithm) == kSuccess;
}

const char* LinearLibrary::run(const Linear& call, const Algorithm* algorithm, void* packed,
                               cudaStream_t stream) const {
  const int64_t width = call.swiglu ? 2 * call.width : call.width;
  if (call.rows == 0 || width == 0) return nullptr;
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (call.rows > kMost || width > kMost || call.depth > kMost) return "a dimension is larger than cuBLAS takes";
  void* product = call.swiglu ? packed : call.y;
  if (call.bias) {
    const dim3 grid(static_cast<unsigned>(call.rows), static_cast<unsigned>((width + kThreads - 1) / kThreads));
    const auto bias = static_cast<const uint16_t*>(call.bias);
    const cudaError_t error =
        launch(spread_bias, grid, dim3(kThreads), 0, stream, bias, static_cast<uint16_t*>(product), width);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  if (!multiply(call, algorithm, product, stream)) return "cuBLAS cannot do this product";
  if (!call.swiglu) return nullptr;
  SwiGlu gated = {};
  gated.gate = packed;
  gated.up = static_cast<const uint16_t*>(packed) + call.width;
  gated.output = call.y;
  gated.rows = call.rows;
  gated.width = call.width;
  gated.stride = width;
  gated.alpha = 1.0f;
  gated.element = call.element;
  const cudaError_t error = kiln::cuda::run(gated, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

int LinearLibrary::time(const Linear& call, const void* const* weights, int copies, void* packed, cudaStream_t stream,
                        TimedAlgorithm* found, int most) const {
  if (most < 1 || copies < 1) return 0;
  std::vector<Heuristic> offered(most - 1);
  const LtProduct product(linear_types(call), call.depth, call.swiglu ? 2 * call.width : call.width, call.rows);
  if (!product.complete) offered.clear();
  else offered.resize(product.find(handle_, offered.data(), most - 1, kWideReduction));
  const int count = static_cast<int>(offered.size()) + 1;
  for (int i = 0; i < count; i++) found[i].algorithm = i ? offered[i - 1].algorithm : Algorithm{};
  AlgorithmClock clock(stream);
  for (int i = 0; i < count; i++) {
    const bool captured = clock.capture([&] {
      for (int copy = 0; copy < copies; copy++) {
        Linear one = call;
        one.weight = weights[copy];
        if (run(one, i ? &found[i].algorithm : nullptr, packed, stream)) return false;
      }
      return true;
    });
    if (!captured) return -1;
  }
  if (!clock.run()) return -1;
  for (int i = 0; i < count; i++) found[i].microseconds = clock.microseconds(i) / copies;
  return count;
}

}  // namespace kiln::cuda

// For tests: the product by a cuBLAS of its own, done when this returns. Null, or what failed.
extern "C" __attribute__((visibility("default"))) const char* kiln_cuda_linear_library(const kiln::cuda::Linear* call,
                                                                                       void* packed, void* stream) {
  const char* problem = nullptr;
  const kiln::cuda::LinearLibrary library(&problem);
  if (!problem) problem = library.run(*call, nullptr, packed, static_cast<cudaStream_t>(stream));
  if (!problem && cudaStreamSynchronize(static_cast<cudaStream_t>(stream)) != cudaSuccess)
    problem = "the device failed";
  return problem;
}

// For tuning: cuBLASLt's version, 0 where it is not there; a library of one's own, or null; its end; and
// LinearLibrary::time.
#define KILN_EXPORT extern "C" __attribute__((visibility("default")))
KILN_EXPORT size_t kiln_cuda_linear_version() {
  return kiln::cuda::cublas::lt().library.complete() ? kiln::cuda::cublas::lt().version() : 0;
}
KILN_EXPORT void* kiln_cuda_linear_library_create() {
  if (!kiln_cuda_linear_version()) return nullptr;
  return kiln::cuda::cublas::created_or_null<kiln::cuda::LinearLibrary>();
}
KILN_EXPORT void kiln_cuda_linear_library_destroy(void* library) {
  delete static_cast<kiln::cuda::LinearLibrary*>(library);
}
KILN_EXPORT int kiln_cuda_linear_library_time(void* library, const kiln::cuda::Linear* call, const void* const* weights,
                                              int copies, void* packed, void* stream, kiln::cuda::TimedAlgorithm* found,
                                              int most) {
  return static_cast<kiln::cuda::LinearLibrary*>(library)->time(*call, weights, copies, packed,
                                                                static_cast<cudaStream_t>(stream), found, most);
}
