// Phase 1: rotates the new keys and writes keys and values to their slots.
#pragma once

#include "rows.h"

namespace kiln::KILN_ISA {

template <typename T>
static void store_row(void* cache, int64_t slot, int64_t row_size, int64_t offset, const float* src, int64_t n) {
  T* dst = static_cast<T*>(cache) + slot * row_size + offset;
  for (int64_t i = 0; i < n; i++) put(dst + i, src[i]);
}

static void store_row(CacheType type, void* cache, int64_t slot, int64_t row_size, int64_t offset, const float* src,
                      int64_t n) {
  switch (type) {
    case CacheType::kFloat32:
      return store_row<F32>(cache, slot, row_size, offset, src, n);
    case CacheType::kFloat16:
      return store_row<F16>(cache, slot, row_size, offset, src, n);
    case CacheType::kBfloat16:
      return store_row<Bf16>(cache, slot, row_size, offset, src, n);
  }
}

static size_t write_scratch(const PagedAttention& call) { return static_cast<size_t>(call.head_dim); }

static void write(const PagedAttention& call, int64_t seq, int64_t first, int64_t count, float* scratch) {
  const int64_t row_size = call.kv_heads * call.head_dim;
  for (int64_t token = first; token < first + count; token++) {
    const int64_t packed = call.cumulative[seq] + token;
    const int64_t slot = call.slots[packed];
    if (slot < 0) continue;
    for (int64_t head = 0; head < call.kv_heads; head++) {
      const int64_t offset = head * call.head_dim;
      rotate(call, call.past[seq] + token, call.key + packed * call.key_stride + offset, scratch);
      store_row(call.key_type, call.key_cache, slot, row_size, offset, scratch, call.head_dim);
    }
    store_row(call.value_type, call.value_cache, slot, row_size, 0, call.value + packed * call.value_stride, row_size);
  }
}

}  // namespace kiln::KILN_ISA
