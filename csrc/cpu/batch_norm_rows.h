// The batch norm kernels across rows, [rows, channels]. Included once by each batch_norm_<isa>.cpp.
//
// Every channel has its lane, so that the vector's width changes no sum. Sums are kept in arrays that stay in the
// cache; rows are taken in groups, so that an array is loaded and stored once a group.

namespace lightning_apex {
namespace APEX_ISA {

template <class T>
struct RowKernels {
  using S = compute<T>;
  using V = Vec<S>;
  static constexpr int64_t kGroup = 4;

  static APEX_INLINE const T* in(const void* p, int64_t at) {
    return p == nullptr ? nullptr : static_cast<const T*>(p) + at;
  }
  static APEX_INLINE T* to(void* p, int64_t at) { return p == nullptr ? nullptr : static_cast<T*>(p) + at; }
  static APEX_INLINE int64_t padded(int64_t channels) { return (channels + kPad - 1) / kPad * kPad; }
  static APEX_INLINE V at(const S* array, int64_t c) { return load<S>(array + c); }

  static void moments(const void* x_, const Rows& rows, void* scratch, double* mean, double* m2) {
    const int64_t n = rows.channels;
    S *pivot = static_cast<S*>(scratch), *a = pivot + padded(n), *b = a + padded(n);
    const T* x = in(x_, rows.first * n);
    const int64_t judged = rows.count < kGroup ? 1 : kGroup;
    for_each_once<S>(0, n, [&](int64_t c, const auto& some) __attribute__((always_inline)) {
      V sum = some.load(x + c);
      for (int64_t r = 1; r < judged; ++r) sum = sum + some.load(x + r * n + c);
      store(pivot + c, sum / V(S(judged)));
      store(a + c, V(S(0)));
      store(b + c, V(S(0)));
    });
    int64_t r = 0;
    for (; r + kGroup <= rows.count; r += kGroup)
      for_each_once<S>(0, n, [=](int64_t c, const auto& some) __attribute__((always_inline)) {
        const T* from = x + r * n + c;
        const V p = at(pivot, c), d0 = some.stream(from) - p, d1 = some.stream(from + n) - p,
                d2 = some.stream(from + 2 * n) - p, d3 = some.stream(from + 3 * n) - p;
        store(a + c, at(a, c) + ((d0 + d1) + (d2 + d3)));
        store(b + c, at(b, c) + ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)));
      });
    for (; r < rows.count; ++r)
      for_each_once<S>(0, n, [=](int64_t c, const auto& some) __attribute__((always_inline)) {
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
  static void grad_sums_of(const BackwardStreams& s, const Rows& rows, const void* mean_, void* scratch, double* sum_dy,
                           double* sum_dy_x) {
    const int64_t n = rows.channels, first = rows.first * n;
    const S* mean = static_cast<const S*>(mean_);
    S *a = static_cast<S*>(scratch), *b = a + padded(n);
    const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
    const auto take = [=](int64_t i, const auto& some) __attribute__((always_inline)) {
      const V g = some.stream(dy + i);
      if constexpr (masked) return zero_where_not_positive(some.stream(out + i), g);
      return g;
    };
    for (int64_t c = 0; c < 2 * padded(n); ++c) a[c] = 0;
    int64_t r = 0;
    for (; r + kGroup <= rows.count; r += kGroup)
      for_each_once<S>(0, n, [=](int64_t c, const auto& some) __attribute__((always_inline)) {
        const int64_t i = r * n + c;
        const V m = at(mean, c), g0 = take(i, some), g1 = take(i + n, some), g2 = take(i + 2 * n, some),
                g3 = take(i + 3 * n, some);
        const V x0 = some.stream(x + i) - m, x1 = some.stream(x + i + n) - m, x2 = some.stream(x + i + 2 * n) - m,
                x3 = some.stream(x + i + 3 * n) - m;
        store(a + c, at(a, c) + ((g0 + g1) + (g2 + g3)));
        store(b + c, at(b, c) + ((g0 * x0 + g1 * x1) + (g2 * x2 + g3 * x3)));
      });
    for (; r < rows.count; ++r)
      for_each_once<S>(0, n, [=](int64_t c, const auto& some) __attribute__((always_inline)) {
        const V g = take(r * n + c, some);
        store(a + c, at(a, c) + g);
        store(b + c, at(b, c) + g * (some.load(x + r * n + c) - at(mean, c)));
      });
    for (int64_t c = 0; c < n; ++c) {
      sum_dy[c] = a[c];
      sum_dy_x[c] = b[c];
    }
  }
  static void grad_sums(const BackwardStreams& s, const Rows& rows, const void* mean, void* scratch, double* sum_dy,
                        double* sum_dy_x) {
    if (s.out == nullptr)
      grad_sums_of<false>(s, rows, mean, scratch, sum_dy, sum_dy_x);
    else
      grad_sums_of<true>(s, rows, mean, scratch, sum_dy, sum_dy_x);
  }

  template <bool with_z, bool relu>
  static void project_of(const ForwardStreams& s, const Rows& rows, const void* projection) {
    const int64_t n = rows.channels;
    const S *mean = static_cast<const S*>(projection), *scale = mean + padded(n), *shift = scale + padded(n);
    const bool past_cache = s.bypass_cache;
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t first = (rows.first + r) * n;
      const T *x = in(s.x, first), *z = in(s.z, first);
      T* out = to(s.out, first);
      for_each<S>(n, [=](int64_t c, const auto& some) __attribute__((always_inline)) {
        V y = (some.stream(x + c) - at(mean, c)) * at(scale, c) + at(shift, c);
        if constexpr (with_z) y = y + some.stream(z + c);
        if constexpr (relu) y = maximum(y, V(S(0)));
        some.store(out + c, y, past_cache);
      });
    }
    fence_if(past_cache);
  }
  static void project(const ForwardStreams& s, const Rows& rows, const void* projection) {
    if (s.z == nullptr)
      s.relu ? project_of<false, true>(s, rows, projection) : project_of<false, false>(s, rows, projection);
    else
      s.relu ? project_of<true, true>(s, rows, projection) : project_of<true, false>(s, rows, projection);
  }

  template <bool masked, bool with_dz>
  static void grad_of(const BackwardStreams& s, const Rows& rows, const void* projection) {
    const int64_t n = rows.channels, pad = padded(n);
    const S *mean = static_cast<const S*>(projection), *by_dy = mean + pad, *by_x = by_dy + pad, *shift = by_x + pad;
    const bool past_cache = s.bypass_cache;
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t first = (rows.first + r) * n;
      const T *dy = in(s.dy, first), *x = in(s.x, first), *out = in(s.out, first);
      T *dx = to(s.dx, first), *dz = to(s.dz, first);
      for_each<S>(n, [=](int64_t c, const auto& some) __attribute__((always_inline)) {
        V g = some.stream(dy + c);
        if constexpr (masked) g = zero_where_not_positive(some.stream(out + c), g);
        some.store(dx + c, g * at(by_dy, c) + (some.stream(x + c) - at(mean, c)) * at(by_x, c) + at(shift, c),
                   past_cache);
        if constexpr (with_dz) some.store(dz + c, g, false);
      });
    }
    fence_if(past_cache);
  }
  static void grad(const BackwardStreams& s, const Rows& rows, const void* projection) {
    if (s.out == nullptr)
      grad_of<false, false>(s, rows, projection);
    else
      s.dz == nullptr ? grad_of<true, false>(s, rows, projection) : grad_of<true, true>(s, rows, projection);
  }
};

}  // namespace APEX_ISA
}  // namespace lightning_apex
