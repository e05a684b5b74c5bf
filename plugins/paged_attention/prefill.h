// Attention of many new tokens: query tiles against key tiles, bound by arithmetic.
//
// A task is one KV head and a run of new tokens; its rows are (token, head of the group), token-major, so every
// packed key serves the whole group. For each tile of kTile positions, keys are packed transposed and values
// contiguous as FP32 (which settles paging and 16-bit caches once), then for every few rows: products with the keys,
// online softmax, products with the values, all while the scores sit in L1. No score matrix exists in memory.
//
// In tiles that causality or the window cuts, every token multiplies only its own range of values: whatever stands in
// other slots, NaN included, cannot leak.
#pragma once

#include "rows.h"

namespace kiln::KILN_ISA {

constexpr int kTile = 128;                        // positions per key tile
constexpr int kBlockRows = 6;                     // rows per register block
constexpr int kBlockVecs = kWidth == 16 ? 4 : 2;  // vectors per register block: 24 accumulators of 32, or 12 of 16

// c[kRows, kVecs vectors] = (kAdd ? c : 0) + a[kRows, depth] . b[depth, kVecs vectors].
template <int kRows, int kVecs, bool kAdd>
KILN_INLINE void multiply_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                                int64_t depth) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) sums[r][v] = kAdd ? load(c + r * ldc + v * kWidth) : Vec{};
  for (int64_t k = 0; k < depth; k++, b += ldb) {
    Vec row[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) row[v] = load(b + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Vec x = broadcast(a[r * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v++) sums[r][v] += x * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) store(c + r * ldc + v * kWidth, sums[r][v]);
}

template <int kRows, bool kAdd>
static void multiply_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                          int64_t depth, int64_t vecs) {
  int64_t v = 0;
  for (; v + kBlockVecs <= vecs; v += kBlockVecs)
    multiply_block<kRows, kBlockVecs, kAdd>(a, lda, b + v * kWidth, ldb, c + v * kWidth, ldc, depth);
  if (kBlockVecs > 2 && v + 2 <= vecs) {
    multiply_block<kRows, 2, kAdd>(a, lda, b + v * kWidth, ldb, c + v * kWidth, ldc, depth);
    v += 2;
  }
  if (v < vecs) multiply_block<kRows, 1, kAdd>(a, lda, b + v * kWidth, ldb, c + v * kWidth, ldc, depth);
}

template <bool kAdd>
static void multiply(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                     int64_t depth, int64_t vecs) {
  for (; rows >= 6; rows -= 6, a += 6 * lda, c += 6 * ldc) multiply_rows<6, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
  switch (rows) {
    case 5:
      return multiply_rows<5, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 4:
      return multiply_rows<4, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 3:
      return multiply_rows<3, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 2:
      return multiply_rows<2, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 1:
      return multiply_rows<1, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
  }
}

struct PrefillState {
  float *q, *acc, *maximum, *sum;  // [rows, padded], [rows, padded], [rows], [rows]
  float *keys, *values, *scores;   // [dim, kTile], [kTile, padded], [kBlockRows, kTile]
};

static PrefillState prefill_parts(const PagedAttention& call, int64_t count, float* scratch, size_t* total) {
  const int64_t rows = call.heads / call.kv_heads * count, padded = padded_dim(call);
  PrefillState state;
  float* p = scratch;
  state.q = p, p += round_up(rows * padded, kAlign);
  state.acc = p, p += round_up(rows * padded, kAlign);
  state.keys = p, p += call.head_dim * kTile;
  state.values = p, p += round_up(kTile * padded, kAlign);
  state.scores = p, p += kBlockRows * kTile;
  state.maximum = p, p += round_up(rows, kAlign);
  state.sum = p, p += round_up(rows, kAlign);
  *total = static_cast<size_t>(p - scratch);
  return state;
}

static size_t prefill_scratch(const PagedAttention& call, int64_t max_count) {
  size_t total;
  prefill_parts(call, max_count, nullptr, &total);
  return total;
}

// dst[dim, kTile] = rows[0 .. count) transposed; the last vector is filled up with zeros.
template <typename T>
static void pack_keys(const T* const* rows, int64_t count, int64_t offset, int64_t dim, float* dst) {
  for (int64_t first = 0; first < count; first += kWidth)
    for (int64_t d = 0; d < dim; d += kWidth) {
      Vec block[kWidth];
      const int64_t left = at_most(dim - d, kWidth);
      if (left == kWidth && first + kWidth <= count) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) block[i] = load(rows[first + i] + offset + d);
      } else {
        for (int i = 0; i < kWidth; i++) {
          if (first + i >= count)
            block[i] = Vec{};
          else if (left == kWidth)
            block[i] = load(rows[first + i] + offset + d);
          else
            block[i] = load_part(rows[first + i] + offset + d, static_cast<int>(left));
        }
      }
      transpose(block);
      for (int64_t i = 0; i < left; i++) store(dst + (d + i) * kTile + first, block[i]);
    }
}

// dst[count, padded] = rows[0 .. count), padded with zeros.
template <typename T>
static void pack_values(const T* const* rows, int64_t count, int64_t offset, int64_t dim, int64_t padded, float* dst) {
  for (int64_t i = 0; i < count; i++, dst += padded) {
    const T* row = rows[i] + offset;
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) store(dst + d, load(row + d));
    if (d < dim) store(dst + d, load_part(row + d, static_cast<int>(dim - d)));
  }
}

template <typename T>
static void pack_tile(const PagedAttention& call, const Task& task, const void* cache, int64_t first, int64_t count,
                      bool keys, float* dst) {
  const T* rows[kTile];
  find_rows(call, task.seq, static_cast<const T*>(cache), first, count, rows);
  const int64_t offset = task.kv_head * call.head_dim;
  if (keys)
    pack_keys(rows, count, offset, call.head_dim, dst);
  else
    pack_values(rows, count, offset, call.head_dim, padded_dim(call), dst);
}

static void pack_tile(CacheType type, const PagedAttention& call, const Task& task, const void* cache, int64_t first,
                      int64_t count, bool keys, float* dst) {
  switch (type) {
    case CacheType::kFloat32:
      return pack_tile<F32>(call, task, cache, first, count, keys, dst);
    case CacheType::kFloat16:
      return pack_tile<F16>(call, task, cache, first, count, keys, dst);
    case CacheType::kBfloat16:
      return pack_tile<Bf16>(call, task, cache, first, count, keys, dst);
  }
}

// Softmax weights in place of one row's scores; the running maximum and sum, and the accumulator, follow.
KILN_INLINE void weigh_tile_row(float* scores, int64_t vecs, float* maximum, float* sum, float* acc, int64_t padded) {
  Vec top = load(scores);
  for (int64_t v = 1; v < vecs; v++) top = larger(load(scores + v * kWidth), top);
  const float highest = max_of(top);
  if (highest > *maximum) {
    const Vec shrink = exp2(broadcast(*maximum - highest));
    *maximum = highest;
    *sum *= shrink[0];
    for (int64_t d = 0; d < padded; d += kWidth) store(acc + d, load(acc + d) * shrink);
  }
  const Vec offset = broadcast(*maximum);
  Vec total = {};
  for (int64_t v = 0; v < vecs; v++) {
    const Vec weight = exp2(load(scores + v * kWidth) - offset);
    total += weight;
    store(scores + v * kWidth, weight);
  }
  *sum += sum_of(total);
}

// Rows [row, row + rows) of the task, rows <= kBlockRows, against the packed tile of positions [first, first + count).
static void attend_block(const PagedAttention& call, const Task& task, const PrefillState& state, int64_t row,
                         int64_t rows, int64_t first, int64_t count) {
  const int64_t group = call.heads / call.kv_heads, dim = call.head_dim, padded = padded_dim(call);
  const int64_t position = call.past[task.seq] + task.token;
  const Range top = visible(call, position + row / group), bottom = visible(call, position + (row + rows - 1) / group);
  if (bottom.end <= first || top.begin >= first + count) return;
  // The first row has the earliest end, the last row the latest begin.
  const bool whole = bottom.begin <= first && top.end >= first + count && count % kWidth == 0;
  const int64_t used = at_most(bottom.end - first, count), vecs = (used + kWidth - 1) / kWidth;

  multiply<false>(rows, state.q + row * padded, padded, state.keys, kTile, state.scores, kTile, dim, vecs);
  for (int64_t r = 0; r < rows; r++) {
    float* scores = state.scores + r * kTile;
    if (call.softcap > 0)
      for (int64_t v = 0; v < vecs; v++) store(scores + v * kWidth, cap(load(scores + v * kWidth), call.softcap));
    if (!whole) {
      const Range range = visible(call, position + (row + r) / group);
      const Range valid = {range.begin, at_most(range.end, first + count)};
      for (int64_t v = 0; v < vecs; v++)
        store(scores + v * kWidth, mask(load(scores + v * kWidth), first + v * kWidth, valid));
    }
    weigh_tile_row(scores, vecs, state.maximum + row + r, state.sum + row + r, state.acc + (row + r) * padded, padded);
  }
  if (whole) {
    multiply<true>(rows, state.scores, kTile, state.values, padded, state.acc + row * padded, padded, count,
                   padded / kWidth);
    return;
  }
  for (int64_t r = 0; r < rows;) {
    const int64_t token = (row + r) / group;
    const int64_t same = at_most(rows - r, (token + 1) * group - (row + r));  // rows of this token
    const Range range = visible(call, position + token);
    const int64_t begin = at_least(range.begin - first, 0), end = at_most(range.end - first, count);
    if (begin < end)
      multiply<true>(same, state.scores + r * kTile + begin, kTile, state.values + begin * padded, padded,
                     state.acc + (row + r) * padded, padded, end - begin, padded / kWidth);
    r += same;
  }
}

static void prefill(const PagedAttention& call, const Task& task, float* scratch) {
  const int64_t group = call.heads / call.kv_heads, dim = call.head_dim, padded = padded_dim(call);
  const int64_t rows = group * task.count, position = call.past[task.seq] + task.token;
  size_t unused;
  const PrefillState state = prefill_parts(call, task.count, scratch, &unused);
  for (int64_t r = 0; r < rows; r++) {
    take_query(call, task.seq, task.token + r / group, task.kv_head * group + r % group, state.q + r * padded);
    state.maximum[r] = kNoMaximum;
    state.sum[r] = 0;
  }
  __builtin_memset(state.acc, 0, sizeof(float) * rows * padded);

  const int64_t end = position + task.count;
  for (int64_t first = visible(call, position).begin; first < end; first += kTile) {
    const int64_t count = at_most(kTile, end - first);
    pack_tile(call.key_type, call, task, call.key_cache, first, count, true, state.keys);
    pack_tile(call.value_type, call, task, call.value_cache, first, count, false, state.values);
    for (int64_t row = 0; row < rows; row += kBlockRows)
      attend_block(call, task, state, row, at_most(kBlockRows, rows - row), first, count);
  }

  for (int64_t r = 0; r < rows; r++) {
    const int64_t packed = call.cumulative[task.seq] + task.token + r / group;
    float* out = call.output + (packed * call.heads + task.kv_head * group + r % group) * dim;
    const float* acc = state.acc + r * padded;
    for (int64_t d = 0; d < dim; d++) out[d] = acc[d] / state.sum[r];
  }
}

}  // namespace kiln::KILN_ISA
