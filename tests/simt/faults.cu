// Kernels that are wrong on purpose, so that the tests can see the machine notice. A line that must be named in the
// diagnosis ends in `// here`.
#include "faults.h"

#include <functional>
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
      {"no_fence_before", [](float* out) { launch(no_fence_before, {2, kThreads, 0, {}}, out); }},
      {"no_fence_after", [](float* out) { launch(no_fence_after, {2, kThreads, 0, {}}, out); }},
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
    alignas(16) float out[8] = {};
    run(out);
    return out[0];
  }
  throw std::runtime_error("no fault is called " + name);
}

}  // namespace simt
