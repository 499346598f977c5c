// Copies that scale and convert, and masters that follow their parameters.
#include "launchers.h"
#include "multi_tensor.h"
#include "reconcile.cuh"

namespace lightning_apex {
namespace {

constexpr int kThreads = 512, kChunk = 16384;

// dst and src may be the same memory, then of the same type.
template <class Dst, class Src>
__global__ void __launch_bounds__(kThreads)
    copy_scaled_kernel(const __grid_constant__ TensorTable<2> table, const float* multiplier, uint8_t* nonfinite,
                       float* found_inf) {
  using Compute = compute_t<Dst, Src>;
  constexpr int kWidth = 16 / (sizeof(Dst) < sizeof(Src) ? sizeof(Dst) : sizeof(Src));
  const Chunk chunk = find_chunk(table, chunk_size(kChunk));
  const TensorEntry<2>& entry = entry_of(table, chunk.tensor);
  Dst* dst = static_cast<Dst*>(entry.data[0]) + chunk.begin;
  const Src* src = static_cast<const Src*>(entry.data[1]) + chunk.begin;
  const Compute factor = multiplier != nullptr ? Compute(*multiplier) : Compute(1);
  const bool only_judge = entry.data[0] == entry.data[1] && factor == 1;

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
    store_relaxed(nonfinite + entry.head.position, uint8_t(1));
    if (found_inf != nullptr) store_relaxed(found_inf, 1.0f);
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads) reconcile_kernel(const __grid_constant__ TensorTable<2> table) {
  constexpr int kWidth = 16 / sizeof(P);
  const Chunk chunk = find_chunk(table, chunk_size(kChunk));
  const TensorEntry<2>& entry = entry_of(table, chunk.tensor);
  float* master = static_cast<float*>(entry.data[0]) + chunk.begin;
  const P* param = static_cast<const P*>(entry.data[1]) + chunk.begin;
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

}  // namespace

void launch_copy_scaled(const std::vector<CopyRow>& rows, const float* multiplier, uint8_t* nonfinite, float* found_inf,
                        Tables& tables) {
  const auto start = [&](auto dst, auto src) {
    using Dst = typename decltype(dst)::type;
    using Src = typename decltype(src)::type;
    TensorLister<2> list(chunk_size(kChunk));
    for (size_t i = 0; i < rows.size(); ++i) {
      const CopyRow& row = rows[i];
      if (row.dst_dtype == dtype_of<Dst> && row.src_dtype == dtype_of<Src>)
        list.add(int(i), row.numel, {row.dst, row.src});
    }
    list.launch_all(tables, [&](const TensorTable<2>& table, unsigned chunks, int64_t) {
      launch(copy_scaled_kernel<Dst, Src>, {chunks, block_threads(kThreads), 0, tables.stream()}, table, multiplier,
             nonfinite, found_inf);
    });
  };
  for_each_type([&](auto dst) { for_each_type([&](auto src) { start(dst, src); }); });
}

void launch_reconcile(const std::vector<CopyRow>& rows, Tables& tables) {
  const auto start = [&](auto tag) {
    using P = typename decltype(tag)::type;
    TensorLister<2> list(chunk_size(kChunk));
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows[i].src_dtype == dtype_of<P>) list.add(int(i), rows[i].numel, {rows[i].dst, rows[i].src});
    list.launch_all(tables, [&](const TensorTable<2>& table, unsigned chunks, int64_t) {
      launch(reconcile_kernel<P>, {chunks, block_threads(kThreads), 0, tables.stream()}, table);
    });
  };
  start(Tag<c10::Half>{});
  start(Tag<c10::BFloat16>{});
}

}  // namespace lightning_apex
