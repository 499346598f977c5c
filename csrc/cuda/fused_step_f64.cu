#include "fused_step.cuh"

namespace lightning_apex {
template size_t launch_fused_step<double>(int, const std::vector<StepRow>&, const StepArguments&, Stream);
}  // namespace lightning_apex
