// The kernels of one instruction set: plain loops over blocks of elements. Included once by each kernels_<isa>.cpp,
// after vec.h and inside its target pragma (see there why it includes nothing).
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

// Sums in one lane of double for each element of a block, whatever the vector's width, so that every instruction set
// adds in the same order. The square of no float overflows there; the largest doubles' do, hence their own test.
template <class T>
struct Measure {
  static constexpr int kVecs = kBlock / Vec<double>::width;
  Vec<double> sums[kVecs];
  Finite<double> finite;

  APEX_INLINE Measure() {
    for (auto& sum : sums) sum = 0.0;
  }
  APEX_INLINE void blocks(const T* src, int64_t n) {
    for (int64_t i = 0; i < n; i += kBlock) {
      prefetch<kPrefetchAlone>(src + i);
      for (int k = 0; k < kVecs; ++k) {
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
  // Adds the upper half of the lanes to the lower until one is left.
  APEX_INLINE double total() const {
    double lane[kBlock];
    __builtin_memcpy(lane, sums, sizeof(lane));
    for (int half = kBlock / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
  }
  static Measured run(const void* src, int64_t begin, int64_t end) {
    const T* from = static_cast<const T*>(src) + begin;
    const int64_t most = whole(begin, end), rest = end - begin - most;
    Measure m;
    m.blocks(from, most);
    if (rest > 0) m.blocks(Padded<T>().take(from + most, rest), kBlock);
    const double total = m.total();
    const bool nonfinite = std::is_same_v<T, double> ? !m.finite.all() : !(total - total == 0);
    return {total, nonfinite};
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

// ---- the optimizers ----

template <class F, class P, class G, class St, bool with_master>
struct Step {
  using S = compute<P>;
  using Consts = typename F::template Consts<S>;
  static constexpr int kStates = F::n_state, kSlots = kStates > 0 ? kStates : 1;
  struct Streams {
    P* param;
    const G* grad;
    float* master;
    St* state[kSlots];
  };

  static APEX_INLINE void vector(const Streams& to, int64_t i, const Consts& consts, S multiplier) {
    Vec<S> p = load<S>(to.param + i), s[kSlots];
    if constexpr (with_master) p = reconciled<P>(load<float>(to.master + i), p);
    const Vec<S> g = load<S>(to.grad + i) * multiplier;
    for (int k = 0; k < kStates; ++k) s[k] = load<S>(to.state[k] + i);
    F::update(p, g, s, consts);
    store(to.param + i, p);
    if constexpr (with_master) store(to.master + i, p);
    for (int k = 0; k < kStates; ++k) store(to.state[k] + i, s[k]);
  }
  static APEX_INLINE void blocks(const Streams& to, int64_t n, const Consts& consts, S multiplier) {
    for (int64_t i = 0; i < n; i += kBlock) {
      prefetch(to.param + i);
      prefetch(to.grad + i);
      if constexpr (with_master) prefetch(to.master + i);
      for (int k = 0; k < kStates; ++k) prefetch(to.state[k] + i);
      for (int64_t j = i; j < i + kBlock; j += Vec<S>::width) vector(to, j, consts, multiplier);
    }
  }
  // Less than a vector.
  static APEX_INLINE void padded(const Streams& to, int64_t n, const Consts& consts, S multiplier) {
    Padded<P> param;
    Padded<G> grad;
    Padded<float> master;
    Padded<St> state[kSlots];
    Streams copy{param.take(to.param, n), grad.take(to.grad, n), nullptr, {}};
    if constexpr (with_master) copy.master = master.take(to.master, n);
    for (int k = 0; k < kStates; ++k) copy.state[k] = state[k].take(to.state[k], n);
    vector(copy, 0, consts, multiplier);
    param.put(to.param, n);
    if constexpr (with_master) master.put(to.master, n);
    for (int k = 0; k < kStates; ++k) state[k].put(to.state[k], n);
  }
  static void run(const StepRow& row, const void* consts_, double multiplier, int64_t begin, int64_t end) {
    const Consts consts = *static_cast<const Consts*>(consts_);  // a copy that no store can change: stays in registers
    const auto from = [&row](int64_t at) {
      Streams s{static_cast<P*>(row.param) + at, static_cast<const G*>(row.grad) + at, nullptr, {}};
      if constexpr (with_master) s.master = row.master + at;
      for (int k = 0; k < kStates; ++k) s.state[k] = static_cast<St*>(row.state[k]) + at;
      return s;
    };
    int64_t at = begin + whole(begin, end);
    blocks(from(begin), at - begin, consts, S(multiplier));
    for (; at + Vec<S>::width <= end; at += Vec<S>::width) vector(from(at), 0, consts, S(multiplier));
    if (at < end) padded(from(at), end - at, consts, S(multiplier));
  }
};

}  // namespace APEX_ISA
}  // namespace lightning_apex
