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

// Parameters of type P: gradients are P or float, states float or bfloat16, all double where P is.
template <class F, class P>
StepFn step_kernel_for(c10::ScalarType grad, c10::ScalarType state, bool master) {
  const auto with_state = [&](auto g, auto with_master) -> StepFn {
    using G = typename decltype(g)::type;
    constexpr bool m = decltype(with_master)::value;
    if constexpr (std::is_same_v<P, double>)
      return &Step<F, P, G, double, m>::run;
    else if (F::n_state > 0 && state == c10::ScalarType::BFloat16)
      return &Step<F, P, G, c10::BFloat16, m>::run;
    else
      return &Step<F, P, G, float, m>::run;
  };
  if constexpr (sizeof(P) == 2) {
    const bool wide = grad == c10::ScalarType::Float;
    if (master) return wide ? with_state(Tag<float>(), std::true_type()) : with_state(Tag<P>(), std::true_type());
    return wide ? with_state(Tag<float>(), std::false_type()) : with_state(Tag<P>(), std::false_type());
  } else {
    return with_state(Tag<P>(), std::false_type());
  }
}

template <class F>
StepFn step_kernel_of(c10::ScalarType param, c10::ScalarType grad, c10::ScalarType state, bool master) {
  return by_dtype<StepFn>(
      param, [=](auto p) -> StepFn { return step_kernel_for<F, typename decltype(p)::type>(grad, state, master); });
}

inline StepFn step_kernel(int optimizer, c10::ScalarType param, c10::ScalarType grad, c10::ScalarType state,
                          bool master) {
  using Pick = StepFn (*)(c10::ScalarType, c10::ScalarType, c10::ScalarType, bool);
#define APEX_PICK(...) &step_kernel_of<__VA_ARGS__>,
  static constexpr Pick picks[] = {LIGHTNING_APEX_OPTIMIZERS(APEX_PICK)};
#undef APEX_PICK
  return picks[optimizer](param, grad, state, master);
}

}  // namespace APEX_ISA
}  // namespace lightning_apex
