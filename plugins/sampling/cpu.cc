// One row at a time: its best, then the candidates that weigh anything, of which the filters keep the first ones in
// order of distance. Only as many are sorted as it takes to reach top_p.
#include "cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"

namespace kiln {
namespace {

using namespace kiln::sampling;

struct Candidate {
  float distance;
  int32_t id;
  uint64_t weight;
};

bool nearer(const Candidate& a, const Candidate& b) {
  return a.distance < b.distance || (a.distance == b.distance && a.id < b.id);
}
bool earlier(const Candidate& a, const Candidate& b) { return a.id < b.id; }

// The id of the highest logit, the lowest among equals; kNoToken with a NaN or without a finite maximum.
int32_t best_of(const float* logits, int64_t vocabulary) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocabulary; i++) {
    if (logits[i] <= logits[best]) continue;
    if (std::isnan(logits[i]) || std::isnan(logits[best])) return kNoToken;
    best = i;
  }
  return vocabulary && std::isfinite(logits[best]) ? static_cast<int32_t>(best) : kNoToken;
}

uint64_t total_of(const std::vector<Candidate>& candidates) {
  uint64_t total = 0;
  for (const Candidate& one : candidates) total += one.weight;
  return total;
}

// Leave the nearest ones whose weights reach the share, and the last one's equals.
void keep_nucleus(std::vector<Candidate>& candidates, uint64_t share) {
  const uint64_t target = share_of(total_of(candidates), share);
  uint64_t sum = 0;
  size_t sorted = 0;
  for (size_t step = 256; sorted < candidates.size(); step *= 4) {
    const size_t end = std::min(candidates.size(), sorted + step);
    const auto first = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
    std::partial_sort(first, candidates.begin() + static_cast<std::ptrdiff_t>(end), candidates.end(), nearer);
    for (; sorted < end; sorted++) {
      sum += candidates[sorted].weight;
      if (sum < target) continue;
      const float limit = candidates[sorted].distance;
      candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                      [limit](const Candidate& one) { return one.distance > limit; }),
                       candidates.end());
      return;
    }
  }
}

int32_t drawn(const float* logits, int64_t vocabulary, float best, const Choice& choice, uint64_t random) {
  std::vector<Candidate> candidates;
  for (int64_t i = 0; i < vocabulary; i++) {
    const float distance = best - logits[i];
    if (const uint64_t weight = weight_of(distance, choice.scale))
      candidates.push_back({distance, static_cast<int32_t>(i), weight});
  }
  if (choice.top_k && choice.top_k < static_cast<int64_t>(candidates.size())) {
    std::nth_element(candidates.begin(), candidates.begin() + choice.top_k, candidates.end(), nearer);
    candidates.resize(static_cast<size_t>(choice.top_k));
  }
  if (choice.top_p < kAll) keep_nucleus(candidates, choice.top_p);
  const auto light = [&](const Candidate& one) { return one.weight < choice.min_weight; };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), light), candidates.end());
  std::sort(candidates.begin(), candidates.end(), earlier);
  const uint64_t target = multiply_high(random, total_of(candidates));
  uint64_t sum = 0;
  for (const Candidate& one : candidates)
    if ((sum += one.weight) > target) return one.id;
  return kNoToken;  // never: the target is below the total
}

int32_t token_of(const Sample& call, int64_t row) {
  const float* logits = call.logits + row * call.vocabulary;
  const int32_t best = best_of(logits, call.vocabulary);
  if (best == kNoToken || !(call.temperature[row] > 0)) return best;
  const Choice choice = choice_of(call.temperature[row], call.top_k[row], call.top_p[row], call.min_p[row]);
  const uint64_t random =
      random_bits(static_cast<uint64_t>(call.seed[row]), static_cast<uint32_t>(call.position[row]));
  return drawn(logits, call.vocabulary, logits[best], choice, random);
}

}  // namespace

void run(const Sample& call, Parallel& parallel) {
  auto body = [](void* user, size_t row) {
    const Sample& call = *static_cast<const Sample*>(user);
    call.tokens[row] = token_of(call, static_cast<int64_t>(row));
  };
  if (call.rows == 1) return body(const_cast<Sample*>(&call), 0);
  parallel.run(static_cast<size_t>(call.rows), body, const_cast<Sample*>(&call));
}

}  // namespace kiln
