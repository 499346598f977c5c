// The batch norm kernels of one instruction set. Included once by each batch_norm_<isa>.cpp, after kernels.h and inside
// its target pragma (see vec.h why it includes nothing).
//
// Sums run in one lane for each element of a block (along a channel) or for each channel (across rows), in an order
// that neither the vector's width nor the number of threads changes: all instruction sets give the same bits.

namespace lightning_apex {
namespace APEX_ISA {

template <class T>
APEX_INLINE int64_t padded(int64_t channels) {
  return (channels + kPad - 1) / kPad * kPad;
}

// Stores past the cache, where what is written will not be read soon. `to` is aligned to what is stored.
template <class T, class S>
APEX_INLINE void store_past_cache(T* to, Vec<S> x) {
  const auto y = narrow<T, S, Vec<S>::width>(x.v);
#if defined(__SSE2__)
  if constexpr (sizeof(y) == 8) _mm_stream_si64(reinterpret_cast<long long*>(to), (long long)(y));
  if constexpr (sizeof(y) == 16) _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)(y));
#if APEX_VECTOR_BYTES >= 32
  if constexpr (sizeof(y) == 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)(y));
#endif
#if APEX_VECTOR_BYTES == 64
  if constexpr (sizeof(y) == 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)(y));
#endif
#else
  __builtin_memcpy(to, &y, sizeof(y));
#endif
}

// A vector's worth of elements, or fewer.
template <class S>
struct Whole {
  template <class T>
  APEX_INLINE Vec<S> load(const T* from) const {
    return APEX_ISA::load<S>(from);
  }
  template <class T>
  APEX_INLINE void store(T* to, Vec<S> x, bool past_cache) const {
    if (past_cache)
      store_past_cache(to, x);
    else
      APEX_ISA::store(to, x);
  }
};
template <class S>
struct Some {
  int64_t n;
  template <class T>
  APEX_INLINE Vec<S> load(const T* from) const {
    return APEX_ISA::load<S>(Padded<T>().take(from, n));
  }
  template <class T>
  APEX_INLINE void store(T* to, Vec<S> x, bool) const {
    Padded<T> copy;
    APEX_ISA::store(copy.get(), x);
    copy.put(to, n);
  }
};

template <class S>
APEX_INLINE Vec<S> zero_where_not_positive(Vec<S> judge, Vec<S> x) {
  return judge.v <= 0 ? lanes<S, Vec<S>::width>{} : x.v;
}

// body(at, Whole or Some) for the elements [0, n): first `head` of them, then whole vectors, then the rest.
template <class S, class Body>
APEX_INLINE void for_vectors(int64_t head, int64_t n, const Body& body) {
  constexpr int64_t w = Vec<S>::width;
  int64_t at = 0;
  for (; at < head; at += w) body(at, Some<S>{head - at < w ? head - at : w});
  for (at = head; at + w <= n; at += w) body(at, Whole<S>());
  if (at < n) body(at, Some<S>{n - at});
}

// How many elements from `to` on come before the next cache line, at most n; 0 where alignment does not matter.
template <class T>
APEX_INLINE int64_t before_line(const T* to, int64_t n, bool matters) {
  const int64_t past = int64_t(reinterpret_cast<uintptr_t>(to) % kCacheLine);
  const int64_t head = past == 0 || !matters ? 0 : (kCacheLine - past) / int64_t(sizeof(T));
  return head < n ? head : n;
}

APEX_INLINE void fence_if(bool past_cache) {
#if defined(__SSE2__)
  if (past_cache) _mm_sfence();
#endif
}

template <class T>
struct BatchNorm {
  using S = compute<T>;
  using V = Vec<S>;
  static constexpr int kVecs = kBlock / V::width;

  static APEX_INLINE const T* in(const void* p, int64_t at) {
    return p == nullptr ? nullptr : static_cast<const T*>(p) + at;
  }
  static APEX_INLINE T* to(void* p, int64_t at) { return p == nullptr ? nullptr : static_cast<T*>(p) + at; }

  // ---- along a channel: two sums, in one lane for each element of a block ----

  struct Sums {
    V a[kVecs], b[kVecs];
    APEX_INLINE Sums() {
      for (int k = 0; k < kVecs; ++k) a[k] = b[k] = V(S(0));
    }
    static APEX_INLINE double total(const V* sums) {
      S of[kBlock];
      double lane[kBlock];
      __builtin_memcpy(of, sums, sizeof(of));
      for (int i = 0; i < kBlock; ++i) lane[i] = of[i];
      for (int half = kBlock / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
      return lane[0];
    }
  };
  // 1 in the first n lanes of a block, 0 in the others.
  struct Mask {
    alignas(64) S lane[2 * kBlock];
    APEX_INLINE Mask() {
      for (int i = 0; i < 2 * kBlock; ++i) lane[i] = i < kBlock ? 1 : 0;
    }
    APEX_INLINE V first(int64_t n, int k) const { return load<S>(lane + kBlock - n + k * V::width); }
  };

  static APEX_INLINE S mean_of_first(const T* x, int64_t n) {
    if (n > kBlock) n = kBlock;
    Padded<T> copy;
    const T* from = n == kBlock ? x : copy.take(x, n);
    S lane[kBlock];
    for (int k = 0; k < kVecs; ++k) store(lane + k * V::width, load<S>(from + k * V::width));
    for (int half = kBlock / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0] / S(n);
  }

  static Moments run_moments(const void* x, const Runs& runs) {
    const S pivot = mean_of_first(in(x, runs.first), runs.size);
    const V p(pivot);
    const Mask mask;
    Sums sums;
    for (int64_t r = 0; r < runs.count; ++r) {
      const T* from = in(x, runs.first + r * runs.stride);
      int64_t i = 0;
      for (; i + kBlock <= runs.size; i += kBlock) {
        prefetch<kPrefetchAlone>(from + i);
        for (int k = 0; k < kVecs; ++k) {
          const V d = load<S>(from + i + k * V::width) - p;
          sums.a[k] = sums.a[k] + d;
          sums.b[k] = sums.b[k] + d * d;
        }
      }
      if (i == runs.size) continue;
      Padded<T> rest;
      rest.take(from + i, runs.size - i);
      for (int k = 0; k < kVecs; ++k) {
        const V d = (load<S>(rest.get() + k * V::width) - p) * mask.first(runs.size - i, k);
        sums.a[k] = sums.a[k] + d;
        sums.b[k] = sums.b[k] + d * d;
      }
    }
    return moments_of_sums(pivot, Sums::total(sums.a), Sums::total(sums.b), double(runs.numel()));
  }

  template <bool masked>
  static GradSums run_grad_sums_of(const BackwardStreams& s, const Runs& runs, double mean) {
    const V m{S(mean)};
    Sums sums;
    const auto add = [&](int k, const T* dy, const T* x, const T* out) __attribute__((always_inline)) {
      V g = load<S>(dy);
      if constexpr (masked) g = zero_where_not_positive(load<S>(out), g);
      sums.a[k] = sums.a[k] + g;
      sums.b[k] = sums.b[k] + g * (load<S>(x) - m);
    };
    for (int64_t r = 0; r < runs.count; ++r) {
      const int64_t first = runs.first + r * runs.stride;
      const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
      int64_t i = 0;
      for (; i + kBlock <= runs.size; i += kBlock) {
        prefetch(dy + i);
        prefetch(x + i);
        if constexpr (masked) prefetch(out + i);
        for (int k = 0; k < kVecs; ++k) {
          const int64_t at = i + k * V::width;
          add(k, dy + at, x + at, masked ? out + at : nullptr);
        }
      }
      if (i == runs.size) continue;
      Padded<T> rest_dy, rest_x, rest_out;  // dy of the padding is 0, and so are its terms
      rest_dy.take(dy + i, runs.size - i);
      rest_x.take(x + i, runs.size - i);
      if constexpr (masked) rest_out.take(out + i, runs.size - i);
      for (int k = 0; k < kVecs; ++k)
        add(k, rest_dy.get() + k * V::width, rest_x.get() + k * V::width, rest_out.get() + k * V::width);
    }
    return {Sums::total(sums.a), Sums::total(sums.b)};
  }
  static GradSums run_grad_sums(const BackwardStreams& s, const Runs& runs, double mean) {
    return s.out == nullptr ? run_grad_sums_of<false>(s, runs, mean) : run_grad_sums_of<true>(s, runs, mean);
  }

  // ---- element by element ----

  template <bool with_z, bool relu, class Lanes>
  static APEX_INLINE void project(const Lanes& some, const T* x, const T* z, T* out, V mean, V scale, V shift,
                                  bool past_cache) {
    V y = (some.load(x) - mean) * scale + shift;
    if constexpr (with_z) y = y + some.load(z);
    if constexpr (relu) y = maximum(y, V(S(0)));
    some.store(out, y, past_cache);
  }
  template <bool masked, bool with_dz, class Lanes>
  static APEX_INLINE void grad(const Lanes& some, const T* dy, const T* x, const T* out, T* dx, T* dz, V mean, V by_dy,
                               V by_x, V shift, bool past_cache) {
    V g = some.load(dy);
    if constexpr (masked) g = zero_where_not_positive(some.load(out), g);
    some.store(dx, g * by_dy + (some.load(x) - mean) * by_x + shift, past_cache);
    if constexpr (with_dz) some.store(dz, g, false);
  }

  template <bool with_z, bool relu>
  static void run_project_of(const ForwardStreams& s, const Runs& runs, const Projection<double>& p) {
    const V mean{S(p.mean)}, scale{S(p.scale)}, shift{S(p.shift)};
    for (int64_t r = 0; r < runs.count; ++r) {
      const int64_t first = runs.first + r * runs.stride;
      const T *x = in(s.x, first), *z = in(s.z, first);
      T* out = to(s.out, first);
      const auto at_once = [&](int64_t i, const auto& some) __attribute__((always_inline)) {
        project<with_z, relu>(some, x + i, with_z ? z + i : nullptr, out + i, mean, scale, shift, s.bypass_cache);
      };
      for_vectors<S>(before_line(out, runs.size, s.bypass_cache), runs.size, at_once);
    }
    fence_if(s.bypass_cache);
  }
  static void run_project(const ForwardStreams& s, const Runs& runs, const Projection<double>& p) {
    if (s.z == nullptr)
      s.relu ? run_project_of<false, true>(s, runs, p) : run_project_of<false, false>(s, runs, p);
    else
      s.relu ? run_project_of<true, true>(s, runs, p) : run_project_of<true, false>(s, runs, p);
  }

  template <bool masked, bool with_dz>
  static void run_grad_of(const BackwardStreams& s, const Runs& runs, const GradProjection<double>& p) {
    const V mean{S(p.mean)}, by_dy{S(p.by_dy)}, by_x{S(p.by_x)}, shift{S(p.shift)};
    for (int64_t r = 0; r < runs.count; ++r) {
      const int64_t first = runs.first + r * runs.stride;
      const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
      T *dx = to(s.dx, first), *dz = to(s.dz, first);
      const auto at_once = [&](int64_t i, const auto& some) __attribute__((always_inline)) {
        grad<masked, with_dz>(some, dy + i, x + i, masked ? out + i : nullptr, dx + i, with_dz ? dz + i : nullptr, mean,
                              by_dy, by_x, shift, s.bypass_cache);
      };
      for_vectors<S>(before_line(dx, runs.size, s.bypass_cache), runs.size, at_once);
    }
    fence_if(s.bypass_cache);
  }
  static void run_grad(const BackwardStreams& s, const Runs& runs, const GradProjection<double>& p) {
    if (s.out == nullptr)
      run_grad_of<false, false>(s, runs, p);
    else
      s.dz == nullptr ? run_grad_of<true, false>(s, runs, p) : run_grad_of<true, true>(s, runs, p);
  }

  // ---- across rows: every channel has its lane, whatever the vector's width ----

  static APEX_INLINE V at(const S* array, int64_t c) { return load<S>(array + c); }

  // Rows are taken in groups, so that a channel's sums are loaded and stored once a group.
  static constexpr int64_t kGroup = 4;

  static void row_moments(const void* x_, const Rows& rows, void* scratch, double* mean, double* m2) {
    const int64_t n = rows.channels;
    S *pivot = static_cast<S*>(scratch), *a = pivot + padded<T>(n), *b = a + padded<T>(n);
    const T* x = in(x_, rows.first * n);
    const int64_t judged = rows.count < kGroup ? 1 : kGroup;
    for_vectors<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
      V sum = some.load(x + c);
      for (int64_t r = 1; r < judged; ++r) sum = sum + some.load(x + r * n + c);
      store(pivot + c, sum / V(S(judged)));
      store(a + c, V(S(0)));
      store(b + c, V(S(0)));
    });
    int64_t r = 0;
    for (; r + kGroup <= rows.count; r += kGroup)
      for_vectors<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
        const T* from = x + r * n + c;
        const V p = at(pivot, c), d0 = some.load(from) - p, d1 = some.load(from + n) - p,
                d2 = some.load(from + 2 * n) - p, d3 = some.load(from + 3 * n) - p;
        store(a + c, at(a, c) + ((d0 + d1) + (d2 + d3)));
        store(b + c, at(b, c) + ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)));
      });
    for (; r < rows.count; ++r)
      for_vectors<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
        const V d = some.load(x + r * n + c) - at(pivot, c);
        store(a + c, at(a, c) + d);
        store(b + c, at(b, c) + d * d);
      });
    for (int64_t c = 0; c < n; ++c) {
      const Moments m = moments_of_sums(pivot[c], a[c], b[c], double(rows.count));
      mean[c] = m.mean;
      m2[c] = m.m2;
    }
  }

  template <bool masked>
  static void row_grad_sums_of(const BackwardStreams& s, const Rows& rows, const void* mean_, void* scratch,
                               double* sum_dy, double* sum_dy_x) {
    const int64_t n = rows.channels, first = rows.first * n;
    const S* mean = static_cast<const S*>(mean_);
    S *a = static_cast<S*>(scratch), *b = a + padded<T>(n);
    const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
    const auto take = [&](int64_t at, const auto& some) __attribute__((always_inline)) {
      const V g = some.load(dy + at);
      if constexpr (masked) return zero_where_not_positive(some.load(out + at), g);
      return g;
    };
    for (int64_t c = 0; c < 2 * padded<T>(n); ++c) a[c] = 0;
    int64_t r = 0;
    for (; r + kGroup <= rows.count; r += kGroup)
      for_vectors<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
        const int64_t i = r * n + c;
        const V m = at(mean, c), g0 = take(i, some), g1 = take(i + n, some), g2 = take(i + 2 * n, some),
                g3 = take(i + 3 * n, some);
        const V x0 = some.load(x + i) - m, x1 = some.load(x + i + n) - m, x2 = some.load(x + i + 2 * n) - m,
                x3 = some.load(x + i + 3 * n) - m;
        store(a + c, at(a, c) + ((g0 + g1) + (g2 + g3)));
        store(b + c, at(b, c) + ((g0 * x0 + g1 * x1) + (g2 * x2 + g3 * x3)));
      });
    for (; r < rows.count; ++r)
      for_vectors<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
        const V g = take(r * n + c, some);
        store(a + c, at(a, c) + g);
        store(b + c, at(b, c) + g * (some.load(x + r * n + c) - at(mean, c)));
      });
    for (int64_t c = 0; c < n; ++c) {
      sum_dy[c] = a[c];
      sum_dy_x[c] = b[c];
    }
  }
  static void row_grad_sums(const BackwardStreams& s, const Rows& rows, const void* mean, void* scratch, double* sum_dy,
                            double* sum_dy_x) {
    if (s.out == nullptr)
      row_grad_sums_of<false>(s, rows, mean, scratch, sum_dy, sum_dy_x);
    else
      row_grad_sums_of<true>(s, rows, mean, scratch, sum_dy, sum_dy_x);
  }

  template <bool with_z, bool relu>
  static void row_project_of(const ForwardStreams& s, const Rows& rows, const void* projection) {
    const int64_t n = rows.channels;
    const S *mean = static_cast<const S*>(projection), *scale = mean + padded<T>(n), *shift = scale + padded<T>(n);
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t first = (rows.first + r) * n;
      const T *x = in(s.x, first), *z = in(s.z, first);
      T* out = to(s.out, first);
      for_vectors<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
        project<with_z, relu>(some, x + c, with_z ? z + c : nullptr, out + c, at(mean, c), at(scale, c), at(shift, c),
                              s.bypass_cache);
      });
    }
    fence_if(s.bypass_cache);
  }
  static void row_project(const ForwardStreams& s, const Rows& rows, const void* projection) {
    if (s.z == nullptr)
      s.relu ? row_project_of<false, true>(s, rows, projection) : row_project_of<false, false>(s, rows, projection);
    else
      s.relu ? row_project_of<true, true>(s, rows, projection) : row_project_of<true, false>(s, rows, projection);
  }

  template <bool masked, bool with_dz>
  static void row_grad_of(const BackwardStreams& s, const Rows& rows, const void* projection) {
    const int64_t n = rows.channels, pad = padded<T>(n);
    const S *mean = static_cast<const S*>(projection), *by_dy = mean + pad, *by_x = by_dy + pad, *shift = by_x + pad;
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t first = (rows.first + r) * n;
      const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
      T *dx = to(s.dx, first), *dz = to(s.dz, first);
      for_vectors<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
        grad<masked, with_dz>(some, dy + c, x + c, masked ? out + c : nullptr, dx + c, with_dz ? dz + c : nullptr,
                              at(mean, c), at(by_dy, c), at(by_x, c), at(shift, c), s.bypass_cache);
      });
    }
    fence_if(s.bypass_cache);
  }
  static void row_grad(const BackwardStreams& s, const Rows& rows, const void* projection) {
    if (s.out == nullptr)
      row_grad_of<false, false>(s, rows, projection);
    else
      s.dz == nullptr ? row_grad_of<true, false>(s, rows, projection) : row_grad_of<true, true>(s, rows, projection);
  }

  static constexpr BatchNormKernels kTable = {&run_moments, &run_project, &run_grad_sums, &run_grad,
                                              &row_moments, &row_project, &row_grad_sums, &row_grad};
};

inline const BatchNormKernels& batch_norm_table(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return BatchNorm<c10::Half>::kTable;
    case c10::ScalarType::BFloat16:
      return BatchNorm<c10::BFloat16>::kTable;
    case c10::ScalarType::Double:
      return BatchNorm<double>::kTable;
    default:
      return BatchNorm<float>::kTable;
  }
}

}  // namespace APEX_ISA
}  // namespace lightning_apex
