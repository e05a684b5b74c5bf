// The decode kernel: one CTA's way through its range of rounds, and how it may use a device.
#pragma once

#include "cuda_decode.cuh"

namespace kiln::cuda {

template <typename T, int kHeadDim, int kColumns, bool kQuantised>
__global__ void __launch_bounds__(256, 1)
    decode_kernel(const __grid_constant__ PagedAttention call, const DecodePlan plan, float* parts, int* counters) {
  using Layout = DecodeLayout<kHeadDim>;
  extern __shared__ __align__(16) char shared[];
  constexpr int kRows = 8 * kColumns, kMinRounds = 2;  // a CTA that joins in must have something to do
  const int warps = plan.warps, stages = plan.stages, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ranges_max = gridDim.x / call.kv_heads, warp_bytes = stages * Layout::stage_bytes(call);
  const int merge_floats = max(warps / 2 * Layout::kPart, ranges_max * kRows);
  float* merging = reinterpret_cast<float*>(shared + warps * warp_bytes);
  int* starts = reinterpret_cast<int*>(merging + merge_floats);
  using Decoding = Decoder<T, kHeadDim, kColumns, kQuantised>;
  Decoding decoder{call,
                   Scores(call),
                   warps,
                   stages,
                   warp,
                   lane,
                   call.heads / call.kv_heads,
                   static_cast<int>(blockIdx.x % call.kv_heads),
                   shared_address(shared + warp * warp_bytes),
                   merging};
  let_next_start();
  count_rounds(call, kRows, 16 * warps, starts);
  const int total = starts[call.seqs], mine = blockIdx.x / call.kv_heads;
  const int ranges = max(1, min(ranges_max, total / kMinRounds));
  if (mine >= ranges || total == 0) {
    wait_for_previous();  // whatever follows takes the end of this kernel for the end of all before it
    return;
  }
  auto begin_of = [&](int range) { return static_cast<int>(static_cast<int64_t>(total) * range / ranges); };
  const int from = begin_of(mine), to = begin_of(mine + 1);
  auto part_of = [&](int range, bool begins_there) {
    const size_t slot = (static_cast<size_t>(range) * call.kv_heads + decoder.head) * 2 + begins_there;
    return parts + slot * kColumns * Layout::kPart;
  };

  // Queries, lengths and block numbers are not what the kernel before writes; the caches are.
  DecodeCursor cursor{call, starts, kRows, 16 * warps};
  cursor.start(from);
  DecodeCursor ahead = cursor;
  decoder.load_entries(ahead);
  decoder.load_later_entries(ahead);
  uint32_t q[kColumns][kHeadDim / 16][2];
  typename Decoding::Held held[Decoding::kHeld];
  DecodeResult<T, kHeadDim, kColumns> result;
  decoder.load_query(cursor.of, cursor.row, held);
  decoder.share_query(held, q);
  result.clear();
  wait_for_previous();
  int fetched = from, fetch_stage = 0;
  auto fetch_next = [&] {
    if (fetched < to) {
      decoder.fetch(ahead, fetch_stage);
      if (++fetched < to) decoder.advance(ahead);
    }
    commit_copies();
    fetch_stage = fetch_stage + 1 == stages ? 0 : fetch_stage + 1;
  };
  for (int i = 0; i < stages - 1; i++) fetch_next();
  for (int at = from, stage = 0, item_from = from; at < to; at++) {
    if (stages == 2) wait_copies<0>();
    else if (stages == 3) wait_copies<1>();
    else wait_copies<2>();
    __syncwarp();
    if (cursor.begin + (cursor.round * warps + warp) * 16 < cursor.of.end) decoder.attend(cursor, stage, q, result);
    __syncwarp();
    fetch_next();
    stage = stage + 1 == stages ? 0 : stage + 1;
    const bool last = cursor.round + 1 == cursor.rounds, more = at + 1 < to;
    if (!last && more) {
      cursor.round++;
      continue;
    }
    const Sequence of = cursor.of;
    const int row = cursor.row, start = cursor.item_start(), end = start + cursor.rounds;
    const bool begins_here = item_from == start;
    if (more) {
      cursor.next_item();
      decoder.load_query(cursor.of, cursor.row, held);
    }
    if (begins_here && last) {
      decoder.merge_warps(result, [&](int n, int reg, float x, float, float total) {
        T* p = decoder.output(of, row, n, reg);
        if (p) *p = Numbers<T>::from(x / total);
      });
    } else {
      __shared__ int finished;
      float* part = part_of(mine, begins_here) + lane;
      decoder.merge_warps(result, [&](int n, int reg, float x, float top, float total) {
        float* column = part + n * Layout::kPart;
        __stcg(column + reg * 32, x);
        if (reg >= 2) return;  // each row's once
        __stcg(column + (Layout::kRegisters + reg) * 32, top);
        __stcg(column + (Layout::kRegisters + 2 + reg) * 32, total);
      });
      auto range_of = [&](int round) {
        int range = static_cast<int>(static_cast<int64_t>(round) * ranges / total);
        while (begin_of(range) > round) range--;
        while (begin_of(range + 1) <= round) range++;
        return range;
      };
      const int first = range_of(start), count = range_of(end - 1) - first + 1;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        // The range that an item begins in has no other that goes on beyond it, so it names the counter.
        int* counter = counters + first * call.kv_heads + decoder.head;
        finished = atomicAdd(counter, 1) == count - 1;
        if (finished) *counter = 0;
        __threadfence();
      }
      __syncthreads();
      if (finished) decoder.join(of, row, count, [&](int i) { return part_of(first + i, i == 0); });
    }
    if (more) {
      decoder.share_query(held, q);
      result.clear();
      item_from = at + 1;
    }
  }
  wait_copies<0>();
}

// The fastest of these that fits (H200; the smaller ones are for devices with 99 or 163 KB of shared memory).
constexpr DecodePlan kPlans[] = {{8, 4}, {8, 3}, {8, 2}, {4, 3}, {4, 2}, {2, 2}};

}  // namespace kiln::cuda
