#if !defined(SIMT_EMU)
#include "host.h"

#include <c10/util/Type.h>

namespace lightning_apex {
namespace {

std::string launching(const void* kernel) {
  const char* name = nullptr;
  if (kernel == nullptr || cudaFuncGetName(&name, kernel) != cudaSuccess) return "";
  return ", launching " + c10::demangle(name);
}

}  // namespace

void throw_on_error(cudaError_t status, const char* file, int line, const void* kernel) {
  if (status == cudaSuccess) return;
  TORCH_CHECK(
      false, "CUDA error at ", file, ":", line, launching(kernel), ": ", cudaGetErrorString(status),
      " (kernels run asynchronously: it may come from an earlier one; set CUDA_LAUNCH_BLOCKING=1 to see which)");
}

}  // namespace lightning_apex
#endif
