#include "fused_step.cuh"

namespace lightning_apex {
template size_t launch_fused_step<c10::BFloat16>(int, const std::vector<StepRow>&, const StepArguments&, Stream);
}  // namespace lightning_apex
