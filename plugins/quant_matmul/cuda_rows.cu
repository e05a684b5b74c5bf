// Rows to 8 bits, and sums of 8-bit products to results: two kernels that read and write once.
#include "cuda_rows.h"

#include <cuda_fp8.h>

#include <algorithm>

#include "../cuda_launch.cuh"
#include "../cuda_numbers.cuh"

namespace kiln::cuda {
namespace {

constexpr int kWarp = 32, kMostThreads = 512, kChunk = 16, kFinishThreads = 256, kFour = 4;

// The largest of the block, NaN if any is: the same in all threads.
__device__ float block_largest(float value) {
  __shared__ float of_warp[kMostThreads / kWarp];
  const auto larger = [](float a, float b) { return a > b || isnan(a) ? a : b; };
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) value = larger(value, __shfl_xor_sync(~0u, value, d));
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warp[0];
  for (int i = 1; i < blockDim.x / kWarp; i++) value = larger(value, of_warp[i]);
  return value;
}

template <typename T>
__device__ void load_chunk(const T* from, float (&x)[kChunk]) {
  float part[kVector];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    unpack_vector<T>(reinterpret_cast<const uint4*>(from)[half], part);
#pragma unroll
    for (int i = 0; i < kVector; i++) x[half * kVector + i] = part[i];
  }
}

template <bool kFloat8>
__device__ uint32_t byte_of(float x) {
  if constexpr (kFloat8) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  else return static_cast<uint32_t>(__float2int_rn(x)) & 0xff;
}

// A block takes a row. Word c of a chunk of 16 values has 2c, 2c + 1, 2c + 8 and 2c + 9.
template <typename T, bool kFloat8>
__global__ void __launch_bounds__(kMostThreads) quantize_row(const T* rows, uint4* q, float* scale, int64_t depth) {
  constexpr float kLargest = kFloat8 ? 448.0f : 127.0f;
  let_next_start();
  wait_for_previous();
  const T* row = rows + blockIdx.x * depth;
  const int chunks = static_cast<int>(depth / kChunk);
  float x[kChunk], largest = 0.0f;
  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    load_chunk(row + chunk * kChunk, x);
#pragma unroll
    for (int i = 0; i < kChunk; i++) largest = fabsf(x[i]) > largest || isnan(x[i]) ? fabsf(x[i]) : largest;
  }
  largest = block_largest(largest);
  const bool finite = largest <= 3.4e38f, usual = finite && largest >= 7.888609e-31f;  // 2^-100
  const float factor = usual ? kLargest / largest : 0.0f;
  if (threadIdx.x == 0) scale[blockIdx.x] = usual ? largest / kLargest : finite ? 0.0f : __int_as_float(0x7fffffff);
  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    if (chunks > blockDim.x) load_chunk(row + chunk * kChunk, x);  // else they still are in registers
    uint32_t words[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float of_word[] = {x[2 * c], x[2 * c + 1], x[2 * c + 8], x[2 * c + 9]};
      words[c] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) words[c] |= byte_of<kFloat8>(usual ? of_word[i] * factor : 0.0f) << 8 * i;
    }
    q[blockIdx.x * static_cast<int64_t>(chunks) + chunk] = {words[0], words[1], words[2], words[3]};
  }
}

template <typename T>
__device__ void load_four(const void* bias, int64_t at, float (&x)[kFour]) {
#pragma unroll
  for (int i = 0; i < kFour; i++) x[i] = bias ? to_float(__ldg(static_cast<const T*>(bias) + at + i)) : 0.0f;
}

// Four results of a product: sums * row_scale * scale + bias.
template <typename T, typename Sum>
__device__ void scaled_four(const Sum* sums, float row_scale, const float* scale, const void* bias, int64_t at,
                            float (&x)[kFour]) {
  struct alignas(16) Four {
    Sum of[kFour];
  };
  const Four four = *reinterpret_cast<const Four*>(sums + at);
  const float4 scales = __ldg(reinterpret_cast<const float4*>(scale + at));
  const float of[] = {scales.x, scales.y, scales.z, scales.w};
  load_four<T>(bias, at, x);
#pragma unroll
  for (int i = 0; i < kFour; i++) x[i] += static_cast<float>(four.of[i]) * row_scale * of[i];
}

// A thread has four neighbours of a row of y.
template <typename T, typename Sum, bool kSwiGlu>
__global__ void __launch_bounds__(kFinishThreads)
    finish_row(const Sum* sums, const float* row_scale, const float* scale, const void* bias, T* y, int64_t width) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x, at = (static_cast<int64_t>(blockIdx.y) * kFinishThreads + threadIdx.x) * kFour;
  if (at >= width) return;
  const Sum* of_row = sums + row * (kSwiGlu ? 2 * width : width);
  float x[kFour];
  scaled_four<T>(of_row, row_scale[row], scale, bias, at, x);
  if constexpr (kSwiGlu) {
    float up[kFour];
    scaled_four<T>(of_row, row_scale[row], scale, bias, width + at, up);
#pragma unroll
    for (int i = 0; i < kFour; i++) x[i] = swiglu(x[i], up[i]);
  }
  *reinterpret_cast<uint2*>(y + row * width + at) = {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3])};
}

template <typename T, bool kFloat8>
cudaError_t quantize(const QuantLinear& call, void* q, float* scale, cudaStream_t stream) {
  const int64_t chunks = (call.depth / kChunk + kWarp - 1) / kWarp * kWarp;
  const dim3 threads(static_cast<unsigned>(std::min<int64_t>(chunks, kMostThreads)));
  return launch(quantize_row<T, kFloat8>, dim3(static_cast<unsigned>(call.rows)), threads, 0, stream,
                static_cast<const T*>(call.x), static_cast<uint4*>(q), scale, call.depth);
}

template <typename T, typename Sum>
cudaError_t finish(const QuantLinear& call, const void* sums, const float* row_scale, cudaStream_t stream) {
  constexpr int64_t kEach = kFinishThreads * kFour;
  const dim3 grid(static_cast<unsigned>(call.rows), static_cast<unsigned>((call.width + kEach - 1) / kEach));
  const auto kernel = call.swiglu ? finish_row<T, Sum, true> : finish_row<T, Sum, false>;
  return launch(kernel, grid, dim3(kFinishThreads), 0, stream, static_cast<const Sum*>(sums), row_scale, call.scale,
                call.bias, static_cast<T*>(call.y), call.width);
}

}  // namespace

cudaError_t quantize_rows(const QuantLinear& call, void* q, float* scale, cudaStream_t stream) {
  const bool half = call.element == Element::kFloat16;
  if (call.format == WeightFormat::kFloat8)
    return half ? quantize<__half, true>(call, q, scale, stream)
                : quantize<__nv_bfloat16, true>(call, q, scale, stream);
  return half ? quantize<__half, false>(call, q, scale, stream)
              : quantize<__nv_bfloat16, false>(call, q, scale, stream);
}

cudaError_t finish_sums(const QuantLinear& call, const void* sums, const float* row_scale, cudaStream_t stream) {
  const bool half = call.element == Element::kFloat16;
  if (call.format == WeightFormat::kFloat8)
    return half ? finish<__half, float>(call, sums, row_scale, stream)
                : finish<__nv_bfloat16, float>(call, sums, row_scale, stream);
  return half ? finish<__half, int>(call, sums, row_scale, stream)
              : finish<__nv_bfloat16, int>(call, sums, row_scale, stream);
}

}  // namespace kiln::cuda
