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

  // What `use` makes of the shape for so many slabs.
  template <typename Use>
  auto with_shape(Use use) const {
    if (work.slabs <= 4) return use(FewRowsShape<4, 4>());
    return work.slabs <= 8 ? use(FewRowsShape<2, 8>()) : use(FewRowsShape<1, 8>());
  }

  FewRows(const QuantLinear& call, cudaStream_t stream) : call(call), stream(stream) {
    constexpr int64_t kMostSlabs = 16, kMostBeyond = 64 << 10, kMostValues = 32768;
    if (call.format != WeightFormat::kInt8 || call.group || call.rows > call.few_rows) return;
    if (call.rows * call.depth > kMostValues) return;
    const int64_t slabs = (weight_rows(call) + kSlab - 1) / kSlab, processors = block_count();
    const int64_t of_block = (slabs + processors - 1) / processors;
    const int64_t beyond = (of_block * processors - slabs) * kSlab * call.depth / processors;
    if (of_block > kMostSlabs || beyond > kMostBeyond) return;
    work.x = call.x;
    work.scale = call.scale;
    work.bias = call.bias;
    work.y = call.y;
    work.rows = static_cast<int>(call.rows);
    work.depth = static_cast<int>(call.depth);
    work.width = static_cast<int>(call.width);
    work.slabs = static_cast<int>(of_block);
    with_shape([&](auto shape) {
      work.steps = (work.depth + shape.kDepth - 1) / shape.kDepth;
      work.stages = shape.stages(work);
    });
    if (work.stages >= std::min(work.steps, 3)) blocks = static_cast<int>((slabs + of_block - 1) / of_block);
  }

  bool applies() const { return blocks > 0; }

  cudaError_t operator()() const {
    return call.element == Element::kFloat16 ? of_element<__half>() : of_element<__nv_bfloat16>();
  }

 private:
  template <typename T>
  cudaError_t of_element() const {
    return with_shape([&](auto shape) {
      return call.swiglu ? run<T, decltype(shape), true>() : run<T, decltype(shape), false>();
    });
  }
  template <typename T, typename Shape, bool kSwiGlu>
  cudaError_t run() const {
    const auto kernel = quant_linear_few_rows<T, Shape, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, kFewRowsShared); error != cudaSuccess) return error;
    CUtensorMap weight;
    if (const cudaError_t error = describe_weight(&weight, call, work.slabs); error != cudaSuccess) return error;
    return launch(kernel, dim3(blocks), dim3(kHopperThreads), kFewRowsShared, stream, weight, work);
  }
};

}  // namespace

cudaError_t launch_hopper(const QuantLinear& call, cudaStream_t stream) {
  const FewRows few(call, stream);
  return few.applies() ? few() : dispatch(call, LaunchHopper{call, stream});
}

}  // namespace kiln::cuda
