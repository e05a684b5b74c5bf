// What this machine can do at best: read bandwidth and FP32 arithmetic, for `kiln bench` to compare with.
//
// Has threads of its own, because it measures the machine and not ONNX Runtime. Knows nothing of attention.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

typedef float Vec4 __attribute__((vector_size(16)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec16 __attribute__((vector_size(64)));

// Sum over n floats (a multiple of 128), in eight chains; the sum only keeps the loads alive.
template <typename Vec>
inline __attribute__((always_inline)) float sum_all(const float* p, size_t n) {
  constexpr size_t kWidth = sizeof(Vec) / sizeof(float);
  Vec sums[8] = {};
  for (size_t i = 0; i < n; i += 8 * kWidth)
#pragma GCC unroll 8
    for (size_t k = 0; k < 8; k++) sums[k] += *reinterpret_cast<const Vec*>(p + i + k * kWidth);
  float total = 0;
  for (Vec& sum : sums)
    for (size_t i = 0; i < kWidth; i++) total += sum[i];
  return total;
}

// `rounds` times 12 or 24 independent multiply-adds on registers. Returns what keeps them alive.
template <typename Vec, int kChains>
inline __attribute__((always_inline)) float multiply_add(int64_t rounds) {
  constexpr size_t kWidth = sizeof(Vec) / sizeof(float);
  Vec sums[kChains], a = {}, b = {};
  a = a + 0.999f;
  b = b + 0.001f;
#pragma GCC unroll 24
  for (int k = 0; k < kChains; k++) sums[k] = b * static_cast<float>(k);
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 24
    for (int k = 0; k < kChains; k++) sums[k] = sums[k] * a + b;
  }
  float total = 0;
  for (Vec& sum : sums)
    for (size_t i = 0; i < kWidth; i++) total += sum[i];
  return total;
}

struct Isa {
  float (*sum)(const float*, size_t);
  float (*fma)(int64_t);
  double ops_per_round;
};

float sum_plain(const float* p, size_t n) { return sum_all<Vec4>(p, n); }
float fma_plain(int64_t rounds) { return multiply_add<Vec4, 12>(rounds); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float sum_avx2(const float* p, size_t n) { return sum_all<Vec8>(p, n); }
__attribute__((target("avx2,fma"))) float fma_avx2(int64_t rounds) { return multiply_add<Vec8, 12>(rounds); }
__attribute__((target("avx512f,fma"))) float sum_avx512(const float* p, size_t n) { return sum_all<Vec16>(p, n); }
__attribute__((target("avx512f,fma"))) float fma_avx512(int64_t rounds) { return multiply_add<Vec16, 24>(rounds); }
#endif

Isa best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {sum_avx512, fma_avx512, 24 * 16 * 2};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {sum_avx2, fma_avx2, 12 * 8 * 2};
#endif
  return {sum_plain, fma_plain, 12 * 4 * 2};
}

std::atomic<float> sink;

// Runs body(thread) on `threads` threads that start together, and returns the seconds until the last one is done.
template <typename Body>
double timed(int threads, Body body) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; t++)
    pool.emplace_back([&, t] {
      ready++;
      while (!go) std::this_thread::yield();
      body(t);
    });
  while (ready < threads - 1) std::this_thread::yield();
  const Clock::time_point start = Clock::now();
  go = true;
  body(0);
  for (std::thread& thread : pool) thread.join();
  return seconds_since(start);
}

}  // namespace

#define KILN_EXPORT extern "C" __attribute__((visibility("default")))

// Bytes per second, the best of `repetitions` passes over `bytes` in all, of which each thread reads its own part.
// 0 if the memory is not to be had.
KILN_EXPORT double kiln_read_bandwidth(size_t bytes, int threads, int repetitions) {
  constexpr size_t kPage = size_t{1} << 21;
  if (threads < 1) threads = 1;
  const size_t part = (bytes / threads + kPage - 1) / kPage * kPage;
  float* data = static_cast<float*>(aligned_alloc(kPage, part * threads));
  if (!data) return 0;
#if defined(__linux__)
  madvise(data, part * threads, MADV_HUGEPAGE);  // as numpy does for its arrays
#endif
  const size_t n = part / sizeof(float);
  timed(threads, [&](int t) {  // each thread touches its own part first, so that it lies near
    for (size_t i = 0; i < n; i++) data[t * n + i] = 1.0f;
  });
  const Isa isa = best();
  double fastest = 0;
  for (int i = 0; i < repetitions; i++) {
    const double seconds = timed(threads, [&](int t) { sink = isa.sum(data + t * n, n); });
    const double rate = part * threads / seconds;
    if (rate > fastest) fastest = rate;
  }
  free(data);
  return fastest;
}

// FP32 operations per second, two for a multiply-add, on registers only; about `seconds` long, the best of ten parts.
KILN_EXPORT double kiln_fp32_peak(int threads, double seconds) {
  if (threads < 1) threads = 1;
  const Isa isa = best();
  int64_t rounds = 1000;
  while (true) {  // how many rounds take a tenth of the time
    const double one = timed(1, [&](int) { sink = isa.fma(rounds); });
    if (one * 20 > seconds || rounds > (int64_t{1} << 40)) break;
    rounds *= 2;
  }
  double fastest = 0;
  for (int i = 0; i < 10; i++) {
    const double taken = timed(threads, [&](int) { sink = isa.fma(rounds); });
    const double rate = isa.ops_per_round * static_cast<double>(rounds) * threads / taken;
    if (rate > fastest) fastest = rate;
  }
  return fastest;
}
