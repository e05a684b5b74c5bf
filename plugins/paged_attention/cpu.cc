// Cuts a call into tasks and runs them on the caller's threads.
//
// What a sequence computes depends on its own new tokens, past length and geometry only: the spans of its context, its
// query tiles, and the order in which partial results are joined. So a sequence gets the same bits whatever else is in
// the batch and however many threads there are. It does depend on how its own tokens are cut into calls (chunked
// prefill rounds differently from a whole prompt).
//
// Memory beyond the caller's: partial results, at most (decode tokens) x (spans) x heads x (head_dim + 2) floats a
// call, and per thread a scratch area that depends on the geometry only.
#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "../isa.h"
#include "kernels.h"

namespace kiln {

struct ScratchOwner : Scratch {
  ~ScratchOwner() { std::free(data); }
};

float* Scratch::take(size_t floats) {
  if (floats > capacity) {
    std::free(data);
    const size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
    data = static_cast<float*>(std::aligned_alloc(64, bytes));
    capacity = data ? floats : 0;
  }
  return data;
}

namespace {

constexpr int64_t kDecodeRows = 16;    // up to so many query rows per KV head take the decode path (measured)
constexpr int64_t kTileRows = 384;     // query rows per prefill task, at most about (measured)
constexpr int64_t kManyTokens = 4096;  // twice as many rows from so many new tokens on
constexpr int64_t kFewRows = 48;       // and at least about, when the sequence has few new tokens
constexpr int64_t kWriteTokens = 32;   // tokens per write task

thread_local ScratchOwner scratch_of_thread;

// New tokens per prefill task, in sixes (the height of a register block). Large tiles pack each key for more rows,
// small ones give all threads something to do: a sequence makes at least four tiles, all about equal, if they stay above
// kFewRows.
int64_t tile_tokens(const PagedAttention& call, int64_t count) {
  const int64_t group = call.heads / call.kv_heads;
  const int64_t most = std::max<int64_t>(1, (count < kManyTokens ? kTileRows : 2 * kTileRows) / group);
  const int64_t tiles = std::max<int64_t>(4, (count + most - 1) / most);
  const int64_t even = std::max((count + tiles - 1) / tiles, kFewRows / group);
  return (even + 5) / 6 * 6;
}

struct Plan {
  std::vector<Task> writes, tasks;
  std::unique_ptr<float[]> partials;
  std::vector<float*> partials_of;                     // per sequence, null if it needs none
  std::vector<int64_t> spans;                          // per sequence
  std::unique_ptr<std::atomic<int64_t>[]> unfinished;  // decode tasks per sequence
  int64_t longest_decode = 0, longest_prefill = 0;
};

// Positions of the context per decode task. Short spans give every thread something to do, long ones start less often
// with rows that nobody prefetched (measured: 512 reads 5 to 10 % faster than 256).
int64_t span_positions(int64_t context) { return context <= 2048 ? 256 : context <= 16384 ? 512 : 1024; }

void add_decode(const PagedAttention& call, int64_t seq, int64_t count, Plan& plan) {
  const int64_t past = call.past[seq], end = past + count;
  const int64_t begin = call.window > 0 ? std::max<int64_t>(0, past + 1 - call.window) : 0;
  const int64_t span = span_positions(end - begin);
  for (int64_t from = begin; from < end; plan.spans[seq]++) {
    const int64_t to = std::min(end, (from / span + 1) * span);
    plan.tasks.push_back({seq, 0, 0, count, from, to, nullptr, (to - from) * call.kv_heads});
    from = to;
  }
  plan.longest_decode = std::max(plan.longest_decode, count);
}

void add_prefill(const PagedAttention& call, int64_t seq, int64_t count, Plan& plan) {
  const int64_t tile = tile_tokens(call, count), group = call.heads / call.kv_heads;
  for (int64_t token = 0; token < count; token += tile) {
    const int64_t n = std::min(tile, count - token);
    int64_t seen = call.past[seq] + token + n;
    if (call.window > 0) seen = std::min(seen, call.window + n);
    for (int64_t head = 0; head < call.kv_heads; head++)
      plan.tasks.push_back({seq, head, token, n, 0, 0, nullptr, n * group * seen});
    plan.longest_prefill = std::max(plan.longest_prefill, n);
  }
}

bool is_decode(const PagedAttention& call, int64_t count) {
  return count == 1 || count * (call.heads / call.kv_heads) <= kDecodeRows;
}

int64_t new_tokens(const PagedAttention& call, int64_t seq) { return call.cumulative[seq + 1] - call.cumulative[seq]; }

Plan plan_for(const PagedAttention& call) {
  Plan plan;
  plan.spans.assign(call.seqs, 0);
  plan.partials_of.assign(call.seqs, nullptr);
  plan.unfinished.reset(new std::atomic<int64_t>[call.seqs]);
  size_t floats = 0;
  for (int64_t seq = 0; seq < call.seqs; seq++) {
    const int64_t count = new_tokens(call, seq);
    for (int64_t token = 0; token < count; token += kWriteTokens)
      plan.writes.push_back({seq, 0, token, std::min(kWriteTokens, count - token), 0, 0, nullptr, 0});
    if (count == 0) continue;
    if (is_decode(call, count))
      add_decode(call, seq, count, plan);
    else
      add_prefill(call, seq, count, plan);
    if (plan.spans[seq] > 1) floats += plan.spans[seq] * partial_floats(call.heads * count, call.head_dim);
    plan.unfinished[seq].store(plan.spans[seq], std::memory_order_relaxed);
  }
  plan.partials.reset(floats ? new float[floats] : nullptr);
  float* next = plan.partials.get();
  for (Task& task : plan.tasks) {
    if (plan.spans[task.seq] <= 1) continue;
    if (!plan.partials_of[task.seq]) plan.partials_of[task.seq] = next;
    task.partial = next;
    next += partial_floats(call.heads * task.count, call.head_dim);
  }
  // Longest first, so that no long task is left when the other threads are done.
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return plan;
}

// What the threads share while they work a list of tasks off.
struct Work {
  const PagedAttention& call;
  const Kernels& kernels;
  Plan& plan;
  size_t scratch;
  std::atomic<size_t> next{0};
  std::atomic<bool> out_of_memory{false};
};

void run_write(Work& work, const Task& task, float* scratch) {
  work.kernels.write(work.call, task.seq, task.token, task.count, scratch);
}

void run_attention(Work& work, const Task& task, float* scratch) {
  Plan& plan = work.plan;
  if (plan.spans[task.seq] == 0) return work.kernels.prefill(work.call, task, scratch);
  work.kernels.decode(work.call, task, scratch);
  // Whoever finishes a sequence's last span joins them, in their order.
  if (task.partial && plan.unfinished[task.seq].fetch_sub(1, std::memory_order_acq_rel) == 1)
    work.kernels.combine(work.call, task.seq, task.count, plan.partials_of[task.seq], plan.spans[task.seq]);
}

// `tasks` in order, each by the next free thread: the pool's own order would split the list in the middle.
template <std::vector<Task> Plan::* kList, void (*kRun)(Work&, const Task&, float*)>
bool run_tasks(Work& work, size_t scratch_floats, bool inline_only, Parallel& parallel) {
  const size_t total = (work.plan.*kList).size();
  work.next = 0;
  work.scratch = scratch_floats;
  auto body = [](void* user, size_t) {
    Work& work = *static_cast<Work*>(user);
    const size_t index = work.next.fetch_add(1, std::memory_order_relaxed);
    float* scratch = scratch_of_thread.take(work.scratch);
    if (scratch)
      kRun(work, (work.plan.*kList)[index], scratch);
    else
      work.out_of_memory = true;
  };
  if (inline_only || total == 1)
    for (size_t i = 0; i < total; i++) body(&work, i);
  else if (total > 0)
    parallel.run(total, body, &work);
  return !work.out_of_memory;
}

}  // namespace

std::string run(const PagedAttention& call, Parallel& parallel) try {
  const Kernels& chosen = KILN_FOR_ISA_BF16(kernels);
  Plan plan = plan_for(call);
  Work work{call, chosen, plan, 0};
  // Below some 32 KB waking the other threads costs more than the copies.
  const bool few = call.tokens * call.kv_heads * call.head_dim < 8192;
  const size_t attention_scratch =
      std::max(plan.longest_decode ? chosen.decode_scratch(call, plan.longest_decode) : 0,
               plan.longest_prefill ? chosen.prefill_scratch(call, plan.longest_prefill) : 0);
  if (!run_tasks<&Plan::writes, run_write>(work, chosen.write_scratch(call), few, parallel) ||
      !run_tasks<&Plan::tasks, run_attention>(work, attention_scratch, false, parallel))
    return "out of memory for the scratch area of a thread";
  return {};
} catch (const std::bad_alloc&) {
  return "out of memory for the task list or the partial results";
}

}  // namespace kiln
