// One parallel region for a whole list of tensors.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace lightning_apex {

constexpr int64_t kChunk = 1 << 16;  // elements: large enough to hide the counter, small enough to share evenly
constexpr int64_t kCostOfItem = 64;  // elements' worth of work that a short run of them takes besides

// Items of work, done by the threads in tasks of about one full chunk, which they take in order from a counter: a
// thread whose core is busy with something else takes fewer. Which thread does an item must not change its result.
template <class Item>
class Tasks {
 public:
  explicit Tasks(size_t items) { items_.reserve(items); }

  void add(const Item& item, int64_t elements) {
    const int64_t cost = elements + kCostOfItem;
    if (starts_.empty() || filled_ + cost > kChunk) {
      starts_.push_back(items_.size());
      filled_ = 0;
    }
    filled_ += cost;
    items_.push_back(item);
  }
  const std::vector<Item>& items() const { return items_; }

  // body(index of the item, item). An item may wait for one that was added before it.
  template <class Body>
  void run(const Body& body) const {
    std::atomic<size_t> next{0};
    const auto work = [&](int64_t, int64_t) {
      for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < starts_.size();) {
        const size_t end = task + 1 < starts_.size() ? starts_[task + 1] : items_.size();
        for (size_t i = starts_[task]; i < end; ++i) body(i, items_[i]);
      }
    };
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), starts_.size());
    if (threads > 1)
      at::parallel_for(0, threads, 1, work);
    else
      work(0, 1);
  }

 private:
  std::vector<Item> items_;
  std::vector<size_t> starts_;  // the first item of each task
  int64_t filled_ = 0;
};

// Elements [begin, end) of a row.
struct Chunk {
  int64_t row, begin, end;
};

// Rows cut into chunks.
class ChunkPlan {
 public:
  explicit ChunkPlan(size_t rows) : tasks_(rows) {}
  // The next row, of `numel` elements; none of it where that is 0.
  void add(int64_t numel) {
    for (int64_t begin = 0; begin < numel; begin += kChunk) {
      const int64_t end = std::min(numel, begin + kChunk);
      tasks_.add({row_, begin, end}, end - begin);
    }
    ++row_;
  }
  const std::vector<Chunk>& chunks() const { return tasks_.items(); }
  // body(index of the chunk, chunk)
  template <class Body>
  void run(const Body& body) const {
    tasks_.run(body);
  }

 private:
  Tasks<Chunk> tasks_;
  int64_t row_ = 0;
};

}  // namespace lightning_apex
