// How a row is updated: its kernels, and its formula's constants.
#pragma once

#include <cstddef>
#include <vector>

#include "../optimizer_table.h"
#include "backend.h"

namespace lightning_apex {

// A formula's constants for one tensor, of float or double as its parameter is.
struct Consts {
  alignas(16) std::byte bytes[kMaxConstsBytes];
};

// What rows share as long as they follow each other with the same dtypes and step count, which nearly all do.
struct Recipe {
  StepFn update;
  GatherFn gather;  // nullptr: there is one pass only
  Consts consts;    // before any norms are known
  double step;      // counts this update
};

class Recipes {
 public:
  Recipes(int optimizer, std::vector<double> hypers);
  size_t of(const StepRow& row);  // for operator[]
  const Recipe& operator[](size_t i) const { return list_[i]; }

  bool takes_maxima() const { return maxima_; }
  // The row's constants, given its norms; and its new tensor states.
  Consts finish(const Recipe& recipe, const StepRow& row, const double* norms) const;
  // The norms of a row that consists of two parts.
  void combine(double* norms, const double* others) const;

 private:
  bool same(const StepRow& row) const;
  int optimizer_;
  std::vector<double> hypers_;
  bool maxima_;
  int n_norms_;
  std::vector<Recipe> list_;
  StepRow last_{};
  float last_step_ = 0;
};

}  // namespace lightning_apex
