// The faults as a program of its own, for the sanitizers: no Python, no torch. For every name that it is given it says
// what the machine says, or what the kernel returned; a sanitizer may end it first.
#include <cstdio>
#include <stdexcept>

#include "faults.h"
#include "machine.h"

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    try {
      std::printf("%s: returned %g\n", names[i], simt::run_fault(names[i]));
    } catch (const std::exception& error) {
      std::printf("%s: %s\n", names[i], error.what());
    }
    std::fflush(stdout);
  }
}
