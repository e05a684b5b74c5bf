// Phase 1: rotates the new keys and writes keys and values to their slots.
#pragma once

#include "rows.h"

namespace kiln::KILN_ISA {

template <typename T>
static void store_head(void* cache, int64_t slot_head, int64_t n, const float* src) {
  T* dst = static_cast<T*>(cache) + slot_head * n;
  for (int64_t i = 0; i < n; i++) put(dst + i, src[i]);
}

// Head number slot_head (slot * kv_heads + head) of a cache = src, n numbers.
static void store_head(CacheType type, void* cache, float* scales, int64_t slot_head, int64_t n, const float* src) {
  switch (type) {
    case CacheType::kFloat32:
      return store_head<F32>(cache, slot_head, n, src);
    case CacheType::kFloat16:
      return store_head<F16>(cache, slot_head, n, src);
    case CacheType::kBfloat16:
      return store_head<Bf16>(cache, slot_head, n, src);
    case CacheType::kInt8:
      scales[slot_head] = quantize_row(src, n, static_cast<Int8*>(cache) + slot_head * n);
  }
}

static size_t write_scratch(const PagedAttention& call) { return static_cast<size_t>(call.head_dim); }

static void write(const PagedAttention& call, int64_t seq, int64_t first, int64_t count, float* scratch) {
  const int64_t dim = call.head_dim;
  for (int64_t token = first; token < first + count; token++) {
    const int64_t packed = call.cumulative[seq] + token;
    const int64_t slot = call.slots[packed];
    if (slot < 0) continue;
    const float* key = call.key + packed * call.key_stride;
    const float* value = call.value + packed * call.value_stride;
    for (int64_t head = 0; head < call.kv_heads; head++) {
      rotate(call, call.past[seq] + token, key + head * dim, scratch);
      store_head(call.key_type, call.key_cache, call.key_scale, slot * call.kv_heads + head, dim, scratch);
      store_head(call.value_type, call.value_cache, call.value_scale, slot * call.kv_heads + head, dim,
                 value + head * dim);
    }
  }
}

}  // namespace kiln::KILN_ISA
