// The table of fused optimizers: one row each. Both engines, the Python side and the tests walk this list, so that
// a new optimizer is one header in formulas/, its include and its row here, and one Python class.
#pragma once

#include "formulas/adagrad.h"
#include "formulas/adam.h"
#include "formulas/lamb.h"
#include "formulas/lars.h"
#include "formulas/lion.h"
#include "formulas/novograd.h"
#include "formulas/sgd.h"

// clang-format off
#define LIGHTNING_APEX_OPTIMIZERS(ROW) \
  ROW(AdamFormula<false>)              \
  ROW(AdamFormula<true>)               \
  ROW(SGDFormula<false>)               \
  ROW(SGDFormula<true>)                \
  ROW(AdagradFormula)                  \
  ROW(LionFormula)                     \
  ROW(LambFormula)                     \
  ROW(NovoGradFormula)                 \
  ROW(LarsFormula<false>)              \
  ROW(LarsFormula<true>)
// clang-format on
