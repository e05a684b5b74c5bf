// Paged attention on the CPU: one call's operands, the checks, and the entry point.
//
// Semantics are in schema.py. Knows nothing of ONNX Runtime: threads come in as a function, operands as
// pointers. Nothing here owns memory of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../parallel.h"

namespace kiln {

enum class CacheType { kFloat32, kFloat16, kBfloat16, kInt8 };

inline size_t cache_itemsize(CacheType type) {
  return type == CacheType::kFloat32 ? 4 : type == CacheType::kInt8 ? 1 : 2;
}

// One call. Caches are [blocks, block_size, kv_heads, head_dim]; they are read and written.
struct PagedAttention {
  const float* query;  // [tokens, heads * head_dim], rows query_stride floats apart
  const float* key;    // [tokens, kv_heads * head_dim], rows key_stride floats apart
  const float* value;  // likewise, value_stride
  float* output;       // [tokens, heads * head_dim]
  void* key_cache;
  void* value_cache;
  float* key_scale;    // [blocks, block_size, kv_heads] of INT8 keys, read and written; else null
  float* value_scale;  // likewise
  CacheType key_type;
  CacheType value_type;
  const int32_t* cumulative;   // [seqs + 1]
  const int32_t* past;         // [seqs]
  const int32_t* block_table;  // [seqs, max_blocks]
  const int32_t* slots;        // [tokens]
  const float* cos;            // [positions, rotary_half]; null without rotation
  const float* sin;

  int64_t query_stride;  // larger than a row where query, key and value are packed side by side
  int64_t key_stride;
  int64_t value_stride;
  int64_t tokens;
  int64_t seqs;
  int64_t blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t positions;    // rows of cos and sin
  int64_t rotary_half;  // half of the rotated part of a head; 0: no rotation
  bool interleaved;     // pairs (2i, 2i + 1) instead of (i, i + rotary_half)
  int64_t window;       // 0: unlimited
  float scale;          // already resolved, never 0
  float softcap;        // 0: none
  bool bfloat16;        // prefill multiplies bfloat16 numbers; sums stay FP32
};

// Empty if every value in the index tensors lets the kernel stay inside its buffers; else what was found and
// what was expected. Shapes are the caller's to check.
std::string check(const PagedAttention& call);

// Writes keys and values, then attends. The call must have passed check(). Empty on success, else the reason
// (out of memory).
std::string run(const PagedAttention& call, Parallel& parallel);

}  // namespace kiln
