// The product of up to four rows with int8 weights on Hopper (sm_90a). With so few rows two things cost most: turning
// weights into 16-bit numbers, and joining the sums of blocks that share a tile. Here neither is done.
//
// x becomes integers of 16 bits, x = scale * v with |v| <= 32639, the largest of its row; v = 256 * high + low are two
// signed bytes. Weights by bytes are products of the integer tensor cores, straight out of the ring: a weight's 16 rows
// (a slab) by 8 columns, which are the high and low bytes of four rows. Sums are exact, so that a row's result depends
// neither on the other rows nor on how warps divide the depth. A block has all of the depth of its slabs, up to 16 of
// them; its warps divide each stage among themselves and join their sums in shared memory at the end. Every block makes
// integers of all of x, which is worth it for some 32768 values (H200, depth 14336: 1 row 16.0 us, 2 rows 18.7, 4 rows
// 23.9, against 21.3 of cuda_hopper.cuh).
#pragma once

#include <algorithm>

#include "../dense/cuda_hopper.cuh"
#include "../dense/cuda_portable.cuh"
#include "cuda_fragments.cuh"

namespace kiln::cuda {

constexpr int kPlanesOfRow = 2, kBoxDepth = 128, kProductDepth = 32, kLargestInteger = 32639;
constexpr int kFewRowsShared = 224 * 1024, kFewRowsStages = 32, kPlanePadding = 16;

struct FewRowsWork {
  const void* x;
  const float* scale;
  const void* bias;
  void* y;
  int rows, depth, width;  // as in QuantLinear
  int slabs, steps, stages;  // of a block; steps of a stage's depth
};

// What a block's warps do with a stage of kBoxes * 128 bytes of each weight row: eight products each, of kSlabsOfWarp
// slabs.
template <int kBoxesOfStage, int kSlabsOfEachWarp>
struct FewRowsShape {
  static constexpr int kBoxes = kBoxesOfStage, kSlabsOfWarp = kSlabsOfEachWarp;
  static constexpr int kDepth = kBoxes * kBoxDepth, kChunks = kDepth / kProductDepth;
  static constexpr int kTeam = kChunks < kConsumers ? kChunks : kConsumers;  // warps that share a slab
  static constexpr int kTeams = kConsumers / kTeam, kSlabs = kTeams * kSlabsOfWarp;
  static_assert(kChunks / kTeam * kSlabsOfWarp == 8);

  static constexpr int kFinished = (kSlabs + kConsumers - 1) / kConsumers;  // slabs whose results a warp makes

  // Bytes from one plane of x to the next.
  __host__ __device__ static int plane_stride(const FewRowsWork& work) { return work.steps * kDepth + kPlanePadding; }
  // Stages that fit beside the planes.
  static int stages(const FewRowsWork& work) {
    const int planes = work.rows * kPlanesOfRow * plane_stride(work);
    const int ring = kFewRowsShared - kSharedAlignment - planes;
    return std::min({ring / (work.slabs * kSlab * kDepth), kFewRowsStages, work.steps});
  }
};

__device__ __forceinline__ void mma_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// All consumers, and nobody else.
__device__ __forceinline__ void consumers_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kWarp) : "memory");
}

// Sixteen neighbours of a row of x.
struct Sixteen {
  uint4 first, second;

  __device__ __forceinline__ void load(const void* from) {
    first = __ldcg(static_cast<const uint4*>(from));
    second = __ldcg(static_cast<const uint4*>(from) + 1);
  }
  // The bits of the largest absolute value: they are in order, NaN above infinity.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t most = 0;
    const uint32_t pairs[] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (uint32_t pair : pairs) most = __vmaxs2(most, pair & 0x7fff7fff);
    return max(most & 0xffff, most >> 16);
  }
  // Their high and low bytes, in the order of a packed weight (cuda_packing.py).
  template <typename T>
  __device__ __forceinline__ void planes(float inverse, uint4& high, uint4& low) const {
    const uint32_t pairs[] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    uint32_t highs[4], lows[4];
#pragma unroll
    for (int word = 0; word < 4; word++) {
      const float2 near = unpack_pair<T>(pairs[word]), far = unpack_pair<T>(pairs[word + 4]);
      const int v[] = {__float2int_rn(near.x * inverse), __float2int_rn(near.y * inverse),
                       __float2int_rn(far.x * inverse), __float2int_rn(far.y * inverse)};
      lows[word] = __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
      highs[word] = __byte_perm(__byte_perm(v[0] + 128, v[1] + 128, 0x0051),
                                __byte_perm(v[2] + 128, v[3] + 128, 0x0051), 0x5410);
    }
    high = {highs[0], highs[1], highs[2], highs[3]};
    low = {lows[0], lows[1], lows[2], lows[3]};
  }
};

// Writes the planes of all rows to shared memory and what one step of their integers stands for to `scales`. Called by
// all consumers; `largest` [kFewRows] is zero.
template <typename T>
__device__ void integers_of_rows(const FewRowsWork& work, uint8_t* planes, int stride, uint32_t* largest,
                                 float* scales) {
  constexpr int kHeld = 4;  // in registers between the two passes: all of a depth of 16384 for one row
  const int sixteens = work.depth / 16;
  const int row_threads = kConsumers * kWarp / (work.rows == 1 ? 1 : work.rows == 2 ? 2 : 4);
  const int row = threadIdx.x / row_threads, first = threadIdx.x % row_threads;
  const T* x = static_cast<const T*>(work.x) + static_cast<int64_t>(row) * work.depth;
  const bool active = row < work.rows;
  Sixteen held[kHeld];
  if (active) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kHeld; i++)
      if (first + i * row_threads < sixteens) held[i].load(x + (first + i * row_threads) * 16);
#pragma unroll
    for (int i = 0; i < kHeld; i++)
      if (first + i * row_threads < sixteens) most = max(most, held[i].largest());
    for (int at = first + kHeld * row_threads; at < sixteens; at += row_threads) {
      Sixteen more;
      more.load(x + at * 16);
      most = max(most, more.largest());
    }
    most = __reduce_max_sync(0xffffffff, most);
    if (threadIdx.x % kWarp == 0) atomicMax(largest + row, most);
  }
  consumers_meet();
  if (!active) return;
  const uint32_t pair = largest[row];
  const float top = unpack_pair<T>(pair).x;
  const float inverse = top < 1e-30f ? 0.0f : kLargestInteger / top;  // so small a row is zero
  if (first == 0) scales[row] = top / kLargestInteger;
  uint8_t* high_plane = planes + static_cast<int64_t>(row) * kPlanesOfRow * stride;
  auto store = [&](int at, const Sixteen& values) {
    uint4 high, low;
    values.planes<T>(inverse, high, low);
    *reinterpret_cast<uint4*>(high_plane + at * 16) = high;
    *reinterpret_cast<uint4*>(high_plane + stride + at * 16) = low;
  };
#pragma unroll
  for (int i = 0; i < kHeld; i++)
    if (first + i * row_threads < sixteens) store(first + i * row_threads, held[i]);
  for (int at = first + kHeld * row_threads; at < sixteens; at += row_threads) {
    Sixteen more;
    more.load(x + at * 16);
    store(at, more);
  }
}

// A lane's two weight rows of a slab: scale and bias of each.
template <typename T, bool kSwiGlu>
struct SlabRows {
  int upper, lower;  // of y's columns; with SwiGLU one column
  float upper_scale = 0, lower_scale = 0, upper_bias = 0, lower_bias = 0;

  __device__ __forceinline__ void load(const FewRowsWork& work, int slab) {
    const int lane = threadIdx.x % kWarp;
    upper = slab * (kSwiGlu ? kSlab / 2 : kSlab) + lane / 4;
    lower = upper + (kSwiGlu ? 0 : 8);
    const int lower_row = kSwiGlu ? work.width + upper : lower;
    const T* bias = static_cast<const T*>(work.bias);
    if (upper < work.width) {
      upper_scale = __ldg(work.scale + upper);
      if (bias) upper_bias = to_float(__ldg(bias + upper));
    }
    if (lower < work.width) {
      lower_scale = __ldg(work.scale + lower_row);
      if (bias) lower_bias = to_float(__ldg(bias + lower_row));
    }
  }

  // Sums of bytes become results.
  __device__ __forceinline__ void finish(const FewRowsWork& work, const float* scales, int4 sum) const {
    const int row = threadIdx.x % 4;
    if (row >= work.rows) return;
    const float scale = scales[row];
    const float above = (256.0f * sum.x + sum.y) * scale * upper_scale + upper_bias;
    const float below = (256.0f * sum.z + sum.w) * scale * lower_scale + lower_bias;
    T* y = static_cast<T*>(work.y) + static_cast<int64_t>(row) * work.width;
    if constexpr (kSwiGlu) {
      if (upper < work.width) y[upper] = from_float<T>(swiglu(above, below));
    } else {
      if (upper < work.width) y[upper] = from_float<T>(above);
      if (lower < work.width) y[lower] = from_float<T>(below);
    }
  }
};

// The one thread that feeds the ring. Weights are nobody's output: it waits for no earlier kernel.
template <int kBoxes, bool kSwiGlu>
__device__ void produce_slabs(const FewRowsWork& work, const CUtensorMap& weight, uint32_t ring, uint64_t* full,
                              uint64_t* empty) {
  const uint64_t policy = read_once_policy();
  const int box_bytes = work.slabs * kSlab * kBoxDepth, first_slab = blockIdx.x * work.slabs;
  asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
  Stage stage;
  for (int step = 0; step < work.steps; step++) {
    if (step >= work.stages) barrier_wait(empty + stage.index, stage.parity ^ 1);  // of the round before
    barrier_expect(full + stage.index, kBoxes * box_bytes);
#pragma unroll
    for (int i = 0; i < kBoxes; i++) {
      const uint32_t at = ring + (stage.index * kBoxes + i) * box_bytes;
      const int depth = (step * kBoxes + i) * kBoxDepth;
      if constexpr (kSwiGlu) copy_interleaved_box(at, weight, depth, first_slab, full + stage.index, policy);
      else copy_box(at, weight, depth, first_slab * kSlab, full + stage.index, policy);
    }
    stage.next(work.stages);
  }
}

template <typename T, typename Shape, bool kSwiGlu>
__global__ void __launch_bounds__(kHopperThreads, 1)
    quant_linear_few_rows(const __grid_constant__ CUtensorMap weight, const __grid_constant__ FewRowsWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kSlabsOfWarp = Shape::kSlabsOfWarp;
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[kFewRowsStages], empty[kFewRowsStages];
  __shared__ uint32_t largest[kFewRows];
  __shared__ float scales[kFewRows];
  const uint32_t start = shared_address(dynamic), ring = (start + kSharedAlignment - 1) & ~(kSharedAlignment - 1);
  uint8_t* const ring_bytes = dynamic + (ring - start);
  const int box_bytes = work.slabs * kSlab * kBoxDepth, stage_bytes = Shape::kBoxes * box_bytes;
  const int stride = Shape::plane_stride(work);
  uint8_t* const planes = ring_bytes + work.stages * stage_bytes;
  let_next_start();
  if (threadIdx.x < kFewRows) largest[threadIdx.x] = 0;
  if (threadIdx.x == 0) init_ring(full, empty, work.stages);
  __syncthreads();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (warp == kConsumers) {
    if (lane == 0) produce_slabs<Shape::kBoxes, kSwiGlu>(work, weight, ring, full, empty);
    return;
  }
  SlabRows<T, kSwiGlu> rows[Shape::kFinished];
#pragma unroll
  for (int i = 0; i < Shape::kFinished; i++)
    rows[i].load(work, blockIdx.x * work.slabs + warp + i * kConsumers);
  wait_for_previous();
  integers_of_rows<T>(work, planes, stride, largest, scales);
  consumers_meet();

  const int first_chunk = warp % Shape::kTeam, first_slab = warp / Shape::kTeam;
  const bool has_column = lane / 4 < kPlanesOfRow * work.rows;
  const uint32_t column = shared_address(planes) + (has_column ? lane / 4 * stride : 0) + lane % 4 * 4;
  int sums[kSlabsOfWarp][4] = {};
  Stage stage;
  for (int step = 0; step < work.steps; step++) {
    barrier_wait(full + stage.index, stage.parity);
    const uint32_t at = ring + stage.index * stage_bytes;
#pragma unroll
    for (int c = 0; c < Shape::kChunks / Shape::kTeam; c++) {
      const int chunk = first_chunk + c * Shape::kTeam, of_box = chunk % 4;
      const uint32_t x = column + (step * Shape::kChunks + chunk) * kProductDepth;
      const uint32_t b0 = has_column ? load_word(x) : 0, b1 = has_column ? load_word(x + 16) : 0;
      // The four matrices of a slab: its upper and lower rows, of 16 bytes and the next 16.
      const uint32_t row = at + chunk / 4 * box_bytes + (lane / 8 % 2 * 8 + lane % 8) * kBoxDepth;
      const uint32_t swizzled = row + ((2 * of_box + lane / 16) ^ lane % 8) * 16;
#pragma unroll
      for (int i = 0; i < kSlabsOfWarp; i++) {
        const int slab = first_slab + i * Shape::kTeams;
        if (slab >= work.slabs) break;
        uint32_t a[4];
        load_matrices(a, swizzled + slab * kSlab * kBoxDepth);
        mma_bytes(sums[i], a, b0, b1);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage.index);
    stage.next(work.stages);
  }

  // The ring is done with: it takes the warps' sums, [warps of a team][slabs][lanes].
  consumers_meet();
  int4* const parts = reinterpret_cast<int4*>(ring_bytes);
#pragma unroll
  for (int i = 0; i < kSlabsOfWarp; i++) {
    const int slab = first_slab + i * Shape::kTeams;
    if (slab < work.slabs)
      parts[(first_chunk * work.slabs + slab) * kWarp + lane] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
  }
  consumers_meet();
#pragma unroll
  for (int i = 0; i < Shape::kFinished; i++) {
    const int slab = warp + i * kConsumers;
    if (slab >= work.slabs) break;
    int4 sum = {};
#pragma unroll
    for (int member = 0; member < Shape::kTeam; member++) {
      const int4 part = parts[(member * work.slabs + slab) * kWarp + lane];
      sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    rows[i].finish(work, scales, sum);
  }
#else
  __trap();  // the launch is for compute capability 9.0 alone
#endif
}

}  // namespace kiln::cuda
