// Chooses the kernels of a call and launches them: one that writes the cache, then one or two that attend.
#include <algorithm>
#include <climits>

#include "cuda_launch.h"
#include "cuda_write.cuh"

namespace kiln::cuda {
namespace {

template <typename T>
cudaError_t launch_write(const PagedAttention& call, int* next_tile, cudaStream_t stream) {
  if (is_quantised(call)) {
    const int64_t blocks = (call.tokens * int64_t{2} * call.kv_heads * 32 + kWriteThreads - 1) / kWriteThreads;
    return launch(write_quantised_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kWriteThreads), 0, stream, call);
  }
  const int64_t parts = (2 * call.kv_heads * call.head_dim / 8 + 31) / 32;
  const int64_t blocks = (call.tokens * parts * 32 + kWriteThreads - 1) / kWriteThreads;
  return launch(write_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kWriteThreads), 0, stream, call, next_tile);
}

bool takes_hopper(const PagedAttention& call, const Device& device) { return device.major == 9 && !call.portable; }

// Query rows up to which reading a context split over the chip beats one CTA per tile. Measured on an H200 with 8 KV
// heads and a context of 2048, in us, decode path and Hopper's prefill: 1 sequence x 128 rows 34, 39; 1 x 256 47, 39;
// 4 x 32 35, 43; 4 x 64 48, 44; 16 x 16 48, 51; 16 x 32 88, 51. For the slower prefill kernels as it was when that one
// was slower, too, at contexts of 2048 and 4096: 1 x 128 47, 85; 1 x 256 70, 85; 16 x 16 49, 58.
int32_t measured_rows(const PagedAttention& call, const Device& device) {
  const int64_t readers = static_cast<int64_t>(call.seqs) * call.kv_heads;
  if (!takes_hopper(call, device) || is_quantised(call)) return readers * 4 < device.multiprocessors ? 256 : 16;
  return static_cast<int32_t>(std::clamp<int64_t>(int64_t{8} * device.multiprocessors / readers, 16, 256));
}

}  // namespace

cudaError_t current_device(Device* device) {
  constexpr int kMost = 64;
  static Device known[kMost];  // written by whoever comes first, always with the same numbers
  int number = 0;
  cudaError_t error = cudaGetDevice(&number);
  if (error != cudaSuccess) return error;
  if (number < kMost && known[number].shared_bytes > 0) return *device = known[number], cudaSuccess;
  Device fresh = {};
  error = cudaDeviceGetAttribute(&fresh.major, cudaDevAttrComputeCapabilityMajor, number);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&fresh.multiprocessors, cudaDevAttrMultiProcessorCount, number);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&fresh.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, number);
  if (error == cudaSuccess && number < kMost) known[number] = fresh;
  *device = fresh;
  return error;
}

size_t scratch_bytes() {
  Device device;
  return current_device(&device) == cudaSuccess ? decode_scratch_bytes(device) + sizeof(int) : 0;
}

const char* unsupported(const PagedAttention& call) {
  Device device;
  if (call.head_dim != 64 && call.head_dim != 96 && call.head_dim != 128 && call.head_dim != 256)
    return "the head size is not one that the CUDA kernels are built for: expected 64, 96, 128 or 256";
  if (call.block_size % 16 != 0) return "the block size does not suit the CUDA kernels: expected a multiple of 16";
  if (call.rotary_half % 2 != 0) return "cos_cache and sin_cache have an odd number of columns: expected an even one";
  if (!(call.scale > 0)) return "the CUDA kernels expect a positive scale";
  if (static_cast<int64_t>(call.blocks) * call.block_size > INT_MAX)
    return "the cache is too large for the CUDA kernels: expected fewer than 2^31 positions";
  if (current_device(&device) != cudaSuccess) return "the CUDA device does not answer";
  if (!decode_fits(call, device)) return "too many sequences in one call for this device: split the batch";
  return nullptr;
}

cudaError_t run(const PagedAttention& given, cudaStream_t stream) {
  if (given.tokens == 0 || given.seqs == 0) return cudaSuccess;
  Device device;
  cudaError_t error = current_device(&device);
  if (error != cudaSuccess) return error;
  PagedAttention call = given;
  if (call.decode_rows == kMeasured) call.decode_rows = measured_rows(call, device);
  // Behind what the decode path keeps: how many tiles were taken.
  int* next_tile = reinterpret_cast<int*>(static_cast<char*>(call.scratch) + decode_scratch_bytes(device));
  error = call.element == Element::kFloat16 ? launch_write<__half>(call, next_tile, stream)
                                            : launch_write<__nv_bfloat16>(call, next_tile, stream);
  // Lengths are not known here. With none of them zero, no sequence has more new tokens than this; if some are, the
  // decode path does what is left, only slower.
  const int64_t most_rows =
      static_cast<int64_t>(call.tokens > call.seqs ? call.tokens - call.seqs + 1 : 1) * (call.heads / call.kv_heads);
  const bool prefill = most_rows > call.decode_rows, decode = !prefill || call.seqs > 1;
  if (!prefill) call.decode_rows = INT_MAX;
  if (!decode) call.decode_rows = 0;
  if (error == cudaSuccess && prefill)
    error = takes_hopper(call, device) ? launch_hopper(call, device, next_tile, stream) : launch_prefill(call, stream);
  if (error == cudaSuccess && decode) error = launch_decode(call, device, stream);
  return error;
}

}  // namespace kiln::cuda

// For tests and benchmarks, which call through ctypes.
#define KILN_EXPORT extern "C" __attribute__((visibility("default")))

KILN_EXPORT size_t kiln_cuda_attention_scratch_bytes() { return kiln::cuda::scratch_bytes(); }

KILN_EXPORT const char* kiln_cuda_attention_unsupported(const kiln::cuda::PagedAttention* call) {
  return kiln::cuda::unsupported(*call);
}

KILN_EXPORT int kiln_cuda_attention(const kiln::cuda::PagedAttention* call, cudaStream_t stream) {
  return kiln::cuda::run(*call, stream);
}
