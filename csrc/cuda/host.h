// The host side of the door: where the CUDA build and the SIMT build of the operators differ.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "device.h"

#if defined(SIMT_EMU)
#define APEX_GPU_LIBRARY lightning_apex_simt
#define APEX_GPU_KEY CPU
#else
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#define APEX_GPU_LIBRARY lightning_apex
#define APEX_GPU_KEY CUDA
#endif

namespace lightning_apex {

#if defined(SIMT_EMU)
constexpr at::DeviceType kGpu = at::kCPU;
struct DeviceGuard {
  explicit DeviceGuard(at::Device) {}
};
inline Stream current_stream() { return {}; }
inline bool same_stream(Stream, Stream) { return true; }
inline bool is_capturing(Stream) { return simt::capturing(); }
#else
constexpr at::DeviceType kGpu = at::kCUDA;
using DeviceGuard = c10::cuda::CUDAGuard;
inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
inline bool same_stream(Stream a, Stream b) { return a == b; }
inline bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  throw_on_error(cudaStreamIsCapturing(stream, &status), __FILE__, __LINE__);
  return status != cudaStreamCaptureStatusNone;
}
#endif

// Host memory that the device can be sent from, and that stays until it was.
inline at::Tensor staging_bytes(int64_t n) {
  return at::empty({n}, at::TensorOptions().dtype(at::kByte).pinned_memory(kGpu != at::kCPU));
}
// Queued on the current stream.
inline void upload(const at::Tensor& device, const at::Tensor& staged) {
#if defined(SIMT_EMU)
  simt::count_copy();
#endif
  device.copy_(staged, /*non_blocking=*/true);
}

}  // namespace lightning_apex
