// Between the files of the product's kernels: how work is counted, launches, and how a kernel is chosen.
#pragma once

#include <algorithm>
#include <climits>

#include "../dense/cuda_kernels.cuh"
#include "cuda_fragments.cuh"

namespace kiln::cuda {

cudaError_t launch_hopper(const QuantLinear& call, cudaStream_t stream);
cudaError_t launch_portable(const QuantLinear& call, cudaStream_t stream);

inline int block_count() {
  constexpr int kMost = 1024;
  return std::min(device_attribute(cudaDevAttrMultiProcessorCount), kMost);
}

// A kernel's work where it takes `step` values of depth at a time. Blocks are dealt whole steps.
inline QuantWork work_of(const QuantLinear& call, int step) {
  QuantWork work = {};
  work.linear.bias = call.bias;
  work.linear.y = call.y;
  work.linear.partial = static_cast<float4*>(call.scratch);
  work.linear.rows = static_cast<int>(call.rows);
  work.linear.width = static_cast<int>(call.width);
  work.linear.tiles = static_cast<int>((weight_rows(call) + kTileRows - 1) / kTileRows);
  work.linear.steps = static_cast<int>((call.depth + step - 1) / step);
  work.linear.blocks = std::min(block_count(), work.linear.tiles * work.linear.steps);
  work.scale = call.scale;
  work.weight_rows = static_cast<int>(weight_rows(call));
  work.groups = call.group ? static_cast<int>((call.depth + call.group - 1) / call.group) : 1;
  work.group_units = call.group ? static_cast<int>(call.group / kUnit) : INT_MAX;
  return work;
}

// Calls launch.run<T, kFormat, kRows, kSwiGlu>(): rows of x are padded to 8, 16, 32 or 64.
template <typename T, WeightFormat kFormat, typename Launch>
cudaError_t dispatch_rows(const QuantLinear& call, Launch launch) {
  const auto with = [&](auto rows) {
    return call.swiglu ? launch.template run<T, kFormat, rows.value, true>()
                       : launch.template run<T, kFormat, rows.value, false>();
  };
  if (call.rows <= 8) return with(std::integral_constant<int, 8>());
  if (call.rows <= 16) return with(std::integral_constant<int, 16>());
  if (call.rows <= 32) return with(std::integral_constant<int, 32>());
  return with(std::integral_constant<int, 64>());
}

template <typename T, typename Launch>
cudaError_t dispatch_format(const QuantLinear& call, Launch launch) {
  switch (call.format) {
    case WeightFormat::kInt8:
      return dispatch_rows<T, WeightFormat::kInt8>(call, launch);
    case WeightFormat::kFloat8:
      return dispatch_rows<T, WeightFormat::kFloat8>(call, launch);
    case WeightFormat::kInt4:
      break;
  }
  return dispatch_rows<T, WeightFormat::kInt4>(call, launch);
}

template <typename Launch>
cudaError_t dispatch(const QuantLinear& call, Launch launch) {
  return call.element == Element::kFloat16 ? dispatch_format<__half>(call, launch)
                                           : dispatch_format<__nv_bfloat16>(call, launch);
}

}  // namespace kiln::cuda
