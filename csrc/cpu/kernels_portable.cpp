// The kernels for whatever the compiler's default target has.
#define APEX_ISA portable
#define APEX_VECTOR_BYTES 16
// clang-format off
#include "isa_begin.h"
#include "../formulas/common.h"
#include "vec.h"
#include "../optimizers.h"
#include "kernels.h"
#include "step_kernels.h"
#include "kernel_tables.h"
#include "isa_end.h"
// clang-format on

namespace lightning_apex {
const Backend kPortableBackend = {"portable",
                                  &portable::measure_kernel,
                                  &portable::magnitude_kernel,
                                  &portable::copy_kernel,
                                  &portable::reconcile_kernel,
                                  &portable::step_kernel,
                                  &portable::gather_kernel};
}  // namespace lightning_apex
