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
template <typename F, typename T>
static void pack_keys(const T* const* rows, int64_t count, int64_t offset, int64_t dim, typename F::Element* dst) {
  for (int64_t first = 0; first < count; first += kWidth)
    for (int64_t d = 0; d < dim; d += F::kPer * kWidth) {
      Vec block[kWidth];
      const int64_t left = dim - d;
      if (left >= F::kPer * kWidth && first + kWidth <= count) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) block[i] = F::take(rows[first + i] + offset + d, F::kPer * kWidth);
      } else {
        for (int i = 0; i < kWidth; i++)
          block[i] = first + i < count ? F::take(rows[first + i] + offset + d, left) : Vec{};
      }
      transpose(block);
      const int64_t elements = at_most((left + F::kPer - 1) / F::kPer, kWidth);
      for (int64_t i = 0; i < elements; i++) store(dst + (d / F::kPer + i) * kTile + first, block[i]);
    }
}

// dst[elements of `count` positions, padded] = rows[begin .. end), zero where a position lies outside or a head is
// padded. Returns whether all that was read is finite.
template <typename F, typename T>
static bool pack_values(const T* const* rows, int64_t begin, int64_t end, int64_t count, int64_t offset, int64_t dim,
                        int64_t padded, typename F::Element* dst) {
  auto part = [&](int64_t i, int64_t d) __attribute__((always_inline)) {
    return i >= begin && i < end ? load_some(rows[i] + offset + d, dim - d) : Vec{};
  };
  Vec zeros = {};  // 0 * x is NaN for what is not finite
  for (int64_t i = 0; i < count; i += F::kPer, dst += padded)
    for (int64_t d = 0; d < padded; d += kWidth) {
      if constexpr (F::kPer == 1) {
        const Vec x = part(i, d);
        zeros += x * 0.0f;
        store(dst + d, F::convert(x));
      } else {
        const Vec x = part(i, d), y = part(i + 1, d);
        zeros += x * 0.0f + y * 0.0f;
        store(dst + d, F::interleave(x, y));
      }
    }
  return sum_of(zeros) == 0;
}

template <typename F, typename T>
static void pack_key_rows(const PagedAttention& call, const Span& span, typename F::Element* dst) {
  const T* rows[kTile];
  find_rows(call, span.seq, static_cast<const T*>(call.key_cache), span.first, span.count, rows);
  pack_keys<F>(rows, span.count, span.kv_head * call.head_dim, call.head_dim, dst);
}

template <typename F>
static void pack_keys(const PagedAttention& call, const Span& span, typename F::Element* dst) {
  switch (call.key_type) {
    case CacheType::kFloat32:
      return pack_key_rows<F, F32>(call, span, dst);
    case CacheType::kFloat16:
      return pack_key_rows<F, F16>(call, span, dst);
    case CacheType::kBfloat16:
      return pack_key_rows<F, Bf16>(call, span, dst);
  }
}

template <typename F, typename T>
static bool pack_value_rows(const PagedAttention& call, const Span& span, Range seen, typename F::Element* dst) {
  const T* rows[kTile];
  find_rows(call, span.seq, static_cast<const T*>(call.value_cache), span.first, span.count, rows);
  return pack_values<F>(rows, seen.begin - span.first, seen.end - span.first, span.count, span.kv_head * call.head_dim,
                        call.head_dim, padded_dim(call), dst);
}

// Values at positions outside `seen` are taken for zero.
template <typename F>
static bool pack_values(const PagedAttention& call, const Span& span, Range seen, typename F::Element* dst) {
  switch (call.value_type) {
    case CacheType::kFloat32:
      return pack_value_rows<F, F32>(call, span, seen, dst);
    case CacheType::kFloat16:
      return pack_value_rows<F, F16>(call, span, seen, dst);
    case CacheType::kBfloat16:
      return pack_value_rows<F, Bf16>(call, span, seen, dst);
  }
  return true;
}

}  // namespace kiln::KILN_ISA
