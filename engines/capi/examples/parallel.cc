// Serves concurrent requests from several threads, and cancels some of them halfway.
//
//   c++ -std=c++17 -pthread parallel.cc $(pkg-config --cflags --libs kiln) -o parallel
//   ./parallel BUNDLE [THREADS [REQUESTS_PER_THREAD [PROMPT [PYTHON]]]]
//
// Every third request is cancelled after its first token. At the end all must have had an outcome: the program prints
// how many finished and how many were cancelled, and whether equal requests got equal answers.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kiln.h"

namespace {

const kiln_api *kiln = kiln_get_api(KILN_API_VERSION);

// Turns a status into an exception, on this side of the boundary.
void require(kiln_status *status) {
  if (status == nullptr) return;
  std::string message = kiln->status_message(status);
  kiln->status_free(status);
  throw std::runtime_error(message);
}

struct Release {
  void operator()(const void *memory) const { kiln->status_free(kiln->release(memory)); }
};
struct Close {
  void operator()(kiln_engine *engine) const { kiln->status_free(kiln->close(engine)); }
  void operator()(kiln_stream *stream) const { kiln->status_free(kiln->stream_close(stream)); }
};
using Chunk = std::unique_ptr<const kiln_chunk, Release>;
using Engine = std::unique_ptr<kiln_engine, Close>;
using Stream = std::unique_ptr<kiln_stream, Close>;

Engine open(const char *bundle, const char *python) {
  kiln_open_params params;
  require(kiln->default_open_params(&params, sizeof params));
  params.bundle = bundle;
  params.python_executable = python;
  kiln_engine *engine = nullptr;
  require(kiln->open(&params, &engine));
  return Engine(engine);
}

struct Outcome {
  std::string text;
  int32_t finish = KILN_UNFINISHED;
};

Outcome ask(kiln_engine *engine, const std::string &prompt, bool cancel) {
  kiln_request request;
  require(kiln->default_request(&request, sizeof request));
  request.prompt = prompt.c_str();
  request.max_tokens = 24;
  request.ignore_eos = 1;
  kiln_stream *handle = nullptr;
  require(kiln->submit(engine, &request, &handle));
  Stream stream(handle);
  Outcome outcome;
  for (;;) {
    kiln_event event = KILN_NOTHING_YET;
    const kiln_chunk *found = nullptr;
    require(kiln->wait(stream.get(), INFINITY, &event, &found));
    if (event == KILN_END) return outcome;
    Chunk chunk(found);
    outcome.text.append(chunk->text, chunk->text_length);
    outcome.finish = chunk->finish;
    if (cancel) require(kiln->cancel(stream.get()));
  }
}

struct Counts {
  std::atomic<int> finished{0}, cancelled{0}, different{0}, failed{0};
};

void serve(kiln_engine *engine, int requests, const std::string &prompt, const std::string &expected, Counts &counts) {
  for (int number = 0; number < requests; ++number) try {
      const bool cancel = number % 3 == 2;
      const Outcome outcome = ask(engine, prompt, cancel);
      // A cancelled request may have finished before the cancellation came.
      (outcome.finish == KILN_CANCELLED ? counts.cancelled : counts.finished)++;
      if (expected.compare(0, outcome.text.size(), outcome.text) != 0) counts.different++;
      if (!cancel && outcome.text != expected) counts.different++;
    } catch (const std::exception &error) {
      std::fprintf(stderr, "%s\n", error.what());
      counts.failed++;
    }
}

}  // namespace

int main(int argc, char **argv) try {
  if (argc < 2 || kiln == nullptr) {
    std::fprintf(stderr, "usage: %s BUNDLE [THREADS [REQUESTS_PER_THREAD [PROMPT [PYTHON]]]]\n", argv[0]);
    return 2;
  }
  const int threads = argc > 2 ? std::atoi(argv[2]) : 8, requests = argc > 3 ? std::atoi(argv[3]) : 9;
  const std::string prompt = argc > 4 ? argv[4] : "The sea is";
  Engine engine = open(argv[1], argc > 5 ? argv[5] : nullptr);
  const std::string expected = ask(engine.get(), prompt, false).text;
  Counts counts;
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i)
    workers.emplace_back(serve, engine.get(), requests, prompt, expected, std::ref(counts));
  for (auto &worker : workers) worker.join();
  std::printf("%d finished, %d cancelled, %d different, %d failed\n", counts.finished.load(), counts.cancelled.load(),
              counts.different.load(), counts.failed.load());
  return counts.different + counts.failed == 0 ? 0 : 1;
} catch (const std::exception &error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
