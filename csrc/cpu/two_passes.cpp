#include "two_passes.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>

#include "parallel.h"

namespace lightning_apex {

namespace {

// A row of several chunks, which several threads work on: who measures the last chunk computes the constants, and who
// updates waits for them.
class SharedRow {
 public:
  SharedRow(int64_t row, int64_t chunks, int n_norms) : row_(row), left_(chunks), norms_(chunks * n_norms) {}
  int64_t row() const { return row_; }
  double* norms_of(int64_t chunk, int n_norms) { return norms_.data() + chunk * n_norms; }

  void measured(const StepWork& work) {
    if (left_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    // In the order of the chunks, whoever measured them.
    for (size_t at = work.n_norms; at < norms_.size(); at += work.n_norms)
      work.recipes.combine(norms_.data(), norms_.data() + at);
    consts_ = work.recipes.finish(work.recipe(row_), work.rows[row_], norms_.data());
    ready_.store(true, std::memory_order_release);
  }
  // Hardly ever waits, as other work lies between the passes. The thread it waits for may have lost its core.
  const Consts& consts() const {
    while (!ready_.load(std::memory_order_acquire)) std::this_thread::yield();
    return consts_;
  }

 private:
  int64_t row_;
  std::atomic<int64_t> left_;
  std::atomic<bool> ready_{false};
  std::vector<double> norms_;
  Consts consts_{};
};

// Both passes over a row of one chunk (`shared` is null), or one over a chunk of a longer row.
struct Part {
  int64_t row, begin, end;
  SharedRow* shared;
  bool updates;
};

class Schedule {
 public:
  explicit Schedule(const StepWork& work) : work_(work), tasks_(work.rows.size()) {
    for (size_t i = 0; i < work.rows.size(); ++i) add(int64_t(i));
    update_last();
  }
  void run() const {
    tasks_.run([this](size_t, const Part& part) { do_part(part); });
  }

 private:
  void add(int64_t row) {
    const int64_t numel = work_.rows[row].numel;
    if (numel > kChunk) return add_long(row);
    if (numel > 0) return tasks_.add({row, 0, numel, nullptr, true}, 2 * numel);
    const double nothing[kMaxNorms] = {};
    work_.recipes.finish(work_.recipe(row), work_.rows[row], nothing);  // its tensor states move on
  }
  // The second pass over the long row before comes after the first over this one, so that nobody waits for the last
  // chunk to be measured.
  void add_long(int64_t row) {
    SharedRow& shared = shared_.emplace_back(row, chunks(row), work_.n_norms);
    for (int64_t begin = 0; begin < work_.rows[row].numel; begin += kChunk) add_chunk(shared, begin, false);
    update_last();
    last_ = &shared;
  }
  // From the back: what was read last is still in a cache.
  void update_last() {
    if (last_ == nullptr) return;
    for (int64_t i = chunks(last_->row()) - 1; i >= 0; --i) add_chunk(*last_, i * kChunk, true);
    last_ = nullptr;
  }
  void add_chunk(SharedRow& shared, int64_t begin, bool updates) {
    const int64_t end = std::min(begin + kChunk, work_.rows[shared.row()].numel);
    tasks_.add({shared.row(), begin, end, &shared, updates}, end - begin);
  }
  int64_t chunks(int64_t row) const { return (work_.rows[row].numel + kChunk - 1) / kChunk; }

  void do_part(const Part& part) const {
    const StepRow& row = work_.rows[part.row];
    const Recipe& recipe = work_.recipe(part.row);
    const auto gather = [&](double* norms) {
      recipe.gather(row, recipe.consts.bytes, work_.multiplier, part.begin, part.end, norms);
    };
    const auto update = [&](const Consts& consts) {
      recipe.update(row, consts.bytes, work_.multiplier, part.begin, part.end);
    };
    if (part.shared == nullptr) {
      double norms[kMaxNorms];
      gather(norms);
      update(work_.recipes.finish(recipe, row, norms));
    } else if (part.updates) {
      update(part.shared->consts());
    } else {
      gather(part.shared->norms_of(part.begin / kChunk, work_.n_norms));
      part.shared->measured(work_);
    }
  }

  const StepWork& work_;
  Tasks<Part> tasks_;
  std::deque<SharedRow> shared_;
  SharedRow* last_ = nullptr;  // measured, but not yet updated
};

ChunkPlan plan_of(const std::vector<StepRow>& rows) {
  ChunkPlan plan(rows.size());
  for (const StepRow& row : rows) plan.add(row.numel);
  return plan;
}

}  // namespace

void first_pass(const StepWork& work) {
  const ChunkPlan plan = plan_of(work.rows);
  std::vector<double> norms(plan.chunks().size() * work.n_norms);
  plan.run([&](size_t i, const Chunk& chunk) {
    const Recipe& recipe = work.recipe(chunk.row);
    recipe.gather(work.rows[chunk.row], recipe.consts.bytes, work.multiplier, chunk.begin, chunk.end,
                  norms.data() + i * work.n_norms);
  });
  for (const StepRow& row : work.rows) std::fill_n(row.norms, work.n_norms, 0.0);
  for (size_t i = 0; i < plan.chunks().size(); ++i)
    work.recipes.combine(work.rows[plan.chunks()[i].row].norms, norms.data() + i * work.n_norms);
}

void second_pass(const StepWork& work) {
  std::vector<Consts> consts;
  consts.reserve(work.rows.size());
  for (size_t i = 0; i < work.rows.size(); ++i)
    consts.push_back(work.recipes.finish(work.recipe(i), work.rows[i], work.rows[i].norms));
  plan_of(work.rows).run([&](size_t, const Chunk& chunk) {
    work.recipe(chunk.row).update(work.rows[chunk.row], consts[chunk.row].bytes, work.multiplier, chunk.begin,
                                  chunk.end);
  });
}

void both_passes(const StepWork& work) { Schedule(work).run(); }

}  // namespace lightning_apex
