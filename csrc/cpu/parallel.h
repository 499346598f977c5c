// One parallel region for a whole list of tensors.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace lightning_apex {

constexpr int64_t kChunk = 1 << 16;  // elements: large enough to hide the counter, small enough to share evenly

struct Chunk {
  int64_t row, begin, end;
};

// Cuts rows into chunks and lets the threads take them, in tasks of about one full chunk, from a counter: a thread
// whose core is busy with something else takes fewer. Which thread computes a chunk never changes its result.
class ChunkPlan {
 public:
  explicit ChunkPlan(size_t rows) { chunks_.reserve(rows); }
  // The next row, of `numel` elements; none of it where that is 0.
  void add(int64_t numel) {
    for (int64_t begin = 0; begin < numel; begin += kChunk) {
      const int64_t end = std::min(numel, begin + kChunk);
      if (tasks_.empty() || filled_ + (end - begin) > kChunk) {
        tasks_.push_back(chunks_.size());
        filled_ = 0;
      }
      filled_ += end - begin;
      chunks_.push_back({row_, begin, end});
    }
    ++row_;
  }

  const std::vector<Chunk>& chunks() const { return chunks_; }

  // body(index of the chunk, chunk)
  template <class Body>
  void run(const Body& body) const {
    std::atomic<size_t> next{0};
    const auto work = [&](int64_t, int64_t) {
      for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();) {
        const size_t end = task + 1 < tasks_.size() ? tasks_[task + 1] : chunks_.size();
        for (size_t i = tasks_[task]; i < end; ++i) body(i, chunks_[i]);
      }
    };
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks_.size());
    if (threads > 1)
      at::parallel_for(0, threads, 1, work);
    else
      work(0, 1);
  }

 private:
  std::vector<Chunk> chunks_;
  std::vector<size_t> tasks_;  // the first chunk of each
  int64_t filled_ = 0, row_ = 0;
};

}  // namespace lightning_apex
