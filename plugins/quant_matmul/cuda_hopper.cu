// Launches the products on Hopper: describes the operands to the bulk copy engine.
#include "../dense/cuda_tensor_map.h"
#include "cuda_few_rows.cuh"
#include "cuda_hopper.cuh"
#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

// In boxes of 128 bytes of the rows of some slabs.
cudaError_t describe_weight(CUtensorMap* map, const QuantLinear& call, cuuint32_t slabs) {
  const cuuint64_t bytes = row_bytes(call), width = call.width;
  constexpr CUtensorMapDataType kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (!call.swiglu) return describe<2>(map, kBytes, 1, call.weight, {bytes, width}, {1}, {128, slabs * kSlab});
  // [width / 8][gate, up][8][bytes]: the box has the rows of a tile as finish() expects them.
  return describe<4>(map, kBytes, 1, call.weight, {bytes, 8, 2, width / 8}, {1, width, 8}, {128, 8, 2, slabs});
}

struct LaunchHopper {
  const QuantLinear& call;
  cudaStream_t stream;

  template <typename T, WeightFormat kFormat, int kRows, bool kSwiGlu>
  cudaError_t run() const {
    using Shape = QuantRing<kFormat, kRows>;
    const auto kernel = quant_linear_hopper<T, kFormat, kRows, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, Shape::kSharedBytes); error != cudaSuccess) return error;
    CUtensorMap weight, x;
    if (const cudaError_t error = describe_weight(&weight, call, kSlabs); error != cudaSuccess) return error;
    const cudaError_t error =
        describe<2>(&x, data_type(call.element), 2, call.x,
                    {static_cast<cuuint64_t>(call.depth), static_cast<cuuint64_t>(call.rows)}, {1}, {64, kRows});
    if (error != cudaSuccess) return error;
    const QuantWork work = work_of(call, Shape::kStep);
    return launch(kernel, dim3(work.linear.blocks), dim3(kHopperThreads), Shape::kSharedBytes, stream, weight, x, work);
  }
};

// The kernel for few rows, where it can do a call and that pays: x is small, and what the fullest block reads beyond an
// even share takes less time than to join the sums of blocks (64 KB take a multiprocessor 2 us).
struct FewRows {
  const QuantLinear& call;
  cudaStream_t stream;
  FewRowsWork work = {};
  int blocks = 0;

  FewRows(const QuantLinear& call, cudaStream_t stream) : call(call), stream(stream) {
    constexpr int64_t kMostSlabs = 16, kMostBeyond = 64 << 10, kMostValues = 32768;
    if (call.format != WeightFormat::kInt8 || call.group || call.rows > call.few_rows) return;
    if (call.rows * call.depth > kMostValues) return;
    const int64_t slabs = (weight_rows(call) + kSlab - 1) / kSlab, processors = block_count();
    const int64_t of_block = (slabs + processors - 1) / processors;
    const int64_t beyond = (of_block * processors - slabs) * kSlab * call.depth / processors;
    if (of_block > kMostSlabs || beyond > kMostBeyond) return;
    work = {call.x, call.scale, call.bias, call.y};
    work.rows = static_cast<int>(call.rows);
    work.depth = static_cast<int>(call.depth);
    work.width = static_cast<int>(call.width);
    work.slabs = static_cast<int>(of_block);
    if (of_block <= 4) plan<FewRowsShape<4, 4>>();
    else if (of_block <= 8) plan<FewRowsShape<2, 8>>();
    else plan<FewRowsShape<1, 8>>();
    if (work.stages >= std::min(work.steps, 3)) blocks = static_cast<int>((slabs + of_block - 1) / of_block);
  }

  bool applies() const { return blocks > 0; }

  cudaError_t operator()() const {
    return call.element == Element::kFloat16 ? of_element<__half>() : of_element<__nv_bfloat16>();
  }

 private:
  template <typename Shape>
  void plan() {
    work.steps = (work.depth + Shape::kDepth - 1) / Shape::kDepth;
    work.stages = Shape::stages(work);
  }

  template <typename T>
  cudaError_t of_element() const {
    return call.swiglu ? of_epilogue<T, true>() : of_epilogue<T, false>();
  }
  template <typename T, bool kSwiGlu>
  cudaError_t of_epilogue() const {
    if (work.slabs <= 4) return run<T, 4, 4, kSwiGlu>();
    return work.slabs <= 8 ? run<T, 2, 8, kSwiGlu>() : run<T, 1, 8, kSwiGlu>();
  }
  template <typename T, int kBoxes, int kSlabsOfWarp, bool kSwiGlu>
  cudaError_t run() const {
    const auto kernel = quant_linear_few_rows<T, kBoxes, kSlabsOfWarp, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, kFewRowsShared); error != cudaSuccess) return error;
    CUtensorMap weight;
    if (const cudaError_t error = describe_weight(&weight, call, work.slabs); error != cudaSuccess) return error;
    const int stride = FewRowsShape<kBoxes, kSlabsOfWarp>::plane_stride(work.depth);
    return launch(kernel, dim3(blocks), dim3(kHopperThreads), kFewRowsShared, stream, weight, work, stride);
  }
};

}  // namespace

cudaError_t launch_hopper(const QuantLinear& call, cudaStream_t stream) {
  const FewRows few(call, stream);
  return few.applies() ? few() : dispatch(call, LaunchHopper{call, stream});
}

}  // namespace kiln::cuda
