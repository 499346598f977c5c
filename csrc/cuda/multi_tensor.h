// A list of tensors as a kernel parameter. Every tensor is cut into chunks, a block works on one chunk, and finds it by
// bisection: a table holds few tensors, but any number of chunks. A long list takes several launches.
#pragma once

#include <limits>

#include "device.h"

namespace lightning_apex {

// What a table may take of the 4 KB that a launch can pass; the rest is for the kernel's other parameters.
constexpr size_t kTableBytes = 3840;

// `kPointers` addresses a tensor; what each of them is, kernel and launcher agree on.
template <int kPointers>
struct TensorTable {
  static constexpr int kCapacity = (kTableBytes - 16) / (8 * kPointers + 16);
  void* data[kPointers][kCapacity];
  int64_t numel[kCapacity];
  int32_t position[kCapacity];         // in the caller's list
  int32_t first_chunk[kCapacity + 1];  // ascending; the last is the number of chunks in this table
  int32_t count;
};

// One block's share of a tensor. Offsets inside a chunk fit an int, those of a tensor do not.
struct Chunk {
  int tensor, size;
  int64_t begin;
};

// Collects tensors and calls start(table, chunks) whenever a table is full, and once more at the end.
template <int kPointers, class Start>
class TableWriter {
 public:
  TableWriter(int chunk_size, Start start) : chunk_size_(chunk_size), start_(start) {}

  void add(int position, int64_t numel, const void* const (&data)[kPointers]) {
    if (numel == 0) return;
    const int64_t chunks = (numel + chunk_size_ - 1) / chunk_size_;
    const int64_t total = table_.first_chunk[table_.count] + chunks;
    if (table_.count == table_.kCapacity || total > std::numeric_limits<int32_t>::max()) flush();
    const int at = table_.count++;
    for (int k = 0; k < kPointers; ++k) table_.data[k][at] = const_cast<void*>(data[k]);
    table_.numel[at] = numel;
    table_.position[at] = position;
    table_.first_chunk[at + 1] = int32_t(table_.first_chunk[at] + chunks);
  }

  void flush() {
    if (table_.count > 0) start_(table_, unsigned(table_.first_chunk[table_.count]));
    table_.count = 0;
  }

 private:
  TensorTable<kPointers> table_{};
  int chunk_size_;
  Start start_;
};

template <int kPointers, class Start>
TableWriter<kPointers, Start> table_writer(int chunk_size, Start start) {
  return {chunk_size, start};
}

#if defined(SIMT_EMU) || defined(__CUDACC__)

template <int kPointers>
__device__ __forceinline__ Chunk find_chunk(const TensorTable<kPointers>& table, int chunk_size) {
  const int block = int(blockIdx.x);
  int low = 0, high = table.count;  // first_chunk[low] <= block < first_chunk[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= block)
      low = middle;
    else
      high = middle;
  }
  const int64_t begin = int64_t(block - table.first_chunk[low]) * chunk_size;
  const int64_t left = table.numel[low] - begin;
  return {low, int(left < chunk_size ? left : chunk_size), begin};
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
