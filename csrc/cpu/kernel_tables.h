// From run-time dtypes to the kernels of kernels.h, and like it included once by each kernels_<isa>.cpp.

namespace lightning_apex {
namespace APEX_ISA {

template <class T>
struct Tag {
  using type = T;
};

template <class Fn, class Pick>
Fn by_dtype(c10::ScalarType dtype, Pick pick) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return pick(Tag<float>());
    case c10::ScalarType::Half:
      return pick(Tag<c10::Half>());
    case c10::ScalarType::BFloat16:
      return pick(Tag<c10::BFloat16>());
    case c10::ScalarType::Double:
      return pick(Tag<double>());
    default:
      return nullptr;
  }
}

inline MeasureFn measure_kernel(c10::ScalarType src) {
  return by_dtype<MeasureFn>(src, [](auto t) -> MeasureFn { return &Measure<typename decltype(t)::type>::run; });
}

inline MagnitudeFn magnitude_kernel(c10::ScalarType src) {
  return by_dtype<MagnitudeFn>(src, [](auto t) -> MagnitudeFn { return &Magnitude<typename decltype(t)::type>::run; });
}

inline CopyFn copy_kernel(c10::ScalarType dst, c10::ScalarType src) {
  return by_dtype<CopyFn>(dst, [src](auto d) -> CopyFn {
    using D = typename decltype(d)::type;
    return by_dtype<CopyFn>(src, [](auto t) -> CopyFn { return &Copy<D, typename decltype(t)::type>::run; });
  });
}

inline ReconcileFn reconcile_kernel(c10::ScalarType param) {
  if (param == c10::ScalarType::Half) return &Reconcile<c10::Half>::run;
  return param == c10::ScalarType::BFloat16 ? &Reconcile<c10::BFloat16>::run : nullptr;
}

// What a row is made of, as types.
template <class P, class G, class St, bool with_master>
struct Kind {};

// Parameters of type P: gradients are P or float, states float or bfloat16, all double where P is. What a pass does not
// read gets the first type that could stand there, so that no kernel is compiled twice.
template <class P, bool reads_grad, bool reads_state, class Fn, class Pick>
Fn by_kind(c10::ScalarType grad, c10::ScalarType state, bool master, Pick pick) {
  const auto with_state = [&](auto g, auto with_master) -> Fn {
    using G = typename decltype(g)::type;
    constexpr bool m = decltype(with_master)::value;
    if constexpr (std::is_same_v<P, double>) {
      return pick(Kind<P, G, double, m>());
    } else {
      if constexpr (reads_state)
        if (state == c10::ScalarType::BFloat16) return pick(Kind<P, G, c10::BFloat16, m>());
      return pick(Kind<P, G, float, m>());
    }
  };
  if constexpr (sizeof(P) == 2) {
    if constexpr (reads_grad)
      if (grad == c10::ScalarType::Float)
        return master ? with_state(Tag<float>(), std::true_type()) : with_state(Tag<float>(), std::false_type());
    return master ? with_state(Tag<P>(), std::true_type()) : with_state(Tag<P>(), std::false_type());
  } else {
    return with_state(Tag<P>(), std::false_type());
  }
}

template <class F, class P, class G, class St, bool with_master>
StepFn step_kernel_for(Kind<P, G, St, with_master>) {
  return &Step<F, P, G, St, with_master>::run;
}
template <class F, class P, class G, class St, bool with_master>
GatherFn gather_kernel_for(Kind<P, G, St, with_master>) {
  return &Gather<F, P, G, St, with_master>::run;
}

template <class F>
StepFn step_kernel_of(c10::ScalarType param, c10::ScalarType grad, c10::ScalarType state, bool master) {
  return by_dtype<StepFn>(param, [=](auto p) -> StepFn {
    return by_kind<typename decltype(p)::type, !F::advances_states, (F::n_state > 0), StepFn>(
        grad, state, master, [](auto kind) { return step_kernel_for<F>(kind); });
  });
}

template <class F>
GatherFn gather_kernel_of(bool maxima, c10::ScalarType param, c10::ScalarType grad, c10::ScalarType state,
                          bool master) {
  if constexpr (F::n_norms == 0) {
    return nullptr;
  } else if constexpr (F::gathers_param) {
    return by_dtype<GatherFn>(param, [=](auto p) -> GatherFn {
      return by_kind<typename decltype(p)::type, true, F::advances_states, GatherFn>(
          grad, state, master, [](auto kind) { return gather_kernel_for<F>(kind); });
    });
  } else {
    return by_dtype<GatherFn>(grad, [=](auto g) -> GatherFn {
      using G = typename decltype(g)::type;
      return maxima ? &gather_magnitude<G> : &gather_squares<G>;
    });
  }
}

inline StepFn step_kernel(int optimizer, c10::ScalarType param, c10::ScalarType grad, c10::ScalarType state,
                          bool master) {
  using Pick = StepFn (*)(c10::ScalarType, c10::ScalarType, c10::ScalarType, bool);
#define APEX_PICK(...) &step_kernel_of<__VA_ARGS__>,
  static constexpr Pick picks[] = {LIGHTNING_APEX_OPTIMIZERS(APEX_PICK)};
#undef APEX_PICK
  return picks[optimizer](param, grad, state, master);
}

inline GatherFn gather_kernel(int optimizer, bool maxima, c10::ScalarType param, c10::ScalarType grad,
                              c10::ScalarType state, bool master) {
  using Pick = GatherFn (*)(bool, c10::ScalarType, c10::ScalarType, c10::ScalarType, bool);
#define APEX_PICK(...) &gather_kernel_of<__VA_ARGS__>,
  static constexpr Pick picks[] = {LIGHTNING_APEX_OPTIMIZERS(APEX_PICK)};
#undef APEX_PICK
  return picks[optimizer](maxima, param, grad, state, master);
}

}  // namespace APEX_ISA
}  // namespace lightning_apex
