// Caches of 8-bit integers on the device: how rows become operands of 16-bit tensor products, and how they are made.
// Integers up to 127 are exact in both 16-bit types, so the products are of the integers and scales are applied to
// sums or weights, in float32. Knows no kernel.
//
// A product's inner dimension may be in any order that both operands share. Words of four neighbouring bytes stand for
// the inner indices 2c, 2c + 1, 2c + 8, 2c + 9 that thread c of a row has in the fragments of mma.sync, so queries are
// kept in that order (`store_query`), and keys need one load of 32 bits for two registers.
#pragma once

#include "../cuda_bytes.cuh"
#include "cuda_device.cuh"

namespace kiln::cuda {

__device__ __forceinline__ float load_float(uint32_t address) { return __uint_as_float(load_word(address)); }

// Four neighbouring columns of 16 rows, as this thread has them where rows are the product's inner dimension: for
// column i the pair of rows 2c, 2c + 1 and the pair 8 further on. `address`: of the columns in row 0; c is lane % 4.
template <typename T>
__device__ __forceinline__ void expand_columns(uint32_t address, int row_bytes, int lane, uint32_t (&first)[4],
                                               uint32_t (&second)[4]) {
  const uint32_t at = address + lane % 4 * 2 * row_bytes;
  const uint32_t a = load_word(at), b = load_word(at + row_bytes);
  const uint32_t c = load_word(at + 8 * row_bytes), d = load_word(at + 9 * row_bytes);
  expand<T>(__byte_perm(a, b, 0x5140), first[0], first[1]);
  expand<T>(__byte_perm(a, b, 0x7362), first[2], first[3]);
  expand<T>(__byte_perm(c, d, 0x5140), second[0], second[1]);
  expand<T>(__byte_perm(c, d, 0x7362), second[2], second[3]);
}

// Stores vector number `vector` of a query's row (8 elements), in the order of the note above.
__device__ __forceinline__ void store_query(uint32_t row, int vector, uint4 x) {
  const uint32_t to = row + vector / 2 * 32 + vector % 2 * 8;
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.z) : "memory");
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + 16), "r"(x.y), "r"(x.w) : "memory");
}

// The same in another order, for keys that are loaded 16 bytes at a time: word i of chunk 4 j + c is what thread c has
// of the product 4 j + i.
__device__ __forceinline__ void store_wide_query(uint32_t row, int vector, uint4 x) {
  const int chunk = vector / 2, product = chunk / 4 * 4 + vector % 2 * 2;
  const uint32_t to = row + product * 32 + chunk % 4 * 4;
  const uint32_t words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + i * 16), "r"(words[i]) : "memory");
}

__device__ __forceinline__ void load_words(uint32_t (&words)[4], uint32_t address) {
  const uint4 x = load_shared(address);
  words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

// Copies 4 bytes, or zero.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}

// A weight times the scale of its value; one that is hidden stays 0, whatever the scale.
__device__ __forceinline__ float scaled_weight(float weight, float scale) { return weight == 0 ? 0 : weight * scale; }

// Softmax weights times scales have the range of float32, so they are multiplied as bfloat16 numbers and what rounding
// to those left over.
struct SplitPair {
  uint32_t high, low;
  __device__ __forceinline__ SplitPair() {}
  __device__ __forceinline__ SplitPair(float x, float y) {
    using Wide = Numbers<__nv_bfloat16>;
    high = Wide::pack(x, y);
    const float2 rounded = Wide::unpack(high);
    low = Wide::pack(x - rounded.x, y - rounded.y);
  }
};

}  // namespace kiln::cuda
