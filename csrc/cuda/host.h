// The host side of the door: where the CUDA build and the SIMT build of the operators differ.
#pragma once

#include <ATen/core/Tensor.h>
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
#else
constexpr at::DeviceType kGpu = at::kCUDA;
using DeviceGuard = c10::cuda::CUDAGuard;
inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
#endif

}  // namespace lightning_apex
