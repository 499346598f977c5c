// The kernels of one instruction set: plain loops over blocks of elements. Included once by each kernels_<isa>.cpp,
// after vec.h and before isa_end.h (see there why it includes nothing).
//
// A tensor's last elements, less than a vector or a block, go through the same code in a padded copy, and the
// arithmetic is plain IEEE (the build forbids contraction to fused multiply-add): so an element's result depends
// neither on its place nor on the number of threads nor on the instruction set.

namespace lightning_apex {
namespace APEX_ISA {

constexpr int64_t kBlock = 32;            // elements: one cache line of halves, two of floats
constexpr int64_t kPrefetch = 1536;       // bytes ahead on every stream, where hardware prefetch stops short
constexpr int64_t kPrefetchAlone = 2560;  // the same where there is only one
constexpr int64_t kCacheLine = 64;

template <int64_t ahead = kPrefetch, class T>
APEX_INLINE void prefetch(const T* from) {
  for (int64_t at = 0; at < kBlock * int64_t(sizeof(T)); at += kCacheLine)
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + ahead + at));
}

// Copies n < 2 * piece elements in pieces of fixed sizes: memcpy of a size that varies costs more than these few bytes.
template <int64_t piece = kBlock / 2, class T>
APEX_INLINE void copy_few(T* to, const T* from, int64_t n) {
  const int64_t done = n & piece;
  if (done != 0) __builtin_memcpy(to, from, piece * sizeof(T));
  if constexpr (piece > 1) copy_few<piece / 2>(to + done, from + done, n);
}

// Less than one block of a stream, zeros behind.
template <class T>
struct Padded {
  alignas(64) raw<T> data[kBlock] = {};
  APEX_INLINE T* take(const T* from, int64_t n) {
    copy_few(data, reinterpret_cast<const raw<T>*>(from), n);
    return get();
  }
  APEX_INLINE T* get() { return reinterpret_cast<T*>(data); }
  APEX_INLINE void put(T* to, int64_t n) const { copy_few(reinterpret_cast<raw<T>*>(to), data, n); }
};

template <class T>
using compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// How many elements of [begin, end) whole blocks hold.
APEX_INLINE int64_t whole(int64_t begin, int64_t end) { return (end - begin) / kBlock * kBlock; }

// x - x is 0 where x is finite and NaN elsewhere, and a NaN survives addition.
template <class S>
struct Finite {
  Vec<S> sum;
  APEX_INLINE Finite() : sum(S(0)) {}  // written out: GCC gives a generated constructor the default target
  APEX_INLINE void see(Vec<S> x) { sum = sum + (x - x); }
  APEX_INLINE bool all() const {
    bool zero = true;
    for (int i = 0; i < Vec<S>::width; ++i) zero &= sum.v[i] == 0;
    return zero;
  }
};

// ---- measure ----

// Sums are made in one lane of double for each element of a block, whatever the vector's width, so that every
// instruction set adds in the same order.
constexpr int kSums = kBlock / Vec<double>::width;

// Adds the upper half of the lanes to the lower until one is left.
APEX_INLINE double sum_of_lanes(const Vec<double> (&sums)[kSums]) {
  double lane[kBlock];
  __builtin_memcpy(lane, sums, sizeof(lane));
  for (int half = kBlock / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// The square of no float overflows there; the largest doubles' do, hence their own test.
template <class T>
struct Measure {
  Vec<double> sums[kSums];
  Finite<double> finite;

  APEX_INLINE Measure() {
    for (auto& sum : sums) sum = 0.0;
  }
  APEX_INLINE void blocks(const T* src, int64_t n) {
    for (int64_t i = 0; i < n; i += kBlock) {
      prefetch<kPrefetchAlone>(src + i);
      for (int k = 0; k < kSums; ++k) {
        const Vec<double> x = part<kBlock>(src + i, k);
        if constexpr (std::is_same_v<T, double>) {
          sums[k] = sums[k] + x * x;
          finite.see(x);
        } else {
          sums[k] = add_exact_square(sums[k], x);
        }
      }
    }
  }
  static Measured run(const void* src, int64_t begin, int64_t end) {
    const T* from = static_cast<const T*>(src) + begin;
    const int64_t most = whole(begin, end), rest = end - begin - most;
    Measure m;
    m.blocks(from, most);
    if (rest > 0) m.blocks(Padded<T>().take(from + most, rest), kBlock);
    const double total = sum_of_lanes(m.sums);
    const bool nonfinite = std::is_same_v<T, double> ? !m.finite.all() : !(total - total == 0);
    return {total, nonfinite};
  }
};

// The bits of floats without their sign order as integers do, infinity above all numbers and NaN above infinity.
template <class T>
struct Magnitude {
  using Bits = signed_bits<T>;
  static constexpr int kLanes = APEX_VECTOR_BYTES / int(sizeof(T));
  static constexpr Bits kAllButSign = Bits(~(Bits(1) << (8 * sizeof(T) - 1)));
  lanes<Bits, kLanes> most = {};

  APEX_INLINE void blocks(const T* src, int64_t n) {
    for (int64_t i = 0; i < n; i += kBlock) {
      prefetch<kPrefetchAlone>(src + i);
      for (int64_t j = i; j < i + kBlock; j += kLanes) {
        lanes<Bits, kLanes> x;
        __builtin_memcpy(&x, src + j, sizeof(x));
        x &= kAllButSign;
        most = x > most ? x : most;
      }
    }
  }
  static double run(const void* src, int64_t begin, int64_t end) {
    const T* from = static_cast<const T*>(src) + begin;
    const int64_t all = whole(begin, end), rest = end - begin - all;
    Magnitude m;
    m.blocks(from, all);
    if (rest > 0) m.blocks(Padded<T>().take(from + all, rest), kBlock);
    Bits most = 0;
    for (int i = 0; i < kLanes; ++i) most = m.most[i] > most ? m.most[i] : most;
    T value;
    __builtin_memcpy(&value, &most, sizeof(value));
    return static_cast<double>(value);
  }
};

// ---- copy_scaled, unscale ----

template <class D, class T>
struct Copy {
  using S = std::conditional_t<std::is_same_v<D, double>, double, compute<T>>;

  static APEX_INLINE void blocks(D* dst, const T* src, int64_t n, S multiplier, Finite<S>& finite) {
    for (int64_t i = 0; i < n; i += kBlock) {
      prefetch(src + i);
      for (int64_t j = i; j < i + kBlock; j += Vec<S>::width) {
        const Vec<S> x = load<S>(src + j) * multiplier;
        store(dst + j, x);
        finite.see(round_to<D>(x));
      }
    }
  }
  static bool run(void* dst, const void* src, double multiplier, int64_t begin, int64_t end) {
    D* to = static_cast<D*>(dst) + begin;
    const T* from = static_cast<const T*>(src) + begin;
    const int64_t most = whole(begin, end), rest = end - begin - most;
    Finite<S> finite;
    blocks(to, from, most, S(multiplier), finite);
    if (rest > 0) {
      Padded<D> out;
      blocks(out.get(), Padded<T>().take(from + most, rest), kBlock, S(multiplier), finite);
      out.put(to + most, rest);
    }
    return !finite.all();
  }
};

// ---- the divergence rule ----

// A master counts only where the parameter is its rounded value. Elsewhere somebody wrote to the model.
template <class P>
APEX_INLINE Vec<float> reconciled(Vec<float> master, Vec<float> param) {
  return Vec<float>::select_equal(param, round_to<P>(master), master, param);
}

template <class P>
struct Reconcile {
  static APEX_INLINE void blocks(float* master, const P* param, int64_t n) {
    for (int64_t i = 0; i < n; i += kBlock) {
      prefetch(master + i);
      prefetch(param + i);
      for (int64_t j = i; j < i + kBlock; j += Vec<float>::width)
        store(master + j, reconciled<P>(load<float>(master + j), load<float>(param + j)));
    }
  }
  static void run(void* master_, const void* param_, int64_t begin, int64_t end) {
    float* master = static_cast<float*>(master_) + begin;
    const P* param = static_cast<const P*>(param_) + begin;
    const int64_t most = whole(begin, end), rest = end - begin - most;
    blocks(master, param, most);
    if (rest == 0) return;
    Padded<float> m;
    blocks(m.take(master + most, rest), Padded<P>().take(param + most, rest), kBlock);
    m.put(master + most, rest);
  }
};

}  // namespace APEX_ISA
}  // namespace lightning_apex
