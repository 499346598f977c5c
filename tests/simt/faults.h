#pragma once

#include <string>
#include <vector>

namespace simt {

std::vector<std::string> fault_names();
// Runs one faulty kernel. What it returns should not be a number: if it is, nobody noticed.
double run_fault(std::string name);

}  // namespace simt
