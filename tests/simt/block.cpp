// A block: its threads on fibers, until all have returned or can go no further.
#include <memory>

#include "launch_limits.h"
#include "state.h"

namespace simt {
namespace {

// Fibers that are at nothing. A race detector takes what runs on one fiber for ordered, so there every thread of a
// block has its own, and the next block has others.
struct Fibers {
  std::vector<std::unique_ptr<Fiber>> all;
  std::vector<Fiber*> idle;
};
Fibers fibers[2];
constexpr size_t kPoints = 2 * (1 + 1024 / kWarp);
struct SyncPoints {
  SyncPoint launch, finished, of_block[2][kPoints];
} points;

void run_thread() {
  points.launch.take();
  try {
    machine.body(machine.context);
    check_arrival(*machine.self);
  } catch (const Unwind&) {
  }
  const Untracked untracked;
  points.finished.leave();
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

void add_fiber(Fibers& to) {
  to.all.push_back(std::make_unique<Fiber>(fiber_main));
  to.idle.push_back(to.all.back().get());
}

Thread* next_ready() {
  auto& ready = machine.ready;
  if (machine.order == Order::random) std::swap(ready.back(), ready[machine.random() % ready.size()]);
  const bool from_back = machine.order != Order::forward;
  Thread* t = from_back ? ready.back() : ready.front();
  from_back ? ready.pop_back() : ready.pop_front();
  return t;
}

void resume(Thread& t, Fibers& on) {
  if (t.state == State::fresh) {
    if (on.idle.empty()) add_fiber(on);
    t.fiber = on.idle.back();
    on.idle.pop_back();
    t.state = State::ready;
  }
  machine.self = &t;
  threadIdx = t.index;
  machine.counters.switches += 1;
  t.fiber->resume();
  if (t.state == State::finished && !kFindsRaces) on.idle.push_back(t.fiber);
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

void prepare_block(SyncPoint* of_block) {
  machine.warps.assign((machine.threads.size() + kWarp - 1) / kWarp, Warp{});
  machine.barrier = {};
  machine.barrier.points = of_block;
  for (size_t i = 0; i < machine.warps.size(); ++i) machine.warps[i].points = of_block + 2 * (1 + i);
  machine.finished = 0;
  machine.ready.clear();
  for (unsigned i = 0; i < machine.threads.size(); ++i) {
    Thread& t = machine.threads[i];
    t.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    t.lane = i % kWarp;
    t.warp = i / kWarp;
    t.fenced = t.owes_fence = false;
    make_ready(t, State::fresh);
  }
}

}  // namespace

void check_arrival(const Thread& t) {
  if (t.owes_fence) fail("no fence after the arrival of " + name(t) + " at " + text(t.arrival));
}

void make_ready(Thread& t, State state) {
  t.state = state;
  machine.ready.push_back(&t);
}
void wait(State state) {
  machine.self->state = state;
  Fiber::park();
  if (machine.unwinding) throw Unwind{};
}
void go_on_with(Thread& self) {
  make_ready(self);
  Fiber::park();
  if (machine.unwinding) throw Unwind{};
}

void begin_threads(dim3 threads) {
  machine.threads.resize(threads.x * threads.y * threads.z);
  // One that is made between two blocks would be ordered after the first.
  for (Fibers& f : fibers)
    while (kFindsRaces && f.all.size() < machine.threads.size()) add_fiber(f);
  points.launch.leave();
}
void end_threads() { points.finished.take(); }

void run_block(size_t dynamic_bytes, uint64_t turn, Where where) {
  const unsigned side = kFindsRaces ? turn % 2 : 0;
  Fibers& on = fibers[side];
  prepare_block(points.of_block[side]);
  if (dynamic_bytes > 0) machine.shared.allocate(nullptr, dynamic_bytes, where);
  while (!machine.ready.empty() && machine.diagnosis.empty()) resume(*next_ready(), on);
  if (machine.diagnosis.empty() && machine.finished < machine.threads.size()) diagnose_stuck();
  machine.unwinding = true;
  for (Thread& t : machine.threads)
    if (t.state != State::finished && t.state != State::fresh) resume(t, on);
  machine.unwinding = false;
  machine.self = nullptr;
  if (kFindsRaces) {
    on.idle.clear();
    for (const auto& fiber : on.all) on.idle.push_back(fiber.get());
  }
  const std::string damage = machine.shared.release();
  if (!damage.empty()) diagnose(damage + " in block " + text(blockIdx));
  machine.counters.blocks += 1;
}

}  // namespace simt
