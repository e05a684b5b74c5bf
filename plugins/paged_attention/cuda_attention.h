// Paged attention on an NVIDIA GPU: one call's operands and the entry point.
//
// Semantics are in schema.py; queries, keys, values, output and caches have one 16-bit type, or caches are int8 with
// scales; sums and softmax are float32. Knows nothing of ONNX Runtime. Owns no memory, allocates none, and never waits
// for the device: what it launches depends on shapes alone, so a call can be captured in a CUDA graph and replayed with
// other lengths.
//
// Lengths, block numbers and slots are on the device, where nobody checks them. The kernels clamp them to the
// buffers: wrong ones give wrong numbers, but touch no memory outside the operands.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../cuda_element.h"

namespace kiln::cuda {

// All pointers are device pointers, aligned to 16 bytes. Strides count elements and are multiples of 8.
struct PagedAttention {
  const void* query;  // [tokens, heads * head_dim], rows query_stride apart
  const void* key;    // [tokens, kv_heads * head_dim], rows key_stride apart
  const void* value;  // likewise, value_stride
  void* output;       // [tokens, heads * head_dim]; rows of tokens that belong to no sequence are left alone
  void* key_cache;    // [blocks, block_size, kv_heads, head_dim]
  void* value_cache;
  float* key_scale;    // [blocks, block_size, kv_heads] where the keys are int8, else null
  float* value_scale;  // likewise
  const int32_t* cumulative;   // [seqs + 1]
  const int32_t* past;         // [seqs]
  const int32_t* block_table;  // [seqs, max_blocks]
  const int32_t* slots;        // [tokens]
  const float* cos;            // [positions, rotary_half]; null without rotation
  const float* sin;
  void* scratch;  // scratch_bytes() of memory, zero at first and then left to the calls of one stream

  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int32_t tokens;
  int32_t seqs;
  int32_t blocks;
  int32_t block_size;  // a multiple of 16
  int32_t max_blocks;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;     // 64, 96, 128 or 256
  int32_t positions;    // rows of cos and sin
  int32_t rotary_half;  // half of the rotated part of a head, even; 0: no rotation
  int32_t window;       // 0: unlimited
  int32_t decode_rows;  // sequences of at most so many query rows (new tokens x heads / kv_heads) take the decode path
  float scale;          // already resolved, never 0
  float softcap;        // 0: none
  Element element;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_half)
  bool portable;     // only instructions that all architectures have: so one device can test what others run
};

// For `decode_rows`: the crossover measured on an H200.
constexpr int32_t kMeasured = -1;

// What `scratch` must hold on the current device, for calls of any shape. Zero on failure.
size_t scratch_bytes();

// Null if the kernels can do this call, else what was found and what was expected. Looks at shapes alone.
const char* unsupported(const PagedAttention& call);

// Launches: keys and values are written, then attention is computed. `call` must be supported.
cudaError_t run(const PagedAttention& call, cudaStream_t stream);

}  // namespace kiln::cuda
