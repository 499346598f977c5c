#include "machine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "launch_limits.h"
#include "state.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {

Machine machine;

std::string name(const Thread& t) { return "thread " + text(t.index) + " of block " + text(blockIdx); }
bool same(Where a, Where b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

void diagnose(const std::string& what) {
  if (machine.diagnosis.empty()) machine.diagnosis = what;
}
void fail(const std::string& what) {
  diagnose(what);
  throw Unwind{};
}

namespace {

// The blocks to run, the i-th of them first.
class BlockOrder {
 public:
  explicit BlockOrder(uint64_t blocks) : count_(blocks) {
    for (const int64_t block : machine.overrides.blocks) {
      const uint64_t index = block < 0 ? blocks - uint64_t(-block) : uint64_t(block);
      if (index < blocks) chosen_.push_back(index);
    }
    if (!chosen_.empty()) count_ = chosen_.size();
    if (machine.order != Order::random) return;
    start_ = machine.random() % count_;
    do stride_ = 1 + machine.random() % count_;
    while (std::gcd(stride_, count_) != 1);
  }
  uint64_t count() const { return count_; }
  uint64_t operator[](uint64_t i) const {
    const uint64_t at = machine.order == Order::reverse ? count_ - 1 - i : (start_ + i * stride_) % count_;
    return chosen_.empty() ? at : chosen_[at];
  }

 private:
  uint64_t count_, start_ = 0, stride_ = 1;
  std::vector<uint64_t> chosen_;
};

}  // namespace

void set_order(Order order, uint64_t seed) {
  machine.order = order;
  machine.random.seed(seed);
  machine.counters = {};
}
const Counters& counters() { return machine.counters; }

void set_overrides(const Overrides& overrides) { machine.overrides = overrides; }
unsigned block_threads(int usual, int most) {
  const int other = machine.overrides.block_threads;
  return unsigned(other == 0 ? usual : std::min(other, most));
}
int chunk_size(int usual) { return machine.overrides.chunk == 0 ? usual : machine.overrides.chunk; }

void set_capturing(bool on) { machine.capturing = on; }
bool capturing() { return machine.capturing; }
void count_copy() { machine.counters.copies += 1; }

void run(const Launch& launch, void (*thread)(const void*), const void* context, Where where) {
  check_launch(launch, where);
  const Untracked untracked;
  machine.body = thread;
  machine.context = context;
  machine.diagnosis.clear();
  machine.counters.launches += 1;
  machine.shared.begin_launch();
  gridDim = launch.blocks;
  blockDim = launch.threads;
  const uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
  const BlockOrder order(blocks);
  machine.absent = blocks - order.count();
  begin_threads(launch.threads);
  for (uint64_t i = 0; i < order.count() && machine.diagnosis.empty(); ++i) {
    const uint64_t block = order[i];
    blockIdx = {unsigned(block % gridDim.x), unsigned(block / gridDim.x % gridDim.y),
                unsigned(block / gridDim.x / gridDim.y)};
    run_block(launch.shared_bytes, i, where);
  }
  end_threads();
  if (!machine.diagnosis.empty())
    throw std::runtime_error("simt: " + machine.diagnosis + " [kernel launched at " + text(where) + "]");
}

}  // namespace simt
