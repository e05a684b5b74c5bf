// cuBLASLt as Kiln uses it, declared here like cuBLAS in cuda_cublas.h: y [rows, width] = x weight^T, described, and the
// algorithms that it offers for that.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda_cublas.h"

namespace kiln::cuda::cublas {

// Values of cublasLt.h, which never change.
constexpr int kTransposeA = 3, kWorkspaceLimit = 1, kReductions = 3;
constexpr uint32_t kAnyReduction = 7, kWideReduction = 2;  // sums of parts in any type, or in the compute type

// cublasLtMatmulAlgo_t: to be kept as it is, for the same version of cuBLASLt.
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
  size_t (*version)() = nullptr;
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
  int (*check)(void* handle, void* operation, void* a, void* b, void* c, void* d, const Algorithm* algorithm,
               Heuristic* found) = nullptr;
  int (*multiply)(void* handle, void* operation, const void* alpha, const void* a, void* a_layout, const void* b,
                  void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                  const Algorithm* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream) = nullptr;
  Library library{"libcublasLt.so.13", "libcublasLt.so.12"};

  CublasLt() {
    library.find("cublasLtCreate", &create);
    library.find("cublasLtDestroy", &destroy);
    library.find("cublasLtGetVersion", &version);
    library.find("cublasLtMatmulDescCreate", &create_operation);
    library.find("cublasLtMatmulDescDestroy", &destroy_operation);
    library.find("cublasLtMatmulDescSetAttribute", &set);
    library.find("cublasLtMatrixLayoutCreate", &create_layout);
    library.find("cublasLtMatrixLayoutDestroy", &destroy_layout);
    library.find("cublasLtMatmulPreferenceCreate", &create_preference);
    library.find("cublasLtMatmulPreferenceDestroy", &destroy_preference);
    library.find("cublasLtMatmulPreferenceSetAttribute", &set_preference);
    library.find("cublasLtMatmulAlgoGetHeuristic", &find);
    library.find("cublasLtMatmulAlgoCheck", &check);
    library.find("cublasLtMatmul", &multiply);
  }
};

inline const CublasLt& lt() {
  static const CublasLt functions;
  return functions;
}

// A product of one shape. To cuBLASLt matrices are stored by columns: y^T [width, rows] = weight x^T.
class LtProduct {
 public:
  struct Types {
    int operands, result, compute, scale;  // scale: of alpha and beta
  };

  // The library must be complete. `complete` is false where it refuses.
  LtProduct(Types types, int64_t depth, int64_t width, int64_t rows) {
    complete = lt().create_operation(&operation_, types.compute, types.scale) == kSuccess &&
               lt().create_layout(&weight_, types.operands, depth, width, depth) == kSuccess &&
               lt().create_layout(&x_, types.operands, depth, rows, depth) == kSuccess &&
               lt().create_layout(&y_, types.result, width, rows, width) == kSuccess && give(kTransposeA, kTranspose);
  }
  ~LtProduct() {
    if (operation_) lt().destroy_operation(operation_);
    for (void* layout : {weight_, x_, y_})
      if (layout) lt().destroy_layout(layout);
  }
  LtProduct(const LtProduct&) = delete;
  LtProduct& operator=(const LtProduct&) = delete;

  bool complete = false;

  template <typename Value>
  bool give(int attribute, Value value) {
    return lt().set(operation_, attribute, &value, sizeof(value)) == kSuccess;
  }

  // How many of at most `most` algorithms there are, the likeliest to be fast first.
  int find(void* handle, Heuristic* found, int most, uint32_t reductions = kAnyReduction) const {
    void* preference = nullptr;
    if (lt().create_preference(&preference) != kSuccess) return 0;
    int count = 0;
    if (lt().set_preference(preference, kWorkspaceLimit, &kWorkspaceBytes, sizeof(kWorkspaceBytes)) != kSuccess ||
        lt().set_preference(preference, kReductions, &reductions, sizeof(reductions)) != kSuccess ||
        lt().find(handle, operation_, weight_, x_, y_, y_, preference, most, found, &count) != kSuccess)
      count = 0;
    lt().destroy_preference(preference);
    return count;
  }

  // Whether an algorithm, of another shape perhaps, can do this product.
  bool takes(void* handle, const Algorithm& algorithm) const {
    Heuristic found = {};
    return lt().check(handle, operation_, weight_, x_, y_, y_, &algorithm, &found) == kSuccess &&
           found.state == kSuccess && found.workspace_bytes <= kWorkspaceBytes;
  }

  // y = alpha * x weight^T + beta * y; alpha and beta are on the host, the rest on the device.
  bool run(void* handle, const void* alpha, const void* weight, const void* x, const void* beta, void* y,
           const Algorithm& algorithm, void* workspace, cudaStream_t stream) const {
    return lt().multiply(handle, operation_, alpha, weight, weight_, x, x_, beta, y, y_, y, y_, &algorithm, workspace,
                         kWorkspaceBytes, stream) == kSuccess;
  }

 private:
  void *operation_ = nullptr, *weight_ = nullptr, *x_ = nullptr, *y_ = nullptr;
};

}  // namespace kiln::cuda::cublas
