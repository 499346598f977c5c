// The SIMT build of the operators as a library of its own, lightning_apex_simt, beside lightning_apex.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../../csrc/schemas.h"
#include "faults.h"
#include "machine.h"

namespace {

void set_order(std::string_view order, int64_t seed) {
  TORCH_CHECK(order == "forward" || order == "reverse" || order == "random", "no order ", order);
  simt::set_order(order == "forward"   ? simt::Order::forward
                  : order == "reverse" ? simt::Order::reverse
                                       : simt::Order::random,
                  uint64_t(seed));
}

void set_overrides(int64_t block_threads, int64_t chunk, at::IntArrayRef blocks) {
  simt::set_overrides({int(block_threads), int(chunk), blocks.vec()});
}

std::vector<int64_t> counters() {
  const simt::Counters& c = simt::counters();
  return {c.launches, c.blocks, c.switches, c.copies};
}

TORCH_LIBRARY(lightning_apex_simt, m) {
  lightning_apex::define_schemas(m);
  m.def("set_order(str order, int seed=0) -> ()", &set_order);
  m.def("set_overrides(int block_threads=0, int chunk=0, int[] blocks=[]) -> ()", &set_overrides);
  m.def("counters() -> int[]", &counters);  // launches, blocks, fiber switches and copies since set_order
  m.def("set_capturing(bool on) -> ()", &simt::set_capturing);
  m.def("fault_names() -> str[]", &simt::fault_names);
  m.def("fault(str name) -> float", &simt::run_fault);
}

TORCH_LIBRARY_IMPL(lightning_apex_simt, CompositeExplicitAutograd, m) {
  lightning_apex::implement_calls_without_tensors(m);
}

}  // namespace
