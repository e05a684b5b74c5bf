// Residual addition with RMS normalisation, and SwiGLU, one launch each. A row of a norm is one block: the sum of
// squares is reduced in an order that depends on `hidden` alone, so a row's result never depends on the batch.
#include "cuda.h"

#include <algorithm>

#include "../cuda_launch.cuh"
#include "../cuda_numbers.cuh"

namespace kiln::cuda {
namespace {

constexpr int kWarp = 32, kMostThreads = 1024, kSwiGluThreads = 256;

// Sum over the block, the same bits in every thread.
__device__ float block_sum(float value) {
  __shared__ float of_warp[kMostThreads / kWarp];
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  value = lane < blockDim.x / kWarp ? of_warp[lane] : 0.0f;
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

__device__ float inverse_rms(float squares, int64_t hidden, float epsilon) {
  return 1.0f / sqrtf(squares / static_cast<float>(hidden) + epsilon);
}

// Rows of whole vectors, kVectors or fewer of them in each thread's registers.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads) add_rms_norm(AddRmsNorm call) {
  let_next_start();
  const int vectors = static_cast<int>(call.hidden / kVector);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * vectors;
  const uint4* x = static_cast<const uint4*>(call.x) + row;
  const uint4* skip = static_cast<const uint4*>(call.skip) + row;
  uint4 gamma[kVectors], sum[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) gamma[i] = __ldg(static_cast<const uint4*>(call.gamma) + at);
  }
  wait_for_previous();
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    float a[kVector], b[kVector];
    unpack_vector<T>(x[at], a);
    unpack_vector<T>(skip[at], b);
#pragma unroll
    for (int j = 0; j < kVector; j++) a[j] += b[j];
    sum[i] = pack_vector<T>(a);
    unpack_vector<T>(sum[i], a);  // the norm is that of the rounded sum, which is what the next layer adds to
#pragma unroll
    for (int j = 0; j < kVector; j++) squares += a[j] * a[j];
  }
  const float factor = inverse_rms(block_sum(squares), call.hidden, call.epsilon);
#pragma unroll
  for (int i = 0; i < kVectors; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    float a[kVector], g[kVector];
    unpack_vector<T>(sum[i], a);
    unpack_vector<T>(gamma[i], g);
#pragma unroll
    for (int j = 0; j < kVector; j++) a[j] = a[j] * factor * g[j];
    if (call.sum) static_cast<uint4*>(call.sum)[row + at] = sum[i];
    static_cast<uint4*>(call.normalized)[row + at] = pack_vector<T>(a);
  }
}

// Rows of any length and alignment. A thread reads an element of x and skip for the last time before it writes there.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) add_rms_norm_any(AddRmsNorm call) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x * call.hidden;
  const T* x = static_cast<const T*>(call.x) + row;
  const T* skip = static_cast<const T*>(call.skip) + row;
  T* sum = call.sum ? static_cast<T*>(call.sum) + row : nullptr;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < call.hidden; i += blockDim.x) {
    const T rounded = from_float<T>(to_float(x[i]) + to_float(skip[i]));
    if (sum) sum[i] = rounded;
    squares += to_float(rounded) * to_float(rounded);
  }
  const float factor = inverse_rms(block_sum(squares), call.hidden, call.epsilon);
  for (int64_t i = threadIdx.x; i < call.hidden; i += blockDim.x) {
    const T rounded = sum ? sum[i] : from_float<T>(to_float(x[i]) + to_float(skip[i]));
    static_cast<T*>(call.normalized)[row + i] =
        from_float<T>(to_float(rounded) * factor * to_float(static_cast<const T*>(call.gamma)[i]));
  }
}

// One vector a thread; kWidth is kVector, or 1 where rows are not whole aligned vectors.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kSwiGluThreads) swiglu_rows(SwiGlu call) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x, at = (static_cast<int64_t>(blockIdx.y) * kSwiGluThreads + threadIdx.x) * kWidth;
  if (at >= call.width) return;
  const T* gate = static_cast<const T*>(call.gate) + row * call.stride + at;
  const T* up = static_cast<const T*>(call.up) + row * call.stride + at;
  T* output = static_cast<T*>(call.output) + row * call.width + at;
  if constexpr (kWidth == kVector) {
    float g[kVector], u[kVector];
    unpack_vector<T>(*reinterpret_cast<const uint4*>(gate), g);
    unpack_vector<T>(*reinterpret_cast<const uint4*>(up), u);
#pragma unroll
    for (int j = 0; j < kVector; j++) g[j] = swiglu(g[j], u[j], call.alpha);
    *reinterpret_cast<uint4*>(output) = pack_vector<T>(g);
  } else {
    *output = from_float<T>(swiglu(to_float(*gate), to_float(*up), call.alpha));
  }
}

template <typename... Pointers>
bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

template <typename T>
cudaError_t run_norm(const AddRmsNorm& call, cudaStream_t stream) {
  constexpr int kMostVectors = 4;
  const dim3 grid(static_cast<unsigned>(call.rows));
  const bool whole = call.hidden % kVector == 0 && call.hidden <= kMostVectors * kMostThreads * kVector &&
                     aligned(call.x, call.skip, call.gamma, call.normalized, call.sum);
  if (!whole) return launch(add_rms_norm_any<T>, grid, dim3(kMostThreads), 0, stream, call);
  const int64_t vectors = call.hidden / kVector, each = (vectors + kMostThreads - 1) / kMostThreads;
  const int64_t warps = ((vectors + each - 1) / each + kWarp - 1) / kWarp;
  const dim3 block(static_cast<unsigned>(warps * kWarp));
  if (each == 1) return launch(add_rms_norm<T, 1>, grid, block, 0, stream, call);
  if (each == 2) return launch(add_rms_norm<T, 2>, grid, block, 0, stream, call);
  return launch(add_rms_norm<T, kMostVectors>, grid, block, 0, stream, call);
}

template <typename T>
cudaError_t run_swiglu(const SwiGlu& call, cudaStream_t stream) {
  const bool whole =
      call.width % kVector == 0 && call.stride % kVector == 0 && aligned(call.gate, call.up, call.output);
  const int64_t each = kSwiGluThreads * (whole ? kVector : 1);  // elements of a block
  const dim3 grid(static_cast<unsigned>(call.rows), static_cast<unsigned>((call.width + each - 1) / each));
  if (whole) return launch(swiglu_rows<T, kVector>, grid, dim3(kSwiGluThreads), 0, stream, call);
  return launch(swiglu_rows<T, 1>, grid, dim3(kSwiGluThreads), 0, stream, call);
}

}  // namespace

cudaError_t run(const AddRmsNorm& call, cudaStream_t stream) {
  if (call.rows == 0 || call.hidden == 0) return cudaSuccess;
  return call.element == Element::kFloat16 ? run_norm<__half>(call, stream) : run_norm<__nv_bfloat16>(call, stream);
}

cudaError_t run(const SwiGlu& call, cudaStream_t stream) {
  if (call.rows == 0 || call.width == 0) return cudaSuccess;
  return call.element == Element::kFloat16 ? run_swiglu<__half>(call, stream)
                                           : run_swiglu<__nv_bfloat16>(call, stream);
}

}  // namespace kiln::cuda

// For callers without C++: the address of a call, a stream; a cudaError_t.
extern "C" __attribute__((visibility("default"))) int kiln_cuda_add_rms_norm(const kiln::cuda::AddRmsNorm* call,
                                                                             void* stream) {
  return kiln::cuda::run(*call, static_cast<cudaStream_t>(stream));
}
extern "C" __attribute__((visibility("default"))) int kiln_cuda_swiglu(const kiln::cuda::SwiGlu* call, void* stream) {
  return kiln::cuda::run(*call, static_cast<cudaStream_t>(stream));
}
