// Optimizers with norms of whole tensors: one pass over memory to measure them, and one to update.
#pragma once

#include <vector>

#include "recipes.h"

namespace lightning_apex {

// Rows and what is theirs: recipes[recipe_of[i]] updates rows[i].
struct StepWork {
  const std::vector<StepRow>& rows;
  const Recipes& recipes;
  const std::vector<size_t>& recipe_of;
  double multiplier;
  int n_norms;

  const Recipe& recipe(size_t row) const { return recipes[recipe_of[row]]; }
};

void first_pass(const StepWork& work);   // fills in the rows' norms
void second_pass(const StepWork& work);  // given the rows' norms
void both_passes(const StepWork& work);

}  // namespace lightning_apex
