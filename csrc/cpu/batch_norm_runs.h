// The batch norm kernels along a channel, [batch, channels, spatial]. Included once by each batch_norm_<isa>.cpp.
//
// Sums run in one lane for each element of a block, whatever the vector's width, so that every instruction set adds in
// the same order. Less than a block at the end of a run is taken in the block that ends there, less what was counted.

namespace lightning_apex {
namespace APEX_ISA {

template <class T>
struct RunKernels {
  using S = compute<T>;
  using V = Vec<S>;
  static constexpr int kVecs = kBlock / V::width;

  static APEX_INLINE const T* in(const void* p, int64_t at) {
    return p == nullptr ? nullptr : static_cast<const T*>(p) + at;
  }
  static APEX_INLINE T* to(void* p, int64_t at) { return p == nullptr ? nullptr : static_cast<T*>(p) + at; }

  // Two sums.
  struct Sums {
    V a[kVecs], b[kVecs];
    APEX_INLINE Sums() {
      for (int k = 0; k < kVecs; ++k) a[k] = b[k] = V(S(0));
    }
    static APEX_INLINE double total(const V* sums) {
      S of[kBlock];
      double lane[kBlock];
      __builtin_memcpy(of, sums, sizeof(of));
      for (int64_t i = 0; i < kBlock; ++i) lane[i] = of[i];
      return fold(lane);
    }
  };

  static APEX_INLINE S mean_of_first(const T* x, int64_t n) {
    if (n > kBlock) n = kBlock;
    Padded<T> copy;
    const T* from = n == kBlock ? x : copy.take(x, n);
    S lane[kBlock];
    for (int k = 0; k < kVecs; ++k) store(lane + k * V::width, load<S>(from + k * V::width));
    return fold(lane) / S(n);
  }

  static Moments moments(const void* x, const Runs& runs) {
    const S pivot = mean_of_first(in(x, runs.first), runs.size);
    const V p(pivot);
    Sums sums;
    const auto add = [&](int k, V d) __attribute__((always_inline)) {
      sums.a[k] = sums.a[k] + d;
      sums.b[k] = sums.b[k] + d * d;
    };
    for (int64_t r = 0; r < runs.count; ++r) {
      const T* from = in(x, runs.first + r * runs.stride);
      int64_t i = 0;
      for (; i + kBlock <= runs.size; i += kBlock) {
        prefetch<kPrefetchAlone>(from + i);
        for (int k = 0; k < kVecs; ++k) add(k, load<S>(from + i + k * V::width) - p);
      }
      const int64_t rest = runs.size - i;
      if (rest == 0) continue;
      if (i > 0) {
        const T* last = from + runs.size - kBlock;
        for (int k = 0; k < kVecs; ++k) add(k, (load<S>(last + k * V::width) - p) * last_lanes<S>(rest, k));
      } else {
        Padded<T> copy;
        copy.take(from, rest);
        for (int k = 0; k < kVecs; ++k) add(k, (load<S>(copy.get() + k * V::width) - p) * first_lanes<S>(rest, k));
      }
    }
    return moments_of_sums(pivot, Sums::total(sums.a), Sums::total(sums.b), double(runs.numel()));
  }

  template <bool masked>
  static GradSums grad_sums_of(const BackwardStreams& s, const Runs& runs, double mean) {
    const V m{S(mean)};
    Sums sums;
    const auto load_dy = [&](const T* dy, const T* out, int64_t at) __attribute__((always_inline)) {
      const V g = load<S>(dy + at);
      if constexpr (masked) return zero_where_not_positive(load<S>(out + at), g);
      return g;
    };
    const auto add = [&](int k, V g, const T* x) __attribute__((always_inline)) {
      sums.a[k] = sums.a[k] + g;
      sums.b[k] = sums.b[k] + g * (load<S>(x + k * V::width) - m);
    };
    for (int64_t r = 0; r < runs.count; ++r) {
      const int64_t first = runs.first + r * runs.stride;
      const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
      int64_t i = 0;
      for (; i + kBlock <= runs.size; i += kBlock) {
        prefetch(dy + i);
        prefetch(x + i);
        if constexpr (masked) prefetch(out + i);
        for (int k = 0; k < kVecs; ++k) add(k, load_dy(dy, out, i + k * V::width), x + i);
      }
      const int64_t rest = runs.size - i;
      if (rest == 0) continue;
      if (i > 0) {
        const int64_t last = runs.size - kBlock;
        for (int k = 0; k < kVecs; ++k)
          add(k, load_dy(dy, out, last + k * V::width) * last_lanes<S>(rest, k), x + last);
      } else {
        Padded<T> some_dy, some_x, some_out;  // dy of the padding is 0, and so are its terms
        some_dy.take(dy, rest);
        some_x.take(x, rest);
        if constexpr (masked) some_out.take(out, rest);
        for (int k = 0; k < kVecs; ++k) add(k, load_dy(some_dy.get(), some_out.get(), k * V::width), some_x.get());
      }
    }
    return {Sums::total(sums.a), Sums::total(sums.b)};
  }
  static GradSums grad_sums(const BackwardStreams& s, const Runs& runs, double mean) {
    return s.out == nullptr ? grad_sums_of<false>(s, runs, mean) : grad_sums_of<true>(s, runs, mean);
  }

  template <bool with_z, bool relu>
  static void project_of(const ForwardStreams& s, const Runs& runs, const Projection<double>& p) {
    const V mean{S(p.mean)}, scale{S(p.scale)}, shift{S(p.shift)};
    const bool past_cache = s.bypass_cache;
    for (int64_t r = 0; r < runs.count; ++r) {
      const int64_t first = runs.first + r * runs.stride;
      const T *x = in(s.x, first), *z = in(s.z, first);
      T* out = to(s.out, first);
      const auto body = [=](int64_t i, const auto& some) __attribute__((always_inline)) {
        V y = (some.load(x + i) - mean) * scale + shift;
        if constexpr (with_z) y = y + some.stream(z + i);
        if constexpr (relu) y = maximum(y, V(S(0)));
        some.store(out + i, y, past_cache);
      };
      for_each_of<S>(out, runs.size, past_cache, body);
    }
    fence_if(past_cache);
  }
  static void project(const ForwardStreams& s, const Runs& runs, const Projection<double>& p) {
    if (s.z == nullptr)
      s.relu ? project_of<false, true>(s, runs, p) : project_of<false, false>(s, runs, p);
    else
      s.relu ? project_of<true, true>(s, runs, p) : project_of<true, false>(s, runs, p);
  }

  template <bool masked, bool with_dz>
  static void grad_of(const BackwardStreams& s, const Runs& runs, const GradProjection<double>& p) {
    const V mean{S(p.mean)}, by_dy{S(p.by_dy)}, by_x{S(p.by_x)}, shift{S(p.shift)};
    const bool past_cache = s.bypass_cache;
    for (int64_t r = 0; r < runs.count; ++r) {
      const int64_t first = runs.first + r * runs.stride;
      const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
      T *dx = to(s.dx, first), *dz = to(s.dz, first);
      const auto body = [=](int64_t i, const auto& some) __attribute__((always_inline)) {
        V g = some.load(dy + i);
        if constexpr (masked) g = zero_where_not_positive(some.load(out + i), g);
        some.store(dx + i, g * by_dy + (some.load(x + i) - mean) * by_x + shift, past_cache);
        if constexpr (with_dz) some.store(dz + i, g, false);
      };
      for_each_of<S>(dx, runs.size, past_cache, body);
    }
    fence_if(past_cache);
  }
  static void grad(const BackwardStreams& s, const Runs& runs, const GradProjection<double>& p) {
    if (s.out == nullptr)
      grad_of<false, false>(s, runs, p);
    else
      s.dz == nullptr ? grad_of<true, false>(s, runs, p) : grad_of<true, true>(s, runs, p);
  }
};

}  // namespace APEX_ISA
}  // namespace lightning_apex
