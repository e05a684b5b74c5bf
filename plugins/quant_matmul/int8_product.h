// Products of 8-bit activations with 8-bit or 4-bit weights, summed exactly group by group.
//
// A register block is a few rows by some panels. Many rows: the panels of a block stay in the second cache while all
// rows pass, each vector of weights serving kTileRows rows from a register. Few rows: one panel at a time for all rows
// together, so that the weights stream from memory once and in order.
#pragma once

#include "dot.h"
#include "target.h"

namespace kiln::KILN_ISA {

#if defined(__AVX512VNNI__)
constexpr int kTileRows = 6, kTilePanels = 4, kThinRows = 16;  // 24 sums of 32 registers; 16
#elif defined(__AVX512BW__)
constexpr int kTileRows = 4, kTilePanels = 4, kThinRows = 8;
#else
constexpr int kTileRows = 4, kTilePanels = 1, kThinRows = 4;
#endif
// Bytes that weights are fetched ahead of their use: for few rows, for more (5 to 10 % at 16 rows), and from the
// second cache.
constexpr int64_t kAhead = 1024, kAheadOfMore = 2560, kAheadInTile = 512;
constexpr int kFewRows = 4;

struct Int8Rows {
  const int8_t* q;
  int64_t stride;
  const float* scale;
  int64_t scale_stride;      // from row to row
  int64_t scale_group;       // from group to group: 0 where a row has one scale
  const int32_t* offsets;    // [rows, groups]: what the sums start from, as the weights' bytes are above their values
  int64_t offset_stride;
};

struct Depth {
  int64_t steps;        // in all
  int64_t group_steps;  // per group
  int64_t groups;
  int64_t panel_bytes;
};

// The product of kRows rows with kPanels panels. Descriptions come by value: the compiler knows then that no result is
// stored over them.
template <int kBits, int kRows, int kPanels>
static void multiply_block(const Int8Rows rows, const uint8_t* weights, const Depth depth, const Target target) {
  constexpr int kVecs = kPanels * kPanelVecs, kPerVector = 8 / kBits;
  constexpr int64_t ahead = kPanels > 1 ? kAheadInTile : kRows > kFewRows ? kAheadOfMore : kAhead;
#pragma GCC unroll 16  // the results' lines arrive while the sums are made: 10 % where they are not in the second cache
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; p++) __builtin_prefetch(target.y + r * target.stride + p * kPanel, 1);
  for (int64_t g = 0; g < depth.groups; g++) {
    IntVec sums[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++)
        sums[r][v] = Weights<kBits>::kOffset ? rows.offsets[r * rows.offset_stride + g] + IntVec{} : IntVec{};
    ByteVec stored[kVecs];
    auto load_weights = [&](int64_t s) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++) {
        const uint8_t* at = weights + s / kPerVector * kVectorBytes + v / kPanelVecs * depth.panel_bytes;
        if (v % kPanelVecs == 0) __builtin_prefetch(at + ahead);
        stored[v] = load_bytes(at + v % kPanelVecs * sizeof(ByteVec));
      }
    };
    auto add = [&](int64_t s, int odd) __attribute__((always_inline)) {
      Weights<kBits> ready[kVecs];
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++) ready[v].set(kBits == 4 ? nibbles(stored[v], odd) : stored[v]);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
        const ByteVec activations = broadcast_four(rows.q + r * rows.stride + s * kStep);
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; v++) sums[r][v] = ready[v].added_to(sums[r][v], activations);
      }
    };
    const int64_t first = g * depth.group_steps;
    for_steps<kBits>(first, at_most(depth.steps, first + depth.group_steps), load_weights, add);
    Vec results[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++)
        results[r][v] =
            __builtin_convertvector(sums[r][v], Vec) * rows.scale[r * rows.scale_stride + g * rows.scale_group];
    target.finish(results, g);
  }
}

typedef void (*MultiplyBlock)(Int8Rows, const uint8_t*, Depth, Target);

// multiply_block for 1 .. kRows rows.
template <int kBits, int kPanels, int kRows>
struct Blocks {
  MultiplyBlock of[kRows + 1];
  constexpr Blocks() : of() { fill<kRows>(); }
  template <int kCount>
  constexpr void fill() {
    of[kCount] = multiply_block<kBits, kCount, kPanels>;
    if constexpr (kCount > 1) fill<kCount - 1>();
  }
};

static Int8Rows rows_from(const Int8Rows& rows, int64_t r) {
  Int8Rows rest = rows;
  rest.q += r * rows.stride;
  rest.scale += r * rows.scale_stride;
  rest.offsets += r * rows.offset_stride;
  return rest;
}

template <int kBits, int kPanels, int kRows>
static void multiply_panels(const Int8MatMul& call, const Block& block, int64_t panel, const Int8Rows& rows,
                            const Depth& depth, const float* row_sums) {
  static constexpr Blocks<kBits, kPanels, kRows> blocks;
  const uint8_t* weights = call.weights.data + panel * depth.panel_bytes;
  for (int64_t r = 0; r < block.rows; r += kRows) {
    const int64_t count = at_most(block.rows - r, kRows);
    const RowSums sums = {row_sums + r * depth.groups, depth.groups};
    with_target(call.weights, call.y, block.row + r, count, panel, kPanels, 0, sums, [&](const Target& target) {
      blocks.of[count](rows_from(rows, r), weights, depth, target);
    });
  }
}

KILN_INLINE int32_t sum_of(IntVec v) {
#if defined(__AVX512F__)
  typedef int32_t HalfIntVec __attribute__((vector_size(kWidth * 2)));
  const HalfIntVec half = (HalfIntVec)_mm512_maskz_extracti32x8_epi32(0xff, (__m512i)v, 0) +
                          (HalfIntVec)_mm512_maskz_extracti32x8_epi32(0xff, (__m512i)v, 1);
  constexpr int lanes = kWidth / 2;
#else
  const IntVec half = v;
  constexpr int lanes = kWidth;
#endif
  int32_t sum = 0;
#pragma GCC unroll 8
  for (int lane = 0; lane < lanes; lane++) sum += half[lane];
  return sum;
}

// The sum of n bytes.
static int32_t sum_of_bytes(const int8_t* q, int64_t n) {
  IntVec sums = {};
  int64_t i = 0;
  constexpr int64_t kBytes = sizeof(ByteVec);
  for (; i + kBytes <= n; i += kBytes) sums = add_unsigned(sums, ByteVec{} + 1, load_bytes(q + i));
  int32_t sum = sum_of(sums);
  for (; i < n; i++) sum += q[i];
  return sum;
}

// The scratch area has the rows' offsets, their sums where weights have zeros, then the rows themselves where whole steps
// would read beyond them.
static int64_t product_groups(const Int8MatMul& call) {
  return groups_of(call.weights.depth, call.group_size ? call.group_size : call.weights.group_size);
}

static size_t int8_scratch(const Int8MatMul& call, int64_t rows) {
  const int64_t padded = pieces_of(call.weights.depth, kStep) * kStep;
  return static_cast<size_t>(rows * (product_groups(call) * 8 + (padded == call.weights.depth ? 0 : padded)));
}

template <int kBits>
static void int8_product(const Int8MatMul& call, const Block& block, char* scratch) {
  const int64_t k = call.weights.depth, groups = product_groups(call), steps = pieces_of(k, kStep);
  const int64_t group_size = call.group_size ? call.group_size : call.weights.group_size;
  const Depth depth = {steps, group_size ? group_size / kStep : steps, groups, panel_bytes_of(call.weights)};
  int32_t* offsets = reinterpret_cast<int32_t*>(scratch);
  float* row_sums = reinterpret_cast<float*>(offsets + block.rows * groups);
  int8_t* padded = reinterpret_cast<int8_t*>(row_sums + block.rows * groups);
  const int64_t scales = groups_of(k, call.group_size);
  Int8Rows rows = {call.q + block.row * k, k, call.scale + block.row * scales, scales, scales > 1, offsets, groups};
  if (Weights<kBits>::kOffset || call.weights.zero)
    for (int64_t r = 0; r < block.rows; r++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = g * depth.group_steps * kStep, n = at_most(depth.group_steps * kStep, k - begin);
        const int32_t sum = sum_of_bytes(rows.q + r * k + begin, n);
        offsets[r * groups + g] = -Weights<kBits>::kOffset * sum;
        row_sums[r * groups + g] =
            static_cast<float>(sum) * rows.scale[r * rows.scale_stride + g * rows.scale_group];
      }
  if (k % kStep) {
    const int64_t stride = steps * kStep;
    for (int64_t r = 0; r < block.rows; r++) {
      __builtin_memcpy(padded + r * stride, rows.q + r * k, static_cast<size_t>(k));
      __builtin_memset(padded + r * stride + k, 0, static_cast<size_t>(stride - k));
    }
    rows.q = padded;
    rows.stride = stride;
  }
  int64_t panel = block.panel;
  const int64_t end = block.panel + block.panels;
  if (block.rows > kThinRows)
    for (; panel + kTilePanels <= end; panel += kTilePanels)
      multiply_panels<kBits, kTilePanels, kTileRows>(call, block, panel, rows, depth, row_sums);
  for (; panel < end; panel++) multiply_panels<kBits, 1, kThinRows>(call, block, panel, rows, depth, row_sums);
}

static void int8_matmul(const Int8MatMul& call, const Block& block, char* scratch) {
  if (call.weights.bits == 8)
    int8_product<8>(call, block, scratch);
  else
    int8_product<4>(call, block, scratch);
}

}  // namespace kiln::KILN_ISA
