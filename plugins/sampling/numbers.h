// The numbers behind a choice of token, the same bits on the CPU and on a GPU: weights as integers, and random bits.
// reference.py has the same in NumPy. Knows no tensors.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KILN_EVERYWHERE __host__ __device__
#else
#define KILN_EVERYWHERE
#endif

namespace kiln::sampling {

constexpr int32_t kNoToken = -1;
constexpr float kLargest = 3.402823466e38f;

// How one row is sampled; not greedy, so temperature > 0.
struct Choice {
  float scale;         // halvings of the weight by unit of distance
  int64_t top_k;       // 0: all
  uint64_t top_p;      // in units of 2^-32; kAll: all
  uint64_t min_weight;
};
constexpr uint64_t kAll = 1ull << 32;

KILN_EVERYWHERE inline Choice choice_of(float temperature, int32_t top_k, float top_p, float min_p) {
  Choice choice;
  const float scale = 1.4426950408889634f / temperature;
  choice.scale = scale < kLargest ? scale : kLargest;
  choice.top_k = top_k > 0 ? top_k : 0;
  choice.top_p = !(top_p < 1.0f) ? kAll : top_p > 0.0f ? static_cast<uint64_t>(top_p * 4294967296.0f) : 0;
  const float capped = min_p < 1.0f ? min_p : 1.0f;  // more than the best weighs nothing
  choice.min_weight = min_p > 0.0f ? static_cast<uint64_t>(capped * 1099511627776.0f) : 0;
  return choice;
}

// 2^40 * 2^-(distance * scale); 0 where that is small or no number.
KILN_EVERYWHERE inline uint64_t weight_of(float distance, float scale) {
  const float x = distance * scale;
  if (!(x < 40.0f)) return 0;
  const uint32_t fixed = static_cast<uint32_t>(x * 16777216.0f), f = fixed << 8;
  constexpr uint32_t kCoefficients[] = {5548193u, 41219527u, 238367582u, 1031763232u, 2977044448u};
  uint32_t inner = 493839u;
  for (uint32_t c : kCoefficients) inner = c - static_cast<uint32_t>((static_cast<uint64_t>(f) * inner) >> 32);
  const uint32_t power = (1u << 31) - static_cast<uint32_t>((static_cast<uint64_t>(f) * inner) >> 33);
  return (static_cast<uint64_t>(power) << 9) >> (fixed >> 24);
}

// floor(share * total / 2^32), total < 2^63
KILN_EVERYWHERE inline uint64_t share_of(uint64_t total, uint64_t share) {
  return (total >> 32) * share + (((total & 0xffffffffu) * share) >> 32);
}

// floor(a * b / 2^64)
KILN_EVERYWHERE inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// The first 64 bits of Philox4x32-10 with the key `seed` and the counter `position`.
KILN_EVERYWHERE inline uint64_t random_bits(uint64_t seed, uint32_t position) {
  uint32_t c[4] = {position, 0, 0, 0}, k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; i++) c[i] = next[i];
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return (static_cast<uint64_t>(c[1]) << 32) | c[0];
}

}  // namespace kiln::sampling
