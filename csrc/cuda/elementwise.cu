// Copies that scale and convert, masters that follow their parameters, and step counts.
#include "launchers.h"
#include "multi_tensor.h"
#include "reconcile.cuh"

namespace lightning_apex {
namespace {

constexpr int kThreads = 512, kChunk = 16384;

// dst and src may be the same memory, then of the same type.
template <class Dst, class Src>
__global__ void __launch_bounds__(kThreads)
    copy_scaled_kernel(const TensorTable<2> table, const float* multiplier, uint8_t* nonfinite, float* found_inf) {
  using Compute = compute_t<Dst, Src>;
  constexpr int kWidth = 16 / (sizeof(Dst) < sizeof(Src) ? sizeof(Dst) : sizeof(Src));
  const Chunk chunk = find_chunk(table, kChunk);
  Dst* dst = static_cast<Dst*>(table.data[0][chunk.tensor]) + chunk.begin;
  const Src* src = static_cast<const Src*>(table.data[1][chunk.tensor]) + chunk.begin;
  const Compute factor = multiplier != nullptr ? Compute(*multiplier) : Compute(1);
  const bool only_judge = table.data[0][chunk.tensor] == table.data[1][chunk.tensor] && factor == 1;

  bool bad = false;
  for_elements<kWidth>(chunk.size, is_aligned<kWidth>(dst) && is_aligned<kWidth>(src), [&](auto width, int i) {
    constexpr int N = decltype(width)::value;
    const Vec<Src, N> x = load<N>(src + i);
    Vec<Dst, N> y;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      y.v[k] = Dst(Compute(x.v[k]) * factor);
      bad |= !is_finite(compute_t<Dst>(y.v[k]));
    }
    if (!only_judge) store(dst + i, y);
  });
  if (__any_sync(kFullWarp, bad) && threadIdx.x % 32 == 0) {
    store_relaxed(nonfinite + table.position[chunk.tensor], uint8_t(1));
    if (found_inf != nullptr) store_relaxed(found_inf, 1.0f);
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads) reconcile_kernel(const TensorTable<2> table) {
  constexpr int kWidth = 16 / sizeof(P);
  const Chunk chunk = find_chunk(table, kChunk);
  float* master = static_cast<float*>(table.data[0][chunk.tensor]) + chunk.begin;
  const P* param = static_cast<const P*>(table.data[1][chunk.tensor]) + chunk.begin;
  for_elements<kWidth>(chunk.size, is_aligned<kWidth>(master) && is_aligned<kWidth>(param), [&](auto width, int i) {
    constexpr int N = decltype(width)::value;
    const Vec<P, N> p = load<N>(param + i);
    Vec<float, N> m = load<N>(master + i);
    bool differs = false;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      differs |= !agrees(m.v[k], p.v[k]);
      m.v[k] = reconcile(m.v[k], p.v[k]);
    }
    if (differs) store(master + i, m);  // almost never: a read is all this costs
  });
}

constexpr int kStepsAtOnce = 480;
struct StepList {
  float* step[kStepsAtOnce];
  int count;
};

__global__ void advance_steps_kernel(const StepList list, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0) return;
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < list.count) *list.step[i] += 1;
}

}  // namespace

void launch_copy_scaled(const std::vector<CopyRow>& rows, const float* multiplier, uint8_t* nonfinite, float* found_inf,
                        Stream stream) {
  const auto start = [&](auto dst, auto src) {
    using Dst = typename decltype(dst)::type;
    using Src = typename decltype(src)::type;
    auto writer = table_writer<2>(kChunk, [&](const TensorTable<2>& table, unsigned chunks) {
      launch(copy_scaled_kernel<Dst, Src>, {chunks, kThreads, 0, stream}, table, multiplier, nonfinite, found_inf);
    });
    for (size_t i = 0; i < rows.size(); ++i) {
      const CopyRow& row = rows[i];
      if (row.dst_dtype == dtype_of<Dst> && row.src_dtype == dtype_of<Src>)
        writer.add(int(i), row.numel, {row.dst, row.src});
    }
    writer.flush();
  };
  for_each_type([&](auto dst) { for_each_type([&](auto src) { start(dst, src); }); });
}

void launch_reconcile(const std::vector<CopyRow>& rows, Stream stream) {
  const auto start = [&](auto tag) {
    using P = typename decltype(tag)::type;
    auto writer = table_writer<2>(kChunk, [&](const TensorTable<2>& table, unsigned chunks) {
      launch(reconcile_kernel<P>, {chunks, kThreads, 0, stream}, table);
    });
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows[i].src_dtype == dtype_of<P>) writer.add(int(i), rows[i].numel, {rows[i].dst, rows[i].src});
    writer.flush();
  };
  start(Tag<c10::Half>{});
  start(Tag<c10::BFloat16>{});
}

void launch_advance_steps(const std::vector<float*>& steps, const float* found_inf, Stream stream) {
  constexpr unsigned kThreadsHere = 128;
  for (size_t first = 0; first < steps.size(); first += kStepsAtOnce) {
    StepList list{};
    for (size_t i = first; i < steps.size() && list.count < kStepsAtOnce; ++i) list.step[list.count++] = steps[i];
    const unsigned blocks = (unsigned(list.count) + kThreadsHere - 1) / kThreadsHere;
    launch(advance_steps_kernel, {blocks, kThreadsHere, 0, stream}, list, found_inf);
  }
}

}  // namespace lightning_apex
