#include "machine.h"

#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "fiber.h"
#include "launch_limits.h"
#include "shared_memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {
namespace {

constexpr unsigned kWarp = 32;

enum class State { fresh, ready, at_barrier, at_warp, finished };

struct Thread {
  uint3 index;
  unsigned lane, warp;
  State state;
  Fiber* fiber;
  Where where;  // it waits
  int source_lane;
  bool fenced, owes_fence;  // since its last arrival
  Where arrival;
  alignas(8) unsigned char in[8], out[8];
};
struct Warp {
  unsigned arrived, finished;
  WarpOp op;
  Thread* first;
};
struct Barrier {
  unsigned arrived;
  Thread* first;
  Votes votes, result;
};
struct Unwind {};  // ends a thread after a diagnosis

struct Machine {
  Order order = Order::forward;
  bool capturing = false;
  std::mt19937_64 random;
  Counters counters;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barrier;
  unsigned finished;
  std::deque<Thread*> ready;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  Thread* self = nullptr;
  SharedMemory shared;
  void (*body)(const void*);
  const void* context;
  std::string diagnosis;
  bool unwinding = false;
};
Machine machine;

std::string name(const Thread& t) { return "thread " + text(t.index) + " of block " + text(blockIdx); }
bool same(Where a, Where b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

void diagnose(const std::string& what) {
  if (machine.diagnosis.empty()) machine.diagnosis = what;
}
[[noreturn]] void fail(const std::string& what) {
  diagnose(what);
  throw Unwind{};
}

void make_ready(Thread& t, State state = State::ready) {
  t.state = state;
  machine.ready.push_back(&t);
}

Thread* next_ready() {
  auto& ready = machine.ready;
  if (machine.order == Order::random) std::swap(ready.back(), ready[machine.random() % ready.size()]);
  const bool from_back = machine.order != Order::forward;
  Thread* t = from_back ? ready.back() : ready.front();
  from_back ? ready.pop_back() : ready.pop_front();
  return t;
}

void check_arrival(const Thread& t) {
  if (t.owes_fence) fail("no fence after the arrival of " + name(t) + " at " + text(t.arrival));
}

void run_thread() {
  try {
    machine.body(machine.context);
    check_arrival(*machine.self);
  } catch (const Unwind&) {
  }
  Thread& t = *machine.self;
  t.state = State::finished;
  machine.finished += 1;
  machine.warps[t.warp].finished |= 1u << t.lane;
}
void fiber_main() {
  for (;;) {
    run_thread();
    Fiber::park();
  }
}

void resume(Thread& t) {
  if (t.state == State::fresh) {
    if (machine.idle.empty()) {
      machine.fibers.push_back(std::make_unique<Fiber>(fiber_main));
      machine.idle.push_back(machine.fibers.back().get());
    }
    t.fiber = machine.idle.back();
    machine.idle.pop_back();
    t.state = State::ready;
  }
  machine.self = &t;
  threadIdx = t.index;
  machine.counters.switches += 1;
  t.fiber->resume();
  if (t.state == State::finished) machine.idle.push_back(t.fiber);
}

void wait(State state) {
  machine.self->state = state;
  Fiber::park();
  if (machine.unwinding) throw Unwind{};
}
// Whoever completes a meeting queues up too, so that the order decides who goes on first.
void go_on_with(Thread& self) {
  make_ready(self);
  Fiber::park();
  if (machine.unwinding) throw Unwind{};
}

void diagnose_stuck() {
  std::string what = "stuck in block " + text(blockIdx) + ": " + std::to_string(machine.finished) + " of " +
                     std::to_string(machine.threads.size()) + " threads have returned";
  for (const auto& [state, kind] : {std::pair{State::at_barrier, "a block barrier"}, {State::at_warp, "their warp"}}) {
    const Thread* first = nullptr;
    int count = 0;
    for (const Thread& t : machine.threads) {
      if (t.state != state) continue;
      if (first == nullptr) first = &t;
      ++count;
    }
    if (first == nullptr) continue;
    what += ", " + std::to_string(count) + " wait for " + kind + " at " + text(first->where) + " (first: thread " +
            text(first->index) + ")";
  }
  diagnose(what);
}

void prepare_block(dim3 threads) {
  machine.threads.resize(threads.x * threads.y * threads.z);
  machine.warps.assign((machine.threads.size() + kWarp - 1) / kWarp, Warp{});
  machine.barrier = {};
  machine.finished = 0;
  machine.ready.clear();
  for (unsigned i = 0; i < machine.threads.size(); ++i) {
    Thread& t = machine.threads[i];
    t.index = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
    t.lane = i % kWarp;
    t.warp = i / kWarp;
    t.fenced = t.owes_fence = false;
    make_ready(t, State::fresh);
  }
}

void run_block(dim3 threads, size_t dynamic_bytes, Where where) {
  prepare_block(threads);
  if (dynamic_bytes > 0) machine.shared.allocate(nullptr, dynamic_bytes, where);
  while (!machine.ready.empty() && machine.diagnosis.empty()) resume(*next_ready());
  if (machine.diagnosis.empty() && machine.finished < machine.threads.size()) diagnose_stuck();
  machine.unwinding = true;
  for (Thread& t : machine.threads)
    if (t.state != State::finished && t.state != State::fresh) resume(t);
  machine.unwinding = false;
  machine.self = nullptr;
  const std::string damage = machine.shared.release();
  if (!damage.empty()) diagnose(damage + " in block " + text(blockIdx));
  machine.counters.blocks += 1;
}

// The i-th block to run, of `count`.
struct BlockOrder {
  uint64_t count, start = 0, stride = 1;
  explicit BlockOrder(uint64_t count) : count(count) {
    if (machine.order != Order::random) return;
    start = machine.random() % count;
    do stride = 1 + machine.random() % count;
    while (std::gcd(stride, count) != 1);
  }
  uint64_t operator[](uint64_t i) const {
    return machine.order == Order::reverse ? count - 1 - i : (start + i * stride) % count;
  }
};

void check_meeting(const Thread& self, const Warp& warp, WarpOp op, unsigned mask, Where where) {
  const bool whole = (self.warp + 1) * kWarp <= machine.threads.size();
  const bool together = warp.arrived == 0 || (warp.op == op && same(warp.first->where, where));
  if (whole && mask == ~0u && warp.finished == 0 && together) return;
  const std::string at = "warp collective at " + text(where) + ": ";
  if (!whole) fail(at + "the block is no whole number of warps");
  if (mask != ~0u) fail(at + name(self) + " names a partial mask; ours are full, in converged code");
  if (!together)
    fail("divergent " + at + name(self) + " is here, " + name(*warp.first) + " at " + text(warp.first->where));
  fail(at + name(machine.threads[self.warp * kWarp + unsigned(__builtin_ctz(warp.finished))]) +
       " has returned and cannot take part");
}

}  // namespace

void set_order(Order order, uint64_t seed) {
  machine.order = order;
  machine.random.seed(seed);
  machine.counters = {};
}
const Counters& counters() { return machine.counters; }

void set_capturing(bool on) { machine.capturing = on; }
bool capturing() { return machine.capturing; }
void count_copy() { machine.counters.copies += 1; }

void run(const Launch& launch, void (*thread)(const void*), const void* context, Where where) {
  check_launch(launch, where);
  machine.body = thread;
  machine.context = context;
  machine.diagnosis.clear();
  machine.counters.launches += 1;
  gridDim = launch.blocks;
  blockDim = launch.threads;
  const BlockOrder order(uint64_t(gridDim.x) * gridDim.y * gridDim.z);
  for (uint64_t i = 0; i < order.count && machine.diagnosis.empty(); ++i) {
    const uint64_t block = order[i];
    blockIdx = {unsigned(block % gridDim.x), unsigned(block / gridDim.x % gridDim.y),
                unsigned(block / gridDim.x / gridDim.y)};
    run_block(launch.threads, launch.shared_bytes, where);
  }
  if (!machine.diagnosis.empty())
    throw std::runtime_error("simt: " + machine.diagnosis + " [kernel launched at " + text(where) + "]");
}

Votes block_barrier(int vote, Where where) {
  Thread& self = *machine.self;
  Barrier& b = machine.barrier;
  check_arrival(self);
  self.where = where;
  if (b.arrived > 0 && !same(b.first->where, where))
    fail("divergent barrier: " + name(self) + " is at " + text(where) + ", " + name(*b.first) + " at " +
         text(b.first->where));
  if (b.arrived == 0) b.first = &self;
  b.votes.any |= vote != 0;
  b.votes.count += vote != 0;
  if (++b.arrived < machine.threads.size()) {
    wait(State::at_barrier);
    return b.result;
  }
  b.result = b.votes;
  b.votes = {};
  b.arrived = 0;
  for (Thread& t : machine.threads)
    if (&t != &self) make_ready(t);
  go_on_with(self);
  return b.result;
}

void warp_meet(WarpOp op, unsigned mask, int lane, const void* in, void* out, size_t bytes, Where where) {
  Thread& self = *machine.self;
  Warp& warp = machine.warps[self.warp];
  Thread* lanes = &machine.threads[self.warp * kWarp];
  check_meeting(self, warp, op, mask, where);
  if (warp.arrived == 0) warp.first = &self;
  warp.op = op;
  warp.arrived |= 1u << self.lane;
  self.where = where;
  self.source_lane = lane;
  if (bytes > 0) std::memcpy(self.in, in, bytes);
  if (warp.arrived != ~0u) {
    wait(State::at_warp);
  } else {
    unsigned votes = 0;
    for (unsigned l = 0; l < kWarp; ++l) votes |= unsigned(lanes[l].in[0] != 0) << l;
    for (unsigned l = 0; l < kWarp; ++l) {
      if (op == WarpOp::vote) std::memcpy(lanes[l].out, &votes, sizeof(votes));
      if (op == WarpOp::shuffle) std::memcpy(lanes[l].out, lanes[lanes[l].source_lane].in, 8);
      if (&lanes[l] != &self) make_ready(lanes[l]);
    }
    warp.arrived = 0;
    go_on_with(self);
  }
  if (out != nullptr) std::memcpy(out, self.out, op == WarpOp::vote ? sizeof(unsigned) : bytes);
}

void* shared_array(const void* key, size_t bytes, Where where) {
  if (void* array = machine.shared.find(key)) return array;
  if (!machine.shared.fits(bytes)) fail("more than 48 KB of static shared memory at " + text(where));
  return machine.shared.allocate(key, bytes, where);
}
void* dynamic_shared(Where where) {
  if (void* array = machine.shared.find(nullptr)) return array;
  fail("dynamic shared memory is used at " + text(where) + ", but the launch asked for none");
}

void check_aligned(const volatile void* address, size_t alignment, Where where) {
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
  fail("misaligned vector access of " + std::to_string(alignment) + " bytes at " + text(where) + " by " +
       name(*machine.self));
}
void count_arrival(Where where) {
  Thread& self = *machine.self;
  check_arrival(self);
  if (!self.fenced) fail("no fence before the arrival of " + name(self) + " at " + text(where));
  self.fenced = false;
  self.owes_fence = true;
  self.arrival = where;
}
void fence() {
  machine.self->fenced = true;
  machine.self->owes_fence = false;
}
int lane_of_this_thread() { return int(machine.self->lane); }

}  // namespace simt
