#pragma once

#include <cstdint>

namespace lightning_apex {

// rows: [batch * spatial, channels], the channels side by side; else [batch, channels, spatial].
struct BatchNormShape {
  int64_t batch, channels, spatial;
  bool rows;
  int64_t per_channel() const { return batch * spatial; }
  int64_t numel() const { return batch * channels * spatial; }
};

}  // namespace lightning_apex
