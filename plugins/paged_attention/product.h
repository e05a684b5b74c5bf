// Products of prefill: a few rows against a packed tile, in register blocks. Knows formats (element.h), not attention.
#pragma once

#include "element.h"

namespace kiln::KILN_ISA {

constexpr int kBlockRows = 6;                     // rows per register block
constexpr int kBlockVecs = kWidth == 16 ? 4 : 2;  // vectors per register block: 24 accumulators of 32, or 12 of 16

// c[kRows, kVecs vectors] = (kAdd ? c : 0) + a[kRows, depth] . b[depth, kVecs vectors], depth in elements of F.
template <typename F, int kRows, int kVecs, bool kAdd, typename E = typename F::Element>
KILN_INLINE void multiply_block(const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc,
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
      const Vec x = F::broadcast_element(a + r * lda + k);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v++) sums[r][v] = F::multiply_add(x, row[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) store(c + r * ldc + v * kWidth, sums[r][v]);
}

template <typename F, int kRows, bool kAdd, typename E = typename F::Element>
static void multiply_rows(const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                          int64_t vecs) {
  int64_t v = 0;
  for (; v + kBlockVecs <= vecs; v += kBlockVecs)
    multiply_block<F, kRows, kBlockVecs, kAdd>(a, lda, b + v * kWidth, ldb, c + v * kWidth, ldc, depth);
  if (kBlockVecs > 2 && v + 2 <= vecs) {
    multiply_block<F, kRows, 2, kAdd>(a, lda, b + v * kWidth, ldb, c + v * kWidth, ldc, depth);
    v += 2;
  }
  if (v < vecs) multiply_block<F, kRows, 1, kAdd>(a, lda, b + v * kWidth, ldb, c + v * kWidth, ldc, depth);
}

// The same for up to kBlockRows rows and any number of vectors.
template <typename F, bool kAdd, typename E = typename F::Element>
static void multiply(int64_t rows, const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc,
                     int64_t depth, int64_t vecs) {
  switch (rows) {
    case 6:
      return multiply_rows<F, 6, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 5:
      return multiply_rows<F, 5, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 4:
      return multiply_rows<F, 4, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 3:
      return multiply_rows<F, 3, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 2:
      return multiply_rows<F, 2, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
    case 1:
      return multiply_rows<F, 1, kAdd>(a, lda, b, ldb, c, ldc, depth, vecs);
  }
}

}  // namespace kiln::KILN_ISA
