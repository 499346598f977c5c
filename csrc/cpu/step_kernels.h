// The kernels of the optimizers. Included once by each kernels_<isa>.cpp, after kernels.h.

namespace lightning_apex {
namespace APEX_ISA {

// Where the elements of a row are, from one of them on. A pass that has no use for some of them never looks.
template <class P, class G, class St, bool with_master, int n_state>
struct Streams {
  static constexpr int kSlots = n_state > 0 ? n_state : 1;
  P* param;
  const G* grad;
  float* master;
  St* state[kSlots];

  static APEX_INLINE Streams from(const StepRow& row, int64_t at) {
    Streams s{static_cast<P*>(row.param) + at, static_cast<const G*>(row.grad) + at, nullptr, {}};
    if constexpr (with_master) s.master = row.master + at;
    for (int k = 0; k < n_state; ++k) s.state[k] = static_cast<St*>(row.state[k]) + at;
    return s;
  }
  template <class S>
  APEX_INLINE Vec<S> param_at(int64_t i) const {
    const Vec<S> p = load<S>(param + i);
    if constexpr (with_master)
      return reconciled<P>(load<float>(master + i), p);
    else
      return p;
  }
  template <bool reads_grad, bool reads_states>
  APEX_INLINE void prefetch_at(int64_t i) const {
    prefetch(param + i);
    if constexpr (reads_grad) prefetch(grad + i);
    if constexpr (with_master) prefetch(master + i);
    if constexpr (reads_states)
      for (int k = 0; k < n_state; ++k) prefetch(state[k] + i);
  }
};

// Room for a few elements of each stream of a row.
template <class P, class G, class St, bool with_master, int n_state>
struct PaddedStreams {
  using Rows = Streams<P, G, St, with_master, n_state>;
  Padded<P> param;
  Padded<G> grad;
  Padded<float> master;
  Padded<St> state[Rows::kSlots];
  APEX_INLINE PaddedStreams() {}  // written out: GCC gives a generated constructor the default target

  APEX_INLINE Rows take(const Rows& of, int64_t n, bool reads_grad) {
    Rows copy{param.take(of.param, n), reads_grad ? grad.take(of.grad, n) : grad.get(), nullptr, {}};
    if constexpr (with_master) copy.master = master.take(of.master, n);
    for (int k = 0; k < n_state; ++k) copy.state[k] = state[k].take(of.state[k], n);
    return copy;
  }
  APEX_INLINE void put_params(const Rows& to, int64_t n) const {
    param.put(to.param, n);
    if constexpr (with_master) master.put(to.master, n);
  }
  APEX_INLINE void put_states(const Rows& to, int64_t n) const {
    for (int k = 0; k < n_state; ++k) state[k].put(to.state[k], n);
  }
};

// The update: the only pass, or the second.
template <class F, class P, class G, class St, bool with_master>
struct Step {
  using S = compute<P>;
  using Consts = typename F::template Consts<S>;
  static constexpr int kStates = F::n_state;
  static constexpr bool kAdvances = !F::advances_states;  // changes the states, and needs the gradient for that
  using Rows = Streams<P, G, St, with_master, kStates>;

  static APEX_INLINE void vector(const Rows& to, int64_t i, const Consts& consts, S multiplier) {
    Vec<S> p = to.template param_at<S>(i), g = S(0), s[Rows::kSlots];
    if constexpr (kAdvances) g = load<S>(to.grad + i) * multiplier;
    for (int k = 0; k < kStates; ++k) s[k] = load<S>(to.state[k] + i);
    F::update(p, g, s, consts);
    store(to.param + i, p);
    if constexpr (with_master) store(to.master + i, p);
    if constexpr (kAdvances)
      for (int k = 0; k < kStates; ++k) store(to.state[k] + i, s[k]);
  }
  static APEX_INLINE void blocks(const Rows& to, int64_t n, const Consts& consts, S multiplier) {
    for (int64_t i = 0; i < n; i += kBlock) {
      to.template prefetch_at<kAdvances, true>(i);
      for (int64_t j = i; j < i + kBlock; j += Vec<S>::width) vector(to, j, consts, multiplier);
    }
  }
  // Less than a vector.
  static APEX_INLINE void padded(const Rows& to, int64_t n, const Consts& consts, S multiplier) {
    PaddedStreams<P, G, St, with_master, kStates> copy;
    vector(copy.take(to, n, kAdvances), 0, consts, multiplier);
    copy.put_params(to, n);
    if constexpr (kAdvances) copy.put_states(to, n);
  }
  static void run(const StepRow& row, const void* consts_, double multiplier, int64_t begin, int64_t end) {
    const Consts consts = *static_cast<const Consts*>(consts_);  // a copy that no store can change: stays in registers
    int64_t at = begin + whole(begin, end);
    blocks(Rows::from(row, begin), at - begin, consts, S(multiplier));
    for (; at + Vec<S>::width <= end; at += Vec<S>::width) vector(Rows::from(row, at), 0, consts, S(multiplier));
    if (at < end) padded(Rows::from(row, at), end - at, consts, S(multiplier));
  }
};

// The first pass of a formula with norms.
template <class F, class P, class G, class St, bool with_master>
struct Gather {
  using S = compute<P>;
  using Consts = typename F::template Consts<S>;
  static constexpr int kStates = F::advances_states ? F::n_state : 0;
  static constexpr int kSlots = F::n_state > 0 ? F::n_state : 1;
  using Rows = Streams<P, G, St, with_master, kStates>;
  Vec<double> sums[F::n_norms][kSums];

  APEX_INLINE Gather() {
    for (auto& lanes_of_norm : sums)
      for (auto& sum : lanes_of_norm) sum = 0.0;
  }
  // Of the vector at i the first n lanes count. It is at `place` in its block.
  APEX_INLINE void vector(const Rows& from, int64_t i, int place, int n, const Consts& consts, S multiplier) {
    const Vec<S> p = from.template param_at<S>(i), g = load<S>(from.grad + i) * multiplier;
    Vec<S> s[kSlots], x[F::n_norms];
    if constexpr (F::advances_states) {
      for (int k = 0; k < kStates; ++k) s[k] = load<S>(from.state[k] + i);
      F::advance(p, g, s, consts);
      for (int k = 0; k < kStates; ++k) {
        store(from.state[k] + i, s[k]);
        s[k] = round_to<St>(s[k]);  // as the second pass will find it
      }
    }
    F::gather(p, g, s, consts, x);
    for (int k = 0; k < F::n_norms; ++k) {
      if (n < Vec<S>::width) x[k] = Vec<S>::first(x[k], n);
      add_squares(&sums[k][place / Vec<double>::width], x[k]);
    }
  }
  APEX_INLINE void blocks(const Rows& from, int64_t n, const Consts& consts, S multiplier) {
    for (int64_t i = 0; i < n; i += kBlock) {
      from.template prefetch_at<true, true>(i);
      for (int place = 0; place < kBlock; place += Vec<S>::width)
        vector(from, i + place, place, Vec<S>::width, consts, multiplier);
    }
  }
  // Less than a block.
  APEX_INLINE void padded(const Rows& from, int n, const Consts& consts, S multiplier) {
    PaddedStreams<P, G, St, with_master, kStates> copy;
    const Rows few = copy.take(from, n, true);
    for (int place = 0; place < n; place += Vec<S>::width) vector(few, place, place, n - place, consts, multiplier);
    copy.put_states(from, n);
  }
  static void run(const StepRow& row, const void* consts_, double multiplier, int64_t begin, int64_t end,
                  double* norms) {
    const Consts consts = *static_cast<const Consts*>(consts_);
    const int64_t most = whole(begin, end), rest = end - begin - most;
    Gather gathered;
    gathered.blocks(Rows::from(row, begin), most, consts, S(multiplier));
    if (rest > 0) gathered.padded(Rows::from(row, begin + most), int(rest), consts, S(multiplier));
    for (int k = 0; k < F::n_norms; ++k) norms[k] = sum_of_lanes(gathered.sums[k]);
  }
};

// The same where the only norm is the gradient's.
template <class G>
void gather_squares(const StepRow& row, const void*, double multiplier, int64_t begin, int64_t end, double* norms) {
  norms[0] = Measure<G>::run(row.grad, begin, end).sum_of_squares * multiplier * multiplier;
}
template <class G>
void gather_magnitude(const StepRow& row, const void*, double multiplier, int64_t begin, int64_t end, double* norms) {
  norms[0] = Magnitude<G>::run(row.grad, begin, end) * (multiplier < 0 ? -multiplier : multiplier);
}

}  // namespace APEX_ISA
}  // namespace lightning_apex
