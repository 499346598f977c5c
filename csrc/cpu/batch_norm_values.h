// Numbers of which every channel has one.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../formulas/batch_norm.h"
#include "batch_norm_backend.h"

namespace lightning_apex {

// Of any floating dtype; the same for all channels where there is no memory.
struct ChannelValues {
  void* data;
  c10::ScalarType dtype;
  double otherwise;

  double operator[](int64_t channel) const {
    double value = otherwise;
    if (data != nullptr) with_type([&](auto* values) { value = double(values[channel]); });
    return value;
  }
  void set(int64_t channel, double value) const {
    with_type([&](auto* values) { values[channel] = static_cast<std::decay_t<decltype(*values)>>(value); });
  }

 private:
  template <class F>
  void with_type(const F& f) const {
    switch (dtype) {
      case c10::ScalarType::Double:
        return f(static_cast<double*>(data));
      case c10::ScalarType::Half:
        return f(static_cast<c10::Half*>(data));
      case c10::ScalarType::BFloat16:
        return f(static_cast<c10::BFloat16*>(data));
      default:
        return f(static_cast<float*>(data));
    }
  }
};

struct RunningStats {
  ChannelValues mean, var;  // both with memory, or neither
  double momentum;
  void see(int64_t channel, const Moments& m) const {
    if (mean.data == nullptr) return;
    mean.set(channel, next_running_mean(mean[channel], m, momentum));
    var.set(channel, next_running_var(var[channel], m, momentum));
  }
};

// Arrays of the compute type for row kernels, one after another, each padded.
class ChannelArrays {
 public:
  ChannelArrays(int64_t channels, int64_t count, bool is_double)
      : is_double_(is_double),
        step_((channels + kPad - 1) / kPad * kPad),
        memory_(size_t(step_ * count) * (is_double ? sizeof(double) : sizeof(float)) + kLine) {}
  void set(int64_t array, int64_t channel, double value) {
    const int64_t at = array * step_ + channel;
    if (is_double_)
      static_cast<double*>(data())[at] = value;
    else
      static_cast<float*>(data())[at] = float(value);
  }
  void* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<void*>((address + kLine - 1) / kLine * kLine);
  }

 private:
  static constexpr size_t kLine = 64;
  bool is_double_;
  int64_t step_;
  std::vector<std::byte> memory_;
};

}  // namespace lightning_apex
