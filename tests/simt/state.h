// What the parts of the machine share.
#pragma once

#include <deque>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "machine.h"
#include "sanitizers.h"
#include "shared_memory.h"

namespace simt {

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
  const void* arrived_at;
  alignas(8) unsigned char in[8], out[8];
};
// The meetings of a block or of a warp. What orders the threads of one must not order those of the next, which some
// of them reach while others leave this one: two take turns.
struct Meetings {
  unsigned arrived = 0, count = 0;
  Thread* first = nullptr;
  SyncPoint* points = nullptr;  // two
  SyncPoint& point() const { return points[count % 2]; }
};
struct Warp : Meetings {
  unsigned finished = 0;  // a lane a bit, as `arrived` of a warp
  WarpOp op = WarpOp::sync;
};
struct Barrier : Meetings {
  Votes votes{}, result{};
};
struct Unwind {};  // ends a thread after a diagnosis

struct Machine {
  Order order = Order::forward;
  Overrides overrides;
  bool capturing = false;
  std::mt19937_64 random;
  Counters counters;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barrier;
  unsigned finished;
  uint64_t absent = 0;  // blocks of the launch that are left out, until somebody has counted their arrivals
  std::deque<Thread*> ready;
  Thread* self = nullptr;
  SharedMemory shared;
  void (*body)(const void*);
  const void* context;
  std::string diagnosis;
  bool unwinding = false;
};
extern Machine machine;

std::string name(const Thread& t);
bool same(Where a, Where b);

void diagnose(const std::string& what);  // the first counts
[[noreturn]] void fail(const std::string& what);
// A thread that has counted an arrival must have been at a fence since.
void check_arrival(const Thread& t);

void make_ready(Thread& t, State state = State::ready);
void wait(State state);
// Whoever completes a meeting queues up too, so that the order decides who goes on first.
void go_on_with(Thread& self);

// Around the blocks of a launch.
void begin_threads(dim3 threads);
void end_threads();
// `turn`: how many blocks of the launch ran before.
void run_block(size_t dynamic_bytes, uint64_t turn, Where where);

}  // namespace simt
