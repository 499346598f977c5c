// How a dynamic loss scale moves (Micikevicius et al. 2018, section 3.2), and what a step multiplies gradients by.
#pragma once

#include "common.h"

namespace lightning_apex {

struct ScaleState {
  float scale;
  int growth_tracker;      // steps without overflow since the scale last moved
  int hysteresis_tracker;  // overflows still tolerated before the scale backs off
  int consecutive_skips, skipped_steps;
};
struct ScaleRule {
  float growth_factor, backoff_factor;
  int growth_interval, hysteresis;
  float min_scale, max_scale;
};

// One step was made (found_inf == false) or skipped. The scale stays in [min_scale, max_scale].
APEX_HD ScaleState next_scale(ScaleState s, bool found_inf, const ScaleRule& r) {
  if (found_inf) {
    s.growth_tracker = 0;
    s.consecutive_skips += 1;
    s.skipped_steps += 1;
    s.hysteresis_tracker -= 1;
    if (s.hysteresis_tracker <= 0) {
      s.hysteresis_tracker = 0;
      s.scale = maximum(s.scale * r.backoff_factor, r.min_scale);
    }
    return s;
  }
  s.consecutive_skips = 0;
  s.growth_tracker += 1;
  if (s.growth_tracker >= r.growth_interval) {
    const float grown = s.scale * r.growth_factor;
    s.scale = grown < r.max_scale ? grown : r.max_scale;
    s.growth_tracker = 0;
    s.hysteresis_tracker = r.hysteresis;
  }
  return s;
}

// The unscaled global norm, and the one factor the update multiplies every gradient with: 1 / scale, times
// max_norm / (norm + 1e-6) where that is below 1 (Pascanu et al. 2013; the 1e-6 is torch.nn.utils.clip_grad_norm_'s).
struct StepFactors {
  float norm, multiplier;
};
APEX_HD StepFactors step_factors(double sum_of_squares, double scale, double max_norm) {
  const double norm = sqrt(sum_of_squares) / scale;
  double clip = 1;
  if (max_norm > 0) {
    clip = max_norm / (norm + 1e-6);
    if (clip > 1) clip = 1;  // a NaN stays: nothing is clipped away in silence
  }
  return {float(norm), float(clip / scale)};
}

}  // namespace lightning_apex
