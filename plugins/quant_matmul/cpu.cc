// Cuts a call into ranges of rows or blocks of rows and panels, and runs them on the caller's threads.
#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "../isa.h"
#include "kernels.h"

namespace kiln {
namespace {

// Elements per range of rows, about: some 5 us of work. A call of one range, a decode step say, runs inline, as waking
// another thread takes as long.
constexpr int64_t kRangeElements = 16384;
constexpr int64_t kFewRows = 16;  // up to so many, the time to read the weights counts, not the products
// Bytes of weights per block of few rows, and products per block of many: some 10 to 20 us of work.
constexpr int64_t kLeastBytes = 32 << 10, kMostBytes = 256 << 10;
constexpr int64_t kLeastProducts = 1 << 20, kMostProducts = 4 << 20;
constexpr int64_t kPanelsAbreast = 4;  // at most, in a register block
// Rows per block. Integers: each row is summed up once a block, so blocks are wide and low. Floats: a widened tile must
// serve many rows.
constexpr int64_t kInt8BlockRows = 48, kFloatBlockRows = 192;

// Memory of a thread, kept from call to call.
class Scratch {
 public:
  // 64-byte aligned; throws std::bad_alloc.
  char* take(size_t bytes) {
    if (bytes > size_) {
      size_ = 0;
      data_.reset(new char[bytes + 64]);
      size_ = bytes;
    }
    char* data = data_.get();
    return data + (64 - reinterpret_cast<uintptr_t>(data) % 64) % 64;
  }

 private:
  std::unique_ptr<char[]> data_;
  size_t size_ = 0;
};

thread_local Scratch scratch_of_thread;

// body(index, scratch) for [0, count). Threads take the pieces one by one: the pool's own split would leave one idle
// while another, which was woken late, works off its half.
template <typename Body>
std::string for_each_piece(int64_t count, size_t scratch_bytes, Parallel& parallel, const Body& body) {
  struct Pieces {
    const Body& body;
    int64_t count;
    size_t scratch_bytes;
    std::atomic<int64_t> next{0};
    std::atomic<bool> out_of_memory{false};

    void work_off() try {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
        body(i, scratch_of_thread.take(scratch_bytes));
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  } pieces{body, count, scratch_bytes};
  if (count == 1)
    pieces.work_off();
  else if (count > 1)
    parallel.run(
        static_cast<size_t>(count), [](void* user, size_t) { static_cast<Pieces*>(user)->work_off(); }, &pieces);
  return pieces.out_of_memory ? "out of memory for the scratch area of a thread" : "";
}

template <typename Call>
std::string run_rows(const Call& call, const Kernel<Call, Rows>& kernel, Parallel& parallel) {
  const int64_t rows = std::max<int64_t>(1, kRangeElements / std::max<int64_t>(1, call.depth));
  return for_each_piece(pieces_of(call.rows, rows), kernel.scratch_bytes(call, rows), parallel,
                        [&](int64_t index, char* scratch) {
                          kernel.run(call, {index * rows, std::min(call.rows, (index + 1) * rows)}, scratch);
                        });
}

// Panels per block, whole register blocks of them.
int64_t panels_per_block(const PackedWeights& weights, int64_t rows, int64_t block_rows) {
  const bool few = rows <= kFewRows;
  const int64_t work = few ? panel_bytes_of(weights) : block_rows * weights.depth * kPanel;  // of a panel
  const int64_t all = work * panels_of(weights) * (few ? 1 : pieces_of(rows, block_rows));
  const int64_t wanted = few ? std::clamp(all / 16, kLeastBytes, kMostBytes)  //
                             : std::clamp(all / 32, kLeastProducts, kMostProducts);
  return pieces_of(wanted / std::max<int64_t>(1, work), kPanelsAbreast) * kPanelsAbreast;
}

template <typename Call>
std::string run_product(const Call& call, const Kernel<Call, Block>& kernel, int64_t most_rows, Parallel& parallel) {
  if (call.rows == 0 || call.weights.width == 0) return {};
  const int64_t rows = std::min(call.rows, most_rows), panels = panels_of(call.weights);
  const int64_t width = std::max(kPanelsAbreast, panels_per_block(call.weights, call.rows, rows));
  const int64_t down = pieces_of(call.rows, rows), across = pieces_of(panels, width);
  return for_each_piece(down * across, kernel.scratch_bytes(call, rows), parallel, [&](int64_t index, char* scratch) {
    const int64_t row = index % down * rows, panel = index / down * width;  // neighbours share their weights
    kernel.run(call, {row, std::min(rows, call.rows - row), panel, std::min(width, panels - panel)}, scratch);
  });
}

}  // namespace

std::string run(const QuantizeRows& call, Parallel& parallel) {
  return run_rows(call, KILN_FOR_ISA_VNNI(quant_matmul).quantize_rows, parallel);
}

std::string run(const AddRmsNormQuantize& call, Parallel& parallel) {
  return run_rows(call, KILN_FOR_ISA_VNNI(quant_matmul).add_rms_norm_quantize, parallel);
}

std::string run(const SwiGluQuantize& call, Parallel& parallel) {
  return run_rows(call, KILN_FOR_ISA_VNNI(quant_matmul).swiglu_quantize, parallel);
}

std::string run(const Int8MatMul& call, Parallel& parallel) {
  return run_product(call, KILN_FOR_ISA_VNNI(quant_matmul).int8_matmul, kInt8BlockRows, parallel);
}

std::string run(const WeightMatMul& call, Parallel& parallel) {
  return run_product(call, KILN_FOR_ISA_VNNI(quant_matmul).weight_matmul, kFloatBlockRows, parallel);
}

}  // namespace kiln
