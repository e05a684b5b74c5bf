// Checks the values of a call's index tensors, so that the kernels can trust them. Shapes are the binding's to check.
#include <sstream>

#include "cpu.h"

namespace kiln {
namespace {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::string check_cumulative(const PagedAttention& call) {
  if (call.cumulative[0] != 0) return text("cumulative_sequence_length must start with 0: found ", call.cumulative[0]);
  for (int64_t seq = 0; seq < call.seqs; seq++) {
    const int64_t begin = call.cumulative[seq], end = call.cumulative[seq + 1];
    if (end < begin)
      return text("cumulative_sequence_length must ascend: found ", begin, " then ", end, " at sequence ", seq);
  }
  if (call.cumulative[call.seqs] != call.tokens)
    return text("cumulative_sequence_length must end with the number of tokens: found ", call.cumulative[call.seqs],
                ", expected ", call.tokens);
  return {};
}

std::string check_sequence(const PagedAttention& call, int64_t seq) {
  const int64_t begin = call.cumulative[seq], end = call.cumulative[seq + 1];
  if (end == begin) return {};
  const int64_t past = call.past[seq];
  if (past < 0) return text("past_seqlens must not be negative: found ", past, " at sequence ", seq);
  const int64_t context = past + end - begin;
  if (context > call.max_blocks * call.block_size)
    return text("block_table is too narrow for sequence ", seq, ": found ", call.max_blocks, " blocks of ",
                call.block_size, " positions, expected room for ", context, " (past ", past, " + new ", end - begin,
                ")");
  if (call.rotary_half > 0 && context > call.positions)
    return text("cos_cache and sin_cache are too short for sequence ", seq, ": found ", call.positions,
                " positions, expected at least ", context);
  // Blocks wholly before the first new token's window are never read; their entries may be anything.
  const int64_t first = call.window > 0 && past + 1 > call.window ? past + 1 - call.window : 0;
  for (int64_t block = first / call.block_size; block * call.block_size < context; block++) {
    const int32_t entry = call.block_table[seq * call.max_blocks + block];
    if (entry < 0 || entry >= call.blocks)
      return text("block_table[", seq, ", ", block, "] is out of range: found ", entry, ", expected 0 to ",
                  call.blocks - 1, " (the sequence needs positions up to ", context - 1, ")");
  }
  return {};
}

}  // namespace

std::string check(const PagedAttention& call) {
  std::string problem = check_cumulative(call);
  for (int64_t seq = 0; problem.empty() && seq < call.seqs; seq++) problem = check_sequence(call, seq);
  if (!problem.empty()) return problem;
  for (int64_t token = 0; token < call.tokens; token++) {
    const int64_t slot = call.slots[token];
    if (slot < -1 || slot >= call.blocks * call.block_size)
      return text("slot_mapping[", token, "] is out of range: found ", slot, ", expected -1 to ",
                  call.blocks * call.block_size - 1);
  }
  return {};
}

}  // namespace kiln
