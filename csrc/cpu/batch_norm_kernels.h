// From run-time dtypes to the batch norm kernels. Included once by each batch_norm_<isa>.cpp.

namespace lightning_apex {
namespace APEX_ISA {

template <class T>
inline constexpr BatchNormKernels kBatchNorm = {
    &RunKernels<T>::moments, &RunKernels<T>::project, &RunKernels<T>::grad_sums, &RunKernels<T>::grad,
    &RowKernels<T>::moments, &RowKernels<T>::project, &RowKernels<T>::grad_sums, &RowKernels<T>::grad};

inline const BatchNormKernels& batch_norm_table(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return kBatchNorm<c10::Half>;
    case c10::ScalarType::BFloat16:
      return kBatchNorm<c10::BFloat16>;
    case c10::ScalarType::Double:
      return kBatchNorm<double>;
    default:
      return kBatchNorm<float>;
  }
}

}  // namespace APEX_ISA
}  // namespace lightning_apex
