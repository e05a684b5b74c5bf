// Paged attention on the CPU: one call's operands, the checks, and the entry point.
//
// Semantics are in schema.py. Knows nothing of ONNX Runtime: threads come in as a function, operands as
// pointers. Nothing here owns memory of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../parallel.h"
#include "geometry.h"

namespace kiln {

enum class CacheType { kFloat32, kFloat16, kBfloat16, kInt8 };

inline size_t cache_itemsize(CacheType type) {
  return type == CacheType::kFloat32 ? 4 : type == CacheType::kInt8 ? 1 : 2;
}

// One call. Caches are [blocks, block_size, kv_heads, head_dim]; they are read and written.
struct PagedAttention : Geometry {
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
  bool bfloat16;        // prefill multiplies bfloat16 numbers; sums stay FP32
};

// Empty if every value in the index tensors lets the kernel stay inside its buffers; else what was found and
// what was expected. Shapes are the caller's to check.
std::string check(const PagedAttention& call);

// Writes keys and values, then attends. The call must have passed check(). Empty on success, else the reason
// (out of memory).
std::string run(const PagedAttention& call, Parallel& parallel);

}  // namespace kiln
