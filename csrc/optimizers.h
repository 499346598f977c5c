// The table of fused optimizers: one row each. Both engines, the Python side and the tests walk this list, so that
// a new optimizer is one header in formulas/, its include and its row here, and one Python class.
#pragma once

#include "formulas/adam.h"
#include "formulas/sgd.h"

// clang-format off
#define LIGHTNING_APEX_OPTIMIZERS(ROW) \
  ROW(AdamFormula<false>)              \
  ROW(AdamFormula<true>)               \
  ROW(SGDFormula<false>)               \
  ROW(SGDFormula<true>)
// clang-format on
