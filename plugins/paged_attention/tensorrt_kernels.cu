// The paged-attention kernels as TensorRT launches them ahead of time: PTX entry points that take pointers and 32-bit
// integers one by one, inputs first, then integers, then outputs (tensorrt_plugin.py has the same order). Compiled for
// one element type and head size, which KILN_ELEMENT, KILN_HEAD_DIM and KILN_COLUMNS give. Not part of the library.
//
// Grid, threads and shared memory are tensorrt_plugin.py's to choose; floats come as the integers of their bits.
#include "cuda_device.cuh"

// The same kernels, from the same files, as functions of the entry points below: a kernel cannot call a kernel, and
// TensorRT passes no struct.
#pragma push_macro("__global__")
#pragma push_macro("__launch_bounds__")
#pragma push_macro("__grid_constant__")
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__ __device__ __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__
#include "cuda_decode_kernel.cuh"
#include "cuda_prefill.cuh"
#include "cuda_write.cuh"
#pragma pop_macro("__grid_constant__")
#pragma pop_macro("__launch_bounds__")
#pragma pop_macro("__global__")

namespace {

using T = KILN_ELEMENT;
using kiln::cuda::PagedAttention;

// What every call has of the sequences and the cache.
__device__ __forceinline__ PagedAttention call_from(const int* cumulative, const int* past, const int* block_table,
                                                    const float* cos, const float* sin, int tokens, int seqs,
                                                    int blocks, int block_size, int max_blocks, int kv_heads,
                                                    int positions, int rotary_half, int interleaved) {
  PagedAttention call = {};
  call.cumulative = cumulative;
  call.past = past;
  call.block_table = block_table;
  call.cos = cos;
  call.sin = sin;
  call.tokens = tokens;
  call.seqs = seqs;
  call.blocks = blocks;
  call.block_size = block_size;
  call.max_blocks = max_blocks;
  call.kv_heads = kv_heads;
  call.head_dim = KILN_HEAD_DIM;
  call.positions = positions;
  call.rotary_half = rotary_half;
  call.interleaved = interleaved != 0;
  call.portable = true;
  return call;
}

// And what only those that attend have.
__device__ __forceinline__ void attend_from(PagedAttention* call, const T* query, const T* key_cache,
                                            const T* value_cache, int heads, int window, int decode_rows,
                                            int scale_bits, int softcap_bits, T* output) {
  call->query = query;
  call->query_stride = int64_t{heads} * KILN_HEAD_DIM;
  call->key_cache = const_cast<T*>(key_cache);
  call->value_cache = const_cast<T*>(value_cache);
  call->heads = heads;
  call->window = window;
  call->decode_rows = decode_rows;
  call->scale = __int_as_float(scale_bits);
  call->softcap = __int_as_float(softcap_bits);
  call->output = output;
}

}  // namespace

// Keys, rotated, and values of the new tokens into the caches, which are inputs and outputs of one address.
extern "C" __global__ void __launch_bounds__(kiln::cuda::kWriteThreads)
    kiln_paged_write(const T* key, const T* value, const T*, const T*, const int* cumulative, const int* past,
                     const int* block_table, const int* slots, const float* cos, const float* sin, int tokens,
                     int seqs, int blocks, int block_size, int max_blocks, int kv_heads, int positions,
                     int rotary_half, int interleaved, T* key_cache, T* value_cache) {
  PagedAttention call = call_from(cumulative, past, block_table, cos, sin, tokens, seqs, blocks, block_size, max_blocks,
                                  kv_heads, positions, rotary_half, interleaved);
  call.key = key;
  call.value = value;
  call.key_stride = call.value_stride = int64_t{kv_heads} * KILN_HEAD_DIM;
  call.slots = slots;
  call.key_cache = key_cache;
  call.value_cache = value_cache;
  kiln::cuda::write_kernel<T>(call, nullptr);
}

// Attention of the sequences with at most `decode_rows` query rows; the others' output is left alone. `scratch` is zero
// at first, and left as it was found but for results that nobody reads again.
extern "C" __global__ void __launch_bounds__(256, 1)
    kiln_paged_decode(const T* query, const T* key_cache, const T* value_cache, const int* cumulative, const int* past,
                      const int* block_table, const float* cos, const float* sin, const int*, int tokens, int seqs,
                      int blocks, int block_size, int max_blocks, int kv_heads, int positions, int rotary_half,
                      int interleaved, int heads, int window, int decode_rows, int scale_bits, int softcap_bits,
                      int warps, int stages, int counters, T* output, int* scratch) {
  PagedAttention call = call_from(cumulative, past, block_table, cos, sin, tokens, seqs, blocks, block_size, max_blocks,
                                  kv_heads, positions, rotary_half, interleaved);
  attend_from(&call, query, key_cache, value_cache, heads, window, decode_rows, scale_bits, softcap_bits, output);
  kiln::cuda::decode_kernel<T, KILN_HEAD_DIM, KILN_COLUMNS, false>(
      call, kiln::cuda::DecodePlan{warps, stages}, reinterpret_cast<float*>(scratch + counters), scratch);
}

// Attention of the sequences with more; the others' output, which is an input of the same address, is left alone.
extern "C" __global__ void __launch_bounds__(kiln::cuda::PrefillLayout<KILN_HEAD_DIM>::kThreads)
    kiln_paged_prefill(const T* query, const T* key_cache, const T* value_cache, const int* cumulative, const int* past,
                       const int* block_table, const float* cos, const float* sin, const T*, int tokens, int seqs,
                       int blocks, int block_size, int max_blocks, int kv_heads, int positions, int rotary_half,
                       int interleaved, int heads, int window, int decode_rows, int scale_bits, int softcap_bits,
                       T* output) {
  PagedAttention call = call_from(cumulative, past, block_table, cos, sin, tokens, seqs, blocks, block_size, max_blocks,
                                  kv_heads, positions, rotary_half, interleaved);
  attend_from(&call, query, key_cache, value_cache, heads, window, decode_rows, scale_bits, softcap_bits, output);
  kiln::cuda::prefill_kernel<T, KILN_HEAD_DIM, false>(call);
}
