// The decode kernel: one CTA's way through its range, its instances, and how each uses the device.
#include "cuda_decode.cuh"
#include "cuda_launch.h"

namespace kiln::cuda {
namespace {

template <typename T, int kHeadDim, int kColumns>
__global__ void __launch_bounds__(256, 1)
    decode_kernel(const __grid_constant__ PagedAttention call, const DecodePlan plan, float* parts, int* counters) {
  using Layout = DecodeLayout<kHeadDim>;
  extern __shared__ __align__(16) char shared[];
  constexpr int kRows = 8 * kColumns, kMinRounds = 2;  // a CTA that joins in must have something to do
  const int warps = plan.warps, stages = plan.stages, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ranges_max = gridDim.x / call.kv_heads, tiles_bytes = warps * stages * 2 * Layout::kTile;
  const int merge_floats = max(warps / 2 * Layout::kPart, ranges_max * kRows);
  float* merging = reinterpret_cast<float*>(shared + tiles_bytes);
  int* starts = reinterpret_cast<int*>(merging + merge_floats);
  Decoder<T, kHeadDim, kColumns> decoder{call,
                                         Scores(call),
                                         warps,
                                         stages,
                                         warp,
                                         lane,
                                         call.heads / call.kv_heads,
                                         static_cast<int>(blockIdx.x % call.kv_heads),
                                         shared_address(shared + warp * stages * 2 * Layout::kTile),
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
  using Decoding = Decoder<T, kHeadDim, kColumns>;
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

int ranges_of(const PagedAttention& call, const Device& device) {
  const int ranges = device.multiprocessors / call.kv_heads;
  return ranges > 0 ? ranges : 1;
}

template <int kHeadDim>
bool find_plan(const PagedAttention& call, const Device& device, int columns, DecodePlan* plan) {
  constexpr int kStatic = 256;  // what the kernel has of its own besides, at most
  for (const DecodePlan& one : kPlans) {
    if (one.warps * 32 < DecodeLayout<kHeadDim>::kMinThreads) break;
    *plan = one;
    const int bytes = DecodeLayout<kHeadDim>::bytes(one, call.seqs, columns, ranges_of(call, device));
    if (bytes + kStatic <= device.shared_bytes) return true;
  }
  return false;
}

template <typename T, int kHeadDim, int kColumns>
cudaError_t launch_columns(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  DecodePlan plan;
  if (!find_plan<kHeadDim>(call, device, kColumns, &plan)) return cudaErrorInvalidConfiguration;
  const int ranges = ranges_of(call, device);
  const int bytes = DecodeLayout<kHeadDim>::bytes(plan, call.seqs, kColumns, ranges);
  int* counters = static_cast<int*>(call.scratch);
  float* parts = reinterpret_cast<float*>(counters + (device.multiprocessors + 31) / 32 * 32);
  return launch_large(decode_kernel<T, kHeadDim, kColumns>, ranges * call.kv_heads, plan.warps * 32, bytes, stream,
                      call, plan, parts, counters);
}

template <typename T, int kHeadDim>
cudaError_t launch_head(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  if constexpr (kHeadDim <= 128) {
    // Sixteen rows share a reading of the cache where sequences have more than eight.
    const int group = call.heads / call.kv_heads;
    const bool all_decode = call.decode_rows > (1 << 30);
    if (group > 8 || (all_decode && static_cast<int64_t>(call.tokens) * group > int64_t{8} * call.seqs))
      return launch_columns<T, kHeadDim, 2>(call, device, stream);
  }
  return launch_columns<T, kHeadDim, 1>(call, device, stream);
}

template <typename T>
cudaError_t launch_type(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  switch (call.head_dim) {
    case 64:
      return launch_head<T, 64>(call, device, stream);
    case 96:
      return launch_head<T, 96>(call, device, stream);
    case 128:
      return launch_head<T, 128>(call, device, stream);
  }
  return launch_head<T, 256>(call, device, stream);
}

}  // namespace

size_t decode_scratch_bytes(const Device& device) {
  const int ctas = device.multiprocessors;  // with more KV heads than that, no sequence is split
  const size_t widest = decode_scratch_floats<256, 1>(ctas), most = decode_scratch_floats<128, 2>(ctas);
  return (static_cast<size_t>(ctas + 31) / 32 * 32 + (widest > most ? widest : most)) * 4;
}

bool decode_fits(const PagedAttention& call, const Device& device) {
  DecodePlan plan;
  switch (call.head_dim) {
    case 64:
      return find_plan<64>(call, device, 2, &plan);
    case 96:
      return find_plan<96>(call, device, 2, &plan);
    case 128:
      return find_plan<128>(call, device, 2, &plan);
  }
  return find_plan<256>(call, device, 1, &plan);
}

cudaError_t launch_decode(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  return call.element == Element::kFloat16 ? launch_type<__half>(call, device, stream)
                                           : launch_type<__nv_bfloat16>(call, device, stream);
}

}  // namespace kiln::cuda
