// Times several ways of doing the same, one after the other in turns: what the device's clock and its temperature make of
// one, they make of all. Each turn is followed by a pause: reading weights, a decode step does not heat the device as
// products in a row do (H200: its clock falls from 1980 to 1410 MHz, which changes what is fastest from 192 rows on).
// Knows no kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace kiln::cuda {

class AlgorithmClock {
 public:
  explicit AlgorithmClock(cudaStream_t stream) : stream_(stream) {
    good_ = cudaEventCreate(&start_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess;
  }
  ~AlgorithmClock() {
    for (cudaGraphExec_t way : ways_) cudaGraphExecDestroy(way);
    if (start_) cudaEventDestroy(start_);
    if (end_) cudaEventDestroy(end_);
  }
  AlgorithmClock(const AlgorithmClock&) = delete;
  AlgorithmClock& operator=(const AlgorithmClock&) = delete;

  // Adds a way: what `queue` puts into the stream; it returns whether it could.
  template <typename Queue>
  bool capture(Queue queue) {
    if (!good_ || cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed) != cudaSuccess) return false;
    const bool queued = queue();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t way = nullptr;
    const bool ended = cudaStreamEndCapture(stream_, &graph) == cudaSuccess;
    if (queued && ended && cudaGraphInstantiate(&way, graph, 0) == cudaSuccess) ways_.push_back(way);
    if (graph) cudaGraphDestroy(graph);
    return way != nullptr;
  }

  // Runs all in turns, each for about a millisecond a turn.
  bool run() {
    constexpr int kTurns = 7;
    constexpr float kTurn = 1e3f, kPauses = 2;  // microseconds; pauses: of the time before
    std::vector<int> runs;
    for (cudaGraphExec_t way : ways_) {
      float first = 0, second = 0;
      if (!span(way, 1, &first) || !span(way, 1, &second)) return false;
      runs.push_back(std::clamp(static_cast<int>(kTurn / second), 1, 50));
    }
    times_.assign(ways_.size(), {});
    for (int turn = 0; turn < kTurns; turn++)
      for (size_t i = 0; i < ways_.size(); i++) {
        float taken = 0;
        if (!span(ways_[i], runs[i], &taken)) return false;
        times_[i].push_back(taken / runs[i]);
        std::this_thread::sleep_for(std::chrono::microseconds(static_cast<int64_t>(kPauses * taken)));
      }
    return true;
  }

  // Of one run, the median of the turns.
  float microseconds(size_t way) {
    std::vector<float>& times = times_[way];
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

 private:
  bool span(cudaGraphExec_t way, int runs, float* microseconds) const {
    cudaEventRecord(start_, stream_);
    for (int i = 0; i < runs; i++) cudaGraphLaunch(way, stream_);
    float milliseconds = 0;
    if (cudaEventRecord(end_, stream_) != cudaSuccess || cudaEventSynchronize(end_) != cudaSuccess ||
        cudaEventElapsedTime(&milliseconds, start_, end_) != cudaSuccess)
      return false;
    *microseconds = milliseconds * 1e3f;
    return true;
  }

  cudaStream_t stream_;
  cudaEvent_t start_ = nullptr, end_ = nullptr;
  bool good_ = false;
  std::vector<cudaGraphExec_t> ways_;
  std::vector<std::vector<float>> times_;
};

}  // namespace kiln::cuda
