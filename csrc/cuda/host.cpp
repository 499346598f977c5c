#if !defined(SIMT_EMU)
#include "host.h"

namespace lightning_apex {

void throw_on_error(cudaError_t status, const char* file, int line) {
  TORCH_CHECK(
      status == cudaSuccess, "CUDA error at ", file, ":", line, ": ", cudaGetErrorString(status),
      " (kernels run asynchronously: it may come from an earlier one; set CUDA_LAUNCH_BLOCKING=1 to see which)");
}

}  // namespace lightning_apex
#endif
