// Packing of prefill's tiles: keys transposed and values contiguous, in the elements that the products want. Settles
// paging and the caches' types once for all rows of a task.
#pragma once

#include "element.h"

namespace kiln::KILN_ISA {

constexpr int kTile = 128;  // positions per tile

// One KV head's part of a tile: positions [first, first + count) of a sequence.
struct Span {
  int64_t seq, kv_head, first, count;
};

// dst[elements of a head, kTile] = rows[0 .. count) transposed; the last vector is filled up with zeros.
template <typename F, typename Row>
static void pack_keys(const Row* rows, int64_t count, int64_t dim, typename F::Element* dst) {
  for (int64_t first = 0; first < count; first += kWidth)
    for (int64_t d = 0; d < dim; d += F::kPer * kWidth) {
      Vec block[kWidth];
      const int64_t left = dim - d;
      if (left >= F::kPer * kWidth && first + kWidth <= count) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) block[i] = F::take(rows[first + i] + d, F::kPer * kWidth);
      } else {
        for (int i = 0; i < kWidth; i++)
          block[i] = first + i < count ? F::take(rows[first + i] + d, left) : Vec{};
      }
      transpose(block);
      const int64_t elements = at_most((left + F::kPer - 1) / F::kPer, kWidth);
      for (int64_t i = 0; i < elements; i++) store(dst + (d / F::kPer + i) * kTile + first, block[i]);
    }
}

// dst[elements of `count` positions, padded] = rows[begin .. end), zero where a position lies outside or a head is
// padded. Returns whether all that was read is finite.
template <typename F, typename Row>
static bool pack_values(const Row* rows, int64_t begin, int64_t end, int64_t count, int64_t dim, int64_t padded,
                        typename F::Element* dst) {
  Vec zeros = {};  // 0 * x is NaN for what is not finite
  auto put = [&](int64_t d, Vec x, Vec y) __attribute__((always_inline)) {
    zeros += x * 0.0f;
    if constexpr (F::kPer == 1) {
      store(dst + d, F::convert(x));
    } else {
      zeros += y * 0.0f;
      store(dst + d, F::interleave(x, y));
    }
  };
  auto part = [&](int64_t i, int64_t d) __attribute__((always_inline)) {
    return i >= begin && i < end ? load_some(rows[i] + d, dim - d) : Vec{};
  };
  for (int64_t i = 0; i < count; i += F::kPer, dst += padded) {
    int64_t d = 0;
    if (i >= begin && i + F::kPer <= end)
      for (; d + kWidth <= dim; d += kWidth) put(d, load(rows[i] + d), load(rows[i + F::kPer - 1] + d));
    for (; d < padded; d += kWidth) put(d, part(i, d), part(i + F::kPer - 1, d));
  }
  return sum_of(zeros) == 0;
}

// rows[i] = the head of position i of the span in a cache of T.
template <typename T>
KILN_INLINE void find_heads(const PagedAttention& call, const Span& span, const void* cache, const float*,
                            const T** rows) {
  find_rows(call, span.seq, static_cast<const T*>(cache), call.kv_heads * call.head_dim, span.first, span.count, rows);
  for (int64_t i = 0; i < span.count; i++) rows[i] += span.kv_head * call.head_dim;
}

KILN_INLINE void find_heads(const PagedAttention& call, const Span& span, const void* cache, const float* scales,
                            ScaledRow* rows) {
  const Int8* heads[kTile];
  const float* scale_rows[kTile];
  find_heads(call, span, cache, nullptr, heads);
  find_rows(call, span.seq, scales, call.kv_heads, span.first, span.count, scale_rows);
  for (int64_t i = 0; i < span.count; i++) rows[i] = {heads[i], scale_rows[i][span.kv_head]};
}

template <typename F, typename Row>
static void pack_key_rows(const PagedAttention& call, const Span& span, typename F::Element* dst) {
  Row rows[kTile];
  find_heads(call, span, call.key_cache, call.key_scale, rows);
  pack_keys<F>(rows, span.count, call.head_dim, dst);
}

template <typename F>
static void pack_keys(const PagedAttention& call, const Span& span, typename F::Element* dst) {
  switch (call.key_type) {
    case CacheType::kFloat32:
      return pack_key_rows<F, const F32*>(call, span, dst);
    case CacheType::kFloat16:
      return pack_key_rows<F, const F16*>(call, span, dst);
    case CacheType::kBfloat16:
      return pack_key_rows<F, const Bf16*>(call, span, dst);
    case CacheType::kInt8:
      return pack_key_rows<F, ScaledRow>(call, span, dst);
  }
}

template <typename F, typename Row>
static bool pack_value_rows(const PagedAttention& call, const Span& span, Range seen, typename F::Element* dst) {
  Row rows[kTile];
  find_heads(call, span, call.value_cache, call.value_scale, rows);
  return pack_values<F>(rows, seen.begin - span.first, seen.end - span.first, span.count, call.head_dim,
                        padded_dim(call), dst);
}

// Values at positions outside `seen` are taken for zero. Returns whether all others are finite.
template <typename F>
static bool pack_values(const PagedAttention& call, const Span& span, Range seen, typename F::Element* dst) {
  switch (call.value_type) {
    case CacheType::kFloat32:
      return pack_value_rows<F, const F32*>(call, span, seen, dst);
    case CacheType::kFloat16:
      return pack_value_rows<F, const F16*>(call, span, seen, dst);
    case CacheType::kBfloat16:
      return pack_value_rows<F, const Bf16*>(call, span, seen, dst);
    case CacheType::kInt8:
      return pack_value_rows<F, ScaledRow>(call, span, seen, dst);
  }
  return true;
}

}  // namespace kiln::KILN_ISA
