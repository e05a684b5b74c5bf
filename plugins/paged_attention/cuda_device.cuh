// Device code that all paged-attention kernels share: instructions, the two element types, rotation, and what a
// sequence of a call consists of. Knows no kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../cuda_launch.cuh"
#include "cuda_attention.h"

namespace kiln::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_huge_valf();
constexpr unsigned kAll = 0xffffffffu;

template <typename T>
struct Numbers;

template <>
struct Numbers<__nv_bfloat16> {
  // 2^-9 of rounding in each softmax weight is too much beside the output's own: decode multiplies with what rounding
  // left over, too.
  static constexpr bool kSplitWeights = true;
  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
  static __device__ __forceinline__ __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); }
  // d[16, 8] += a[16, 16] b[16, 8], in the fragment layouts of mma.sync.
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Numbers<__half> {
  static constexpr bool kSplitWeights = false;
  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
  static __device__ __forceinline__ __half from(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Copies 16 bytes, of which all beyond the first `bytes` become zero. The hint that fetches 128 bytes into L2 was
// measured: without it 64 sequences of 4096 take 317 us on an H200 instead of 265.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Scores as powers of two: scale * log2(e) * score, or softcap * log2(e) * tanh(scale * score / softcap). tanh of
// 2^-11 relative error (tanh.approx) would be too coarse: softcap multiplies it.
struct Scores {
  float factor, cap;
  __device__ __forceinline__ explicit Scores(const PagedAttention& call) {
    cap = call.softcap * kLog2E;
    factor = call.softcap > 0 ? 2 * kLog2E * call.scale / call.softcap : call.scale * kLog2E;
  }
  __device__ __forceinline__ bool capped() const { return cap > 0; }
  __device__ __forceinline__ float operator()(float score) const {
    return cap > 0 ? cap * (1 - __fdividef(2.0f, 1 + exp2_fast(score * factor))) : score * factor;
  }
};

// What the index tensors say of one sequence, as it was loaded.
struct Lengths {
  int first, next, past;
  __device__ __forceinline__ Lengths() {}
  __device__ __forceinline__ Lengths(const PagedAttention& call, int seq)
      : first(call.cumulative[seq]), next(call.cumulative[seq + 1]), past(call.past[seq]) {}
};

// New tokens and context of one sequence, clamped to the buffers.
struct Sequence {
  int first, count, past, end;  // packed index of the first new token, new tokens, cached ones, past + count
  __device__ __forceinline__ Sequence() {}
  __device__ __forceinline__ Sequence(const PagedAttention& call, int seq) : Sequence(call, Lengths(call, seq)) {}
  __device__ __forceinline__ Sequence(const PagedAttention& call, const Lengths& lengths) {
    first = min(max(lengths.first, 0), call.tokens);
    count = min(max(lengths.next, first), call.tokens) - first;
    past = min(max(lengths.past, 0), max(call.max_blocks * call.block_size - count, 0));
    end = min(past + count, call.max_blocks * call.block_size);
  }
  // First position that any new token from `token` on sees, at the start of 16 positions.
  __device__ __forceinline__ int begin(const PagedAttention& call, int token) const {
    return call.window > 0 ? max(past + token + 1 - call.window, 0) & ~15 : 0;
  }
};

// Neighbours dim, dim + 1 (dim even) of a head after rotation at a position, in float32.
template <typename T>
__device__ __forceinline__ float2 rotated(const PagedAttention& call, const T* head, int dim, int position) {
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(head);
  const float2 x = Numbers<T>::unpack(__ldg(pairs + dim / 2));
  const int half = call.rotary_half;
  if (dim >= 2 * half) return x;
  const size_t row = static_cast<size_t>(min(position, call.positions - 1)) * half;
  if (call.interleaved) {
    const float c = __ldg(call.cos + row + dim / 2), s = __ldg(call.sin + row + dim / 2);
    return {x.x * c - x.y * s, x.y * c + x.x * s};
  }
  const bool upper = dim >= half;
  const int at = upper ? dim - half : dim;
  const float2 y = Numbers<T>::unpack(__ldg(pairs + (upper ? dim - half : dim + half) / 2));
  const float2 c = __ldg(reinterpret_cast<const float2*>(call.cos + row + at));
  const float2 s = __ldg(reinterpret_cast<const float2*>(call.sin + row + at));
  return upper ? float2{x.x * c.x + y.x * s.x, x.y * c.y + y.y * s.y}
               : float2{x.x * c.x - y.x * s.x, x.y * c.y - y.y * s.y};
}

// The same, rounded to the element type.
template <typename T>
__device__ __forceinline__ uint32_t rotated_pair(const PagedAttention& call, const T* head, int dim, int position) {
  if (call.rotary_half == 0) return __ldg(reinterpret_cast<const uint32_t*>(head) + dim / 2);
  const float2 x = rotated(call, head, dim, position);
  return Numbers<T>::pack(x.x, x.y);
}

// Eight of them (dim a multiple of 8) before they are turned, so that other things can be done while loads are on their
// way. Loads are wide where the halves allow it; else this holds what is turned already.
template <typename T>
struct Unrotated {
  uint4 x, y;  // y: what x is turned with
  float4 c[2], s[2];
  float sign;  // of y's share; 0: x is not to be turned

  __device__ __forceinline__ Unrotated() {}
  __device__ __forceinline__ Unrotated(const PagedAttention& call, const T* head, int dim, int position) {
    const int half = call.rotary_half;
    const bool plain = dim >= 2 * half;
    sign = 0;
    if (!plain && (call.interleaved || half % 8 != 0)) {
      x = {rotated_pair(call, head, dim, position), rotated_pair(call, head, dim + 2, position),
           rotated_pair(call, head, dim + 4, position), rotated_pair(call, head, dim + 6, position)};
      return;
    }
    x = __ldg(reinterpret_cast<const uint4*>(head + dim));
    if (plain) return;
    const bool upper = dim >= half;
    const int at = upper ? dim - half : dim;
    y = __ldg(reinterpret_cast<const uint4*>(head + (upper ? dim - half : dim + half)));
    load_turn(call, at, position);
    sign = upper ? 1.0f : -1.0f;
  }
  // What a vector at `dim` of the first half, or its counterpart in the second, is turned by.
  __device__ __forceinline__ void load_turn(const PagedAttention& call, int dim, int position) {
    const size_t at = static_cast<size_t>(min(position, call.positions - 1)) * call.rotary_half + dim;
    const float4* cos = reinterpret_cast<const float4*>(call.cos + at);
    const float4* sin = reinterpret_cast<const float4*>(call.sin + at);
    c[0] = __ldg(cos), c[1] = __ldg(cos + 1);
    s[0] = __ldg(sin), s[1] = __ldg(sin + 1);
  }
  __device__ __forceinline__ uint4 rotated() const {
    if (sign == 0) return x;
    return {turned(x.x, y.x, c[0].x, c[0].y, s[0].x, s[0].y), turned(x.y, y.y, c[0].z, c[0].w, s[0].z, s[0].w),
            turned(x.z, y.z, c[1].x, c[1].y, s[1].x, s[1].y), turned(x.w, y.w, c[1].z, c[1].w, s[1].z, s[1].w)};
  }
  // Of a first half that is to be turned, what stands in its place in the second.
  __device__ __forceinline__ uint4 other() const {
    Unrotated swapped = *this;
    swapped.x = y, swapped.y = x, swapped.sign = -sign;
    return swapped.rotated();
  }

 private:
  __device__ __forceinline__ uint32_t turned(uint32_t own, uint32_t other, float c0, float c1, float s0,
                                             float s1) const {
    const float2 a = Numbers<T>::unpack(own), b = Numbers<T>::unpack(other);
    return Numbers<T>::pack(a.x * c0 + sign * (b.x * s0), a.y * c1 + sign * (b.y * s1));
  }
};

template <typename T>
__device__ __forceinline__ uint4 rotated_vector(const PagedAttention& call, const T* head, int dim, int position) {
  return Unrotated<T>(call, head, dim, position).rotated();
}

// The block table's entry for a position, and the block that it stands for.
__device__ __forceinline__ int block_entry(const PagedAttention& call, int seq, int position) {
  const int at = min(position / call.block_size, call.max_blocks - 1);
  return __ldg(call.block_table + static_cast<size_t>(seq) * call.max_blocks + at);
}
__device__ __forceinline__ int block_of(const PagedAttention& call, int entry) {
  return min(max(entry, 0), call.blocks - 1);
}
__device__ __forceinline__ int block_of(const PagedAttention& call, int seq, int position) {
  return block_of(call, block_entry(call, seq, position));
}

// A tile of query rows of a sequence on the prefill path. Row r is new token r / group, query head
// kv_head * group + r % group: the heads that share keys share a tile.
struct Tile {
  int seq, row;  // row: first one; seq is -1 where there is no such tile
  Sequence of;
};

// The tile number `index` counted from the last one of the last sequence: later ones have more to read, so they start
// first. Called by whole warps.
__device__ __forceinline__ Tile tile_from_end(const PagedAttention& call, int rows_per_tile, int index) {
  const int lane = threadIdx.x % 32, group = call.heads / call.kv_heads;
  for (int from = call.seqs - 1; from >= 0; from -= 32) {
    const int seq = from - lane;
    int tiles = 0;
    if (seq >= 0) {
      const int rows = Sequence(call, seq).count * group;
      tiles = rows > call.decode_rows ? (rows + rows_per_tile - 1) / rows_per_tile : 0;
    }
    int sum = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(kAll, sum, d);
      if (lane >= d) sum += below;
    }
    const unsigned found = __ballot_sync(kAll, sum > index);
    if (found) {
      const int who = __ffs(found) - 1, found_seq = from - who;
      const int rest = __shfl_sync(kAll, sum, who) - 1 - index;  // tiles of the sequence before this one
      return {found_seq, rest * rows_per_tile, Sequence(call, found_seq)};
    }
    index -= __shfl_sync(kAll, sum, 31);
  }
  return {-1, 0, Sequence()};
}

}  // namespace kiln::cuda
