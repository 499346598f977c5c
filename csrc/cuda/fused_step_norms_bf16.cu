#include "fused_step.cuh"

namespace lightning_apex {
template bool launch_step<c10::BFloat16, true>(int, const std::vector<StepRow>&, const StepArguments&,
                                               const StepPasses&, Tables&);
}  // namespace lightning_apex
