// What threads of a kernel call.
#include <cstring>
#include <utility>

#include "launch_limits.h"
#include "state.h"

namespace simt {
namespace {

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

// All lanes have brought theirs: each gets what it asked for.
void exchange(WarpOp op, Thread* lanes, const Thread& self) {
  unsigned votes = 0;
  for (unsigned l = 0; l < kWarp; ++l) votes |= unsigned(lanes[l].in[0] != 0) << l;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (op == WarpOp::vote) std::memcpy(lanes[l].out, &votes, sizeof(votes));
    if (op == WarpOp::shuffle) std::memcpy(lanes[l].out, lanes[lanes[l].source_lane].in, 8);
    if (&lanes[l] != &self) make_ready(lanes[l]);
  }
}

}  // namespace

Votes block_barrier(int vote, Where where) {
  const Untracked untracked;
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
  SyncPoint& point = b.point();
  point.leave();
  if (++b.arrived < machine.threads.size()) {
    wait(State::at_barrier);
  } else {
    b.result = b.votes;
    b.votes = {};
    b.arrived = 0;
    b.count += 1;
    for (Thread& t : machine.threads)
      if (&t != &self) make_ready(t);
    go_on_with(self);
  }
  point.take();
  return b.result;
}

void warp_meet(WarpOp op, unsigned mask, int lane, const void* in, void* out, size_t bytes, Where where) {
  const Untracked untracked;
  Thread& self = *machine.self;
  Warp& warp = machine.warps[self.warp];
  check_meeting(self, warp, op, mask, where);
  if (warp.arrived == 0) warp.first = &self;
  warp.op = op;
  warp.arrived |= 1u << self.lane;
  self.where = where;
  self.source_lane = lane;
  if (bytes > 0) std::memcpy(self.in, in, bytes);
  SyncPoint& point = warp.point();
  point.leave();
  if (warp.arrived != ~0u) {
    wait(State::at_warp);
  } else {
    exchange(op, &machine.threads[self.warp * kWarp], self);
    warp.arrived = 0;
    warp.count += 1;
    go_on_with(self);
  }
  point.take();
  if (out != nullptr) std::memcpy(out, self.out, op == WarpOp::vote ? sizeof(unsigned) : bytes);
}

void* shared_array(const void* key, size_t bytes, Where where) {
  const Untracked untracked;
  if (void* array = machine.shared.find(key)) return array;
  if (!machine.shared.fits(bytes)) fail("more than 48 KB of static shared memory at " + text(where));
  if (void* array = machine.shared.allocate(key, bytes, where)) return array;
  fail("the machine has no shared memory left for another block of this launch, at " + text(where));
}
void* dynamic_shared(Where where) {
  const Untracked untracked;
  if (void* array = machine.shared.find(nullptr)) return array;
  fail("dynamic shared memory is used at " + text(where) + ", but the launch asked for none");
}

void check_aligned(const volatile void* address, size_t alignment, Where where) {
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
  const Untracked untracked;
  fail("misaligned vector access of " + std::to_string(alignment) + " bytes at " + text(where) + " by " +
       name(*machine.self));
}

unsigned count_arrival(const void* counter, Where where) {
  const Untracked untracked;
  Thread& self = *machine.self;
  check_arrival(self);
  if (!self.fenced) fail("no fence before the arrival of " + name(self) + " at " + text(where));
  sync_point(counter).leave();
  self.fenced = false;
  self.owes_fence = true;
  self.arrival = where;
  self.arrived_at = counter;
  return unsigned(std::exchange(machine.absent, 0));
}
void fence() {
  Thread& self = *machine.self;
  if (self.owes_fence) sync_point(self.arrived_at).take();
  self.fenced = true;
  self.owes_fence = false;
}
int lane_of_this_thread() { return int(machine.self->lane); }

}  // namespace simt
