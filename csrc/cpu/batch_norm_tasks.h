// Work in tasks that threads take from a counter, twice over the same memory.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace lightning_apex {

class TwicePlan {
 public:
  // Fewer elements than wake a second thread are done by one.
  TwicePlan(int64_t tasks, int64_t numel)
      : workers_(numel < kAlone ? 1 : std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), tasks))),
        owner_(tasks, -1) {}
  int64_t tasks() const { return int64_t(owner_.size()); }
  int64_t workers() const { return workers_; }

  // body(task, worker)
  template <class Body>
  void run(const Body& body) {
    std::atomic<int64_t> next{0};
    on_all([&](int64_t worker) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks();) {
        owner_[task] = int32_t(worker);
        body(task, worker);
      }
    });
  }
  // The same again: every worker begins with what it did last, which its cache still holds, and ends with what others
  // have not come to.
  template <class Body>
  void run_again(const Body& body) {
    std::vector<std::atomic<bool>> taken(owner_.size());
    const auto take = [&](int64_t task, int64_t worker) {
      if (!taken[task].exchange(true, std::memory_order_relaxed)) body(task, worker);
    };
    on_all([&](int64_t worker) {
      for (int64_t task = tasks() - 1; task >= 0; --task)
        if (owner_[task] == worker) take(task, worker);
      for (int64_t task = tasks() - 1; task >= 0; --task) take(task, worker);
    });
  }

 private:
  static constexpr int64_t kAlone = 1 << 15;
  template <class Body>
  void on_all(const Body& body) const {
    if (workers_ == 1)
      body(0);
    else
      at::parallel_for(0, workers_, 1, [&](int64_t begin, int64_t end) {
        for (int64_t worker = begin; worker < end; ++worker) body(worker);
      });
  }
  int64_t workers_;
  std::vector<int32_t> owner_;
};

}  // namespace lightning_apex
