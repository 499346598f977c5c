// Kernels that are wrong on purpose, so that the tests can see the machine notice. A line that must be named in the
// diagnosis ends in `// here`.
#include "faults.h"

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>

#include "../../csrc/cuda/device.h"

namespace lightning_apex {
namespace {

constexpr unsigned kThreads = 64;

__global__ void divergent_barrier(float*) {
  if (threadIdx.x < 32)
    __syncthreads();  // here
  else
    __syncthreads();  // here
}

__global__ void early_return(float*) {
  if (threadIdx.x == 7) return;
  __syncthreads();  // here
}

__global__ void barrier_or_warp(float* out) {
  if (threadIdx.x < 48)
    __syncthreads();  // here
  else
    *out = __shfl_xor_sync(kFullWarp, 1.0f, 1);  // here
}

__global__ void missing_barrier(float* out) {
  APEX_SHARED(values, float[kThreads]);
  values[threadIdx.x] = float(threadIdx.x);
  const float other = values[kThreads - 1 - threadIdx.x];  // not written yet, by half of the threads
  if (!is_finite(other)) *out = other;
}

__global__ void uninitialised_shared(float* out) {
  APEX_SHARED(values, float[4]);
  if (threadIdx.x == 0) *out = values[0] + values[3];
}

__global__ void past_the_end(float*) {
  APEX_SHARED(values, float[kThreads]);  // here
  values[threadIdx.x + 1] = 1;
}

__global__ void before_the_start(float*) {
  APEX_SHARED(values, float[kThreads]);  // here
  (&values[0])[int(threadIdx.x) - 1] = 1;
}

__global__ void past_dynamic(float*) {
  APEX_DYNAMIC_SHARED(float, values);
  values[threadIdx.x + 1] = 1;
}

__global__ void no_dynamic(float*) {
  APEX_DYNAMIC_SHARED(float, values);  // here
  values[0] = 1;
}

__global__ void static_too_large(float*) {
  APEX_SHARED(values, float[12289]);  // here
  values[0] = 1;
}

__global__ void divergent_shuffle(float* out) {
  if (threadIdx.x % 32 < 16)
    *out = __shfl_xor_sync(kFullWarp, 1.0f, 1);  // here
  else
    *out = __shfl_down_sync(kFullWarp, 1.0f, 1);  // here
}

__global__ void partial_mask(float* out) {
  if (threadIdx.x % 32 < 16) *out = float(__ballot_sync(0xffffu, 1));  // here
}

__global__ void exited_lane(float* out) {
  if (threadIdx.x == 33) return;
  *out = __shfl_down_sync(kFullWarp, 1.0f, 1);  // here
}

__global__ void partial_warp(float* out) {
  *out = float(__any_sync(kFullWarp, 1));  // here
}

__global__ void misaligned_load(float* out) {
  *out = load<4>(out + 1).v[0];  // here
}

__global__ void misaligned_store(float* out) {
  store(out + 1, Vec<float, 2>{});  // here
}

// The last of two blocks finishes what both began, as arrives_last() in device.h has it, but for one thing.
__global__ void no_fence_before(float* out) {
  if (threadIdx.x != 0) return;
  auto* arrivals = reinterpret_cast<uint32_t*>(out + 4);
  out[blockIdx.x] = 1;
  const bool last = atomicInc(arrivals, 1) == 1;  // here
  __threadfence();
  if (last) out[2] = out[0] + out[1];
}

__global__ void no_fence_after(float* out) {
  bool last = false;
  if (threadIdx.x == 0) {
    out[blockIdx.x] = 1;
    __threadfence();
    last = atomicInc(reinterpret_cast<uint32_t*>(out + 4), 1) == 1;  // here
  }
  if (__syncthreads_or(last)) out[2] = out[0] + out[1];
}

// ---- what takes a sanitizer to be noticed ----

__global__ void read_past_tensor(float* out) {
  const float x = out[threadIdx.x];  // here
  if (x == 7) out[0] = x;
}

__global__ void write_past_tensor(float* out) {
  out[threadIdx.x] = 1;  // here
}

__global__ void read_past_shared(float* out) {
  APEX_SHARED(values, float[kThreads]);
  values[threadIdx.x] = 1;
  __syncthreads();
  out[0] = (&values[0])[threadIdx.x + 1];  // here
}

__global__ void misaligned_cast(float* out) {
  out[0] = reinterpret_cast<const Vec<float, 4>*>(out + 1)->v[0];  // here
}

__global__ void index_overflow(float* out) {
  const int element = (int(blockIdx.x) + 200'000) * 16'384;  // here
  out[0] = element < 0 ? 1 : 2;
}

__global__ void no_barrier_between(float* out) {
  APEX_SHARED(values, float[kThreads]);
  values[threadIdx.x] = 1;                                 // here
  const float other = values[kThreads - 1 - threadIdx.x];  // here
  if (other == 7) out[0] = 1;
}

__global__ void no_barrier_before_reuse(float* out) {
  APEX_SHARED(values, float[kThreads]);
  values[threadIdx.x] = 1;
  __syncthreads();
  const float other = values[kThreads - 1 - threadIdx.x];  // here
  values[threadIdx.x] = other;                             // here
  if (other == 7) out[0] = 1;
}

__global__ void no_syncwarp(float* out) {
  APEX_SHARED(values, float[kThreads]);
  values[threadIdx.x] = 1;                      // here
  const float other = values[threadIdx.x ^ 1];  // here
  if (other == 7) out[0] = 1;
}

__global__ void blocks_share_an_element(float* out) {
  if (threadIdx.x == 0) out[blockIdx.x / 2] = 1;  // here
}

__global__ void plain_counter(float* out) {
  if (threadIdx.x == 0) *out += 1;  // here
}

__global__ void reads_a_neighbour(float* out) {
  if (threadIdx.x != blockIdx.x) return;
  out[blockIdx.x] = 1;                                         // here
  if (blockIdx.x > 0 && out[blockIdx.x - 1] == 7) out[7] = 1;  // here
}

// The same things done right: by all of a block, of a warp, and by the last of several blocks.
__global__ void no_fault(float* out) {
  APEX_SHARED(values, float[kThreads]);
  for (int i = 0; i < 2; ++i) {
    values[threadIdx.x] = float(i);
    __syncwarp();
    const float neighbour = values[threadIdx.x ^ 1];
    __syncthreads();
    const float other = values[kThreads - 1 - threadIdx.x];
    __syncthreads();
    if (other + neighbour != 2 * float(i)) out[7] = 1;
  }
  bool last = false;
  if (threadIdx.x == 0) {
    out[blockIdx.x] = 1;
    last = arrives_last(reinterpret_cast<uint32_t*>(out + 4), 3);
  }
  if (!__syncthreads_or(last)) return;
  if (threadIdx.x < 3) values[threadIdx.x] = load_relaxed(out + threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = values[0] + values[1] + values[2];
}

__global__ void nothing(float*) {}

struct Large {
  char bytes[4096];
};
__global__ void too_many_parameters(float*, Large) {}

using Fault = std::pair<std::string, std::function<void(float*)>>;

const std::vector<Fault>& faults() {
  const auto in_block = [](void (*kernel)(float*), unsigned threads = kThreads, size_t shared = 0) {
    return [=](float* out) { launch(kernel, {1, threads, shared, {}}, out); };
  };
  const auto in_blocks = [](void (*kernel)(float*), unsigned blocks) {
    return [=](float* out) { launch(kernel, {blocks, kThreads, 0, {}}, out); };
  };
  static const std::vector<Fault> all = {
      {"divergent_barrier", in_block(divergent_barrier)},
      {"early_return", in_block(early_return)},
      {"barrier_or_warp", in_block(barrier_or_warp)},
      {"missing_barrier", in_block(missing_barrier)},
      {"uninitialised_shared", in_block(uninitialised_shared)},
      {"past_the_end", in_block(past_the_end)},
      {"before_the_start", in_block(before_the_start)},
      {"past_dynamic", in_block(past_dynamic, kThreads, kThreads * sizeof(float))},
      {"no_dynamic", in_block(no_dynamic)},
      {"static_too_large", in_block(static_too_large)},
      {"divergent_shuffle", in_block(divergent_shuffle)},
      {"partial_mask", in_block(partial_mask)},
      {"exited_lane", in_block(exited_lane)},
      {"partial_warp", in_block(partial_warp, 48)},
      {"misaligned_load", in_block(misaligned_load)},
      {"misaligned_store", in_block(misaligned_store)},
      {"no_fence_before", in_blocks(no_fence_before, 2)},
      {"no_fence_after", in_blocks(no_fence_after, 2)},
      {"read_past_tensor", in_block(read_past_tensor)},
      {"write_past_tensor", in_block(write_past_tensor)},
      {"read_past_shared", in_block(read_past_shared)},
      {"misaligned_cast", in_block(misaligned_cast)},
      {"index_overflow", in_block(index_overflow)},
      {"no_barrier_between", in_block(no_barrier_between)},
      {"no_barrier_before_reuse", in_block(no_barrier_before_reuse)},
      {"no_syncwarp", in_block(no_syncwarp)},
      {"blocks_share_an_element", in_blocks(blocks_share_an_element, 2)},
      {"plain_counter", in_blocks(plain_counter, 2)},
      {"reads_a_neighbour", in_blocks(reads_a_neighbour, 2)},
      {"no_fault", in_blocks(no_fault, 3)},
      {"block_too_large", in_block(nothing, 2048)},
      {"dynamic_too_large", in_block(nothing, kThreads, 1 << 20)},
      {"empty_grid", [](float* out) { launch(nothing, {0, kThreads, 0, {}}, out); }},
      {"grid_too_large", [](float* out) { launch(nothing, {dim3(1, 65536), kThreads, 0, {}}, out); }},
      {"too_many_parameters", [](float* out) { launch(too_many_parameters, {1, kThreads, 0, {}}, out, Large{}); }},
  };
  return all;
}

}  // namespace
}  // namespace lightning_apex

namespace simt {

std::vector<std::string> fault_names() {
  std::vector<std::string> names;
  for (const auto& fault : lightning_apex::faults()) names.push_back(fault.first);
  return names;
}

double run_fault(std::string name) {
  for (const auto& [known, run] : lightning_apex::faults()) {
    if (known != name) continue;
    const auto out = std::make_unique<float[]>(8);
    run(out.get());
    return out[0];
  }
  throw std::runtime_error("no fault is called " + name);
}

}  // namespace simt
