// The machine that runs kernels on the host: blocks one after another, a block's threads as fibers in a chosen order.
// It stops at the first thing that a GPU would leave undefined, and says where in the kernel and in which threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace simt {

// A place in a source file; as a default argument, the caller's.
struct Where {
  const char* file;
  int line;
  static constexpr Where current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// forward: threads and blocks by ascending index. reverse: descending, and a warp that can goes on alone, as far ahead
// of the others as barriers let it. random: any thread that can run, and shuffled blocks, from a seed.
enum class Order { forward, reverse, random };

struct Counters {
  int64_t launches = 0, blocks = 0, switches = 0, copies = 0;
};

void set_order(Order order, uint64_t seed);  // and starts the counters afresh
const Counters& counters();

// What a test may ask for instead of what the kernels' code says.
struct Overrides {
  int block_threads = 0, chunk = 0;  // 0: as usual
  std::vector<int64_t> blocks;       // run these alone, -1 the last, where the grid has them; none: all of them
};
void set_overrides(const Overrides& overrides);
unsigned block_threads(int usual, int most);
int chunk_size(int usual);

// What host code sees of the stream: whether it is being captured into a graph, and copies to the device.
void set_capturing(bool on);
bool capturing();
void count_copy();

struct Launch {
  dim3 blocks, threads;
  size_t shared_bytes, parameter_bytes;
};
// Runs thread(context) for every thread of the grid. Throws std::runtime_error with the diagnosis.
void run(const Launch& launch, void (*thread)(const void*), const void* context, Where where);

// ---- called by threads ----

struct Votes {
  int any, count;
};
Votes block_barrier(int vote, Where where);

enum class WarpOp { sync, shuffle, vote };
// Meets the other lanes of the warp. shuffle: `out` gets the `bytes` that `lane` brought. vote: `out` gets the mask of
// lanes that brought a nonzero first byte.
void warp_meet(WarpOp op, unsigned mask, int lane, const void* in, void* out, size_t bytes, Where where);

void* shared_array(const void* key, size_t bytes, Where where);  // the same memory for all threads of the block
void* dynamic_shared(Where where);
void check_aligned(const volatile void* address, size_t alignment, Where where);
int lane_of_this_thread();

// A thread that counts the arrivals of blocks is read from, and goes on to read, what other blocks wrote: there is to
// be a fence before, and one after, at the latest at the next barrier.
// Returns how many blocks are to be counted besides its own: those that an override leaves out.
unsigned count_arrival(const void* counter, Where where);
void fence();

}  // namespace simt
