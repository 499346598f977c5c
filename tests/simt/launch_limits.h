// What a launch may ask for, and how places are written in messages.
#pragma once

#include <string>

#include "machine.h"

namespace simt {

std::string text(uint3 index);  // "(1,0,0)"
std::string text(Where where);  // "file.cu:12"

// Throws std::runtime_error where some GPU that we build for could not run it.
void check_launch(const Launch& launch, Where where);

}  // namespace simt
