// The divergence rule: a master counts only where its parameter is what the master rounds to. Elsewhere somebody else
// wrote to the parameter, and that value is the new master.
#pragma once

#include "device.h"

namespace lightning_apex {

template <class P>
__device__ __forceinline__ bool agrees(float master, P param) {
  return float(param) == float(P(master));
}
template <class P>
__device__ __forceinline__ float reconcile(float master, P param) {
  return agrees(master, param) ? master : float(param);
}

}  // namespace lightning_apex
