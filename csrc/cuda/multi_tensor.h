// A list of tensors, as one kernel sees it. Every tensor is cut into chunks and a block works on one chunk. A short
// list travels in the launch's parameters. A longer one lies on the device, from the step before if nothing has moved
// since (tables.h). In a launch that is being captured into a graph every list travels in parameters, in several
// launches if need be: a graph outlives what the device happens to hold.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "device.h"
#include "tables.h"

namespace lightning_apex {

// `kPointers` addresses a tensor; what each of them is, kernel and launcher agree on.
template <int kPointers>
struct TensorEntry {
  EntryHead head;
  void* data[kPointers];
};

// What a table may take of the 4 KB that a launch can pass; the rest is for the kernel's other parameters.
constexpr size_t kTableBytes = 3840;

template <int kPointers>
struct TensorTable {
  static constexpr int kCapacity = (kTableBytes - sizeof(DeviceTable) - 16) / sizeof(TensorEntry<kPointers>);
  DeviceTable far;     // far.entries != nullptr: the tensors are listed there, and not here
  uint32_t* arrivals;  // one a tensor, all 0; nullptr where the kernel counts nothing
  int32_t count;
  TensorEntry<kPointers> entries[kCapacity];
};

// One block's share of a tensor. Offsets inside a chunk fit an int, those of a tensor do not.
struct Chunk {
  int tensor;     // in the table
  int index, of;  // which of the tensor's chunks
  int size;       // elements
  int64_t begin;  // its first element
};

// Collects a list and starts as few launches as it takes.
template <int kPointers>
class TensorLister {
 public:
  using Table = TensorTable<kPointers>;

  // `once_a_tensor`: there is something to do once a tensor. Then one without elements gets a block, and the last
  // block of a larger one can be told by `arrivals`.
  explicit TensorLister(int chunk_size, bool once_a_tensor = false)
      : chunk_size_(chunk_size), once_a_tensor_(once_a_tensor) {}

  void add(int position, int64_t numel, const void* const (&data)[kPointers]) {
    const int64_t chunks = chunks_of(numel, chunk_size_, once_a_tensor_);
    if (chunks == 0) return;
    counts_ |= once_a_tensor_ && chunks > 1;
    TensorEntry<kPointers>& entry = entries_.emplace_back();
    entry.head = {numel, position, int32_t(chunks_)};  // 2^31 chunks would be 70 TB of halves
    for (int k = 0; k < kPointers; ++k) entry.data[k] = const_cast<void*>(data[k]);
    chunks_ += chunks;
  }

  // Calls start(table, chunks, chunks in the tables before), once or more often.
  template <class Start>
  void launch_all(Tables& tables, Start&& start) const {
    const int n = int(entries_.size());
    Table table{};
    if (n > Table::kCapacity && !tables.captured()) {
      table.far = tables.find({entries_.data(), sizeof(entries_[0]), n, int32_t(chunks_)});
      table.arrivals = table.far.arrivals;
      table.count = n;
      start(std::as_const(table), unsigned(chunks_), int64_t(0));
      return;
    }
    for (int first = 0; first < n; first += Table::kCapacity) {
      table.count = std::min(n - first, Table::kCapacity);
      const int32_t before = entries_[first].head.first_chunk;
      const int64_t end = first + table.count < n ? entries_[first + table.count].head.first_chunk : chunks_;
      for (int i = 0; i < table.count; ++i) {
        table.entries[i] = entries_[first + i];
        table.entries[i].head.first_chunk -= before;
      }
      if (counts_) table.arrivals = tables.zeros(table.count);
      start(std::as_const(table), unsigned(end - before), int64_t(before));
    }
  }

 private:
  std::vector<TensorEntry<kPointers>> entries_;
  int64_t chunks_ = 0;
  int chunk_size_;
  bool once_a_tensor_, counts_ = false;
};

#if defined(SIMT_EMU) || defined(__CUDACC__)

// The entry of one tensor, wherever it is. Every thread of a block asks for the same.
template <int kPointers>
__device__ __forceinline__ const TensorEntry<kPointers>& entry_of(const TensorTable<kPointers>& table, int tensor) {
  const auto* far = static_cast<const TensorEntry<kPointers>*>(table.far.entries);
  return far != nullptr ? far[tensor] : table.entries[tensor];
}

template <int kPointers>
__device__ __forceinline__ int tensor_of_block(const TensorTable<kPointers>& table) {
  const int block = int(blockIdx.x);
  if (table.far.entries != nullptr) return table.far.tensor_of_chunk[block];
  int low = 0, high = table.count;  // first_chunk[low] <= block < first_chunk[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.entries[middle].head.first_chunk <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <int kPointers>
__device__ __forceinline__ Chunk find_chunk(const TensorTable<kPointers>& table, int chunk_size) {
  const int tensor = tensor_of_block(table);
  const EntryHead head = entry_of(table, tensor).head;
  const int index = int(blockIdx.x) - head.first_chunk;
  const int64_t begin = int64_t(index) * chunk_size, left = head.numel - begin;
  const int64_t of = chunks_of(head.numel, chunk_size, true);
  return {tensor, index, int(of), int(left < chunk_size ? left : chunk_size), begin};
}

// Calls body(width, i) for every i of a chunk's elements: groups of N where `vectors` says that all addresses are
// aligned for it, single elements for the rest. `width` is a std::integral_constant.
template <int N, class Body>
__device__ __forceinline__ void for_elements(int size, bool vectors, Body&& body) {
  const int in_vectors = vectors ? size / N * N : 0;
  for (int i = int(threadIdx.x) * N; i < in_vectors; i += int(blockDim.x) * N)
    body(std::integral_constant<int, N>{}, i);
  for (int i = in_vectors + int(threadIdx.x); i < size; i += int(blockDim.x)) body(std::integral_constant<int, 1>{}, i);
}

#endif

}  // namespace lightning_apex
