#include "tables.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <list>
#include <mutex>
#include <vector>

#include "host.h"

namespace lightning_apex {
namespace {

using at::Tensor;

constexpr size_t kKept = 64;  // lists of a few steps: several optimizers, groups, mixtures of types
constexpr int64_t kZeros = 256;

struct Kept {
  int device;
  Stream stream;
  int32_t chunks;
  size_t entry_bytes;
  std::vector<std::byte> content;
  Tensor memory;
  DeviceTable table;

  bool is(int on, Stream with, const HostTable& t) const {
    return device == on && same_stream(stream, with) && chunks == t.chunks && entry_bytes == t.entry_bytes &&
           content.size() == t.entry_bytes * t.count && std::memcmp(content.data(), t.entries, content.size()) == 0;
  }
};

struct Zeros {
  int device;
  Stream stream;
  Tensor memory;
};

// Kernels of one stream run one after another, so what they leave at 0 they may share.
struct Store {
  std::mutex mutex;
  std::list<Kept> tables;  // the most recently used first
  std::list<Zeros> zeros;
};

// Never destroyed: at the end of the process the device may be gone.
Store& store() {
  static auto* const all = new Store;
  return *all;
}

at::TensorOptions on(int device, at::ScalarType dtype) {
  return at::TensorOptions().device(at::Device(kGpu, static_cast<at::DeviceIndex>(device))).dtype(dtype);
}

size_t aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

// Entries, then the tensor of each chunk, then the arrivals.
Kept make(int device, Stream stream, const HostTable& host) {
  const size_t entries = host.entry_bytes * host.count, map = aligned(entries);
  const size_t arrivals = map + aligned(sizeof(int32_t) * host.chunks);
  const Tensor staged = staging_bytes(int64_t(arrivals + sizeof(uint32_t) * host.count));
  auto* bytes = static_cast<std::byte*>(staged.mutable_data_ptr());
  std::memset(bytes, 0, size_t(staged.numel()));
  std::memcpy(bytes, host.entries, entries);
  auto* tensor_of_chunk = reinterpret_cast<int32_t*>(bytes + map);
  const auto first_chunk = [&](int i) {
    return i == host.count ? host.chunks
                           : reinterpret_cast<const EntryHead*>(bytes + i * host.entry_bytes)->first_chunk;
  };
  for (int i = 0; i < host.count; ++i)
    std::fill(tensor_of_chunk + first_chunk(i), tensor_of_chunk + first_chunk(i + 1), i);

  Kept kept{device, stream, host.chunks, host.entry_bytes, {bytes, bytes + entries}, {}, {}};
  kept.memory = at::empty({staged.numel()}, on(device, at::kByte));
  upload(kept.memory, staged);
  auto* there = static_cast<std::byte*>(kept.memory.mutable_data_ptr());
  kept.table = {there, reinterpret_cast<int32_t*>(there + map), reinterpret_cast<uint32_t*>(there + arrivals)};
  return kept;
}

}  // namespace

struct Tables::Held {
  std::vector<Tensor> memory;  // until the launches are queued, or for the graph in the making
  int exceptions = std::uncaught_exceptions();
};

Tables::Tables(int device, Stream stream)
    : device_(device), stream_(stream), captured_(is_capturing(stream)), held_(std::make_unique<Held>()) {}

Tables::~Tables() {
  if (std::uncaught_exceptions() == held_->exceptions) return;
  // A launch that failed may have left arrivals behind.
  const std::lock_guard lock(store().mutex);
  store().tables.clear();
  store().zeros.clear();
}

DeviceTable Tables::find(const HostTable& table) {
  const std::lock_guard lock(store().mutex);
  auto& tables = store().tables;
  const auto found =
      std::find_if(tables.begin(), tables.end(), [&](const Kept& kept) { return kept.is(device_, stream_, table); });
  if (found != tables.end())
    tables.splice(tables.begin(), tables, found);
  else
    tables.push_front(make(device_, stream_, table));
  // What is let go is used again only after the kernels that its stream has queued by then.
  if (tables.size() > kKept) tables.pop_back();
  held_->memory.push_back(tables.front().memory);
  return tables.front().table;
}

uint32_t* Tables::zeros(int n) {
  const std::lock_guard lock(store().mutex);
  auto& zeros = store().zeros;
  const auto found = std::find_if(zeros.begin(), zeros.end(), [&](const Zeros& z) {
    return z.device == device_ && same_stream(z.stream, stream_);
  });
  Tensor memory;
  if (captured_) {
    memory = at::zeros({n}, on(device_, at::kInt));
  } else if (found != zeros.end()) {
    memory = found->memory;
  } else {
    memory = at::zeros({kZeros}, on(device_, at::kInt));
    zeros.push_front({device_, stream_, memory});
    if (zeros.size() > kKept) zeros.pop_back();
  }
  TORCH_INTERNAL_ASSERT(n <= memory.numel());
  held_->memory.push_back(memory);
  return static_cast<uint32_t*>(memory.mutable_data_ptr());
}

}  // namespace lightning_apex
