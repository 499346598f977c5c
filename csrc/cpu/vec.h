// Short vectors of float or double, as wide as the instruction set that this file is compiled for, with loads and
// stores that convert. Built on the vector extensions of GCC and Clang, so that one source serves every width.
//
// Included once by each translation unit for an instruction set, between isa_begin.h and isa_end.h, in the namespace
// APEX_ISA: nothing compiled here may be shared with a translation unit for another one. No include here: it would be
// compiled for that instruction set too. isa_begin.h includes what is needed.

#define APEX_INLINE inline __attribute__((always_inline))

namespace lightning_apex {
namespace APEX_ISA {

template <class T, int n>
struct LanesOf {
  typedef T type __attribute__((vector_size(sizeof(T) * n)));
};
template <class T, int n>
using lanes = typename LanesOf<T, n>::type;

template <class S>
struct Vec {
  static constexpr int width = APEX_VECTOR_BYTES / int(sizeof(S));
  lanes<S, width> v;
  Vec() = default;
  APEX_INLINE Vec(lanes<S, width> lanes_) : v(lanes_) {}
  APEX_INLINE Vec(S x) : v(lanes<S, width>{} + x) {}
  friend APEX_INLINE Vec operator+(Vec a, Vec b) { return a.v + b.v; }
  friend APEX_INLINE Vec operator-(Vec a, Vec b) { return a.v - b.v; }
  friend APEX_INLINE Vec operator*(Vec a, Vec b) { return a.v * b.v; }
  friend APEX_INLINE Vec operator/(Vec a, Vec b) { return a.v / b.v; }
  // Lane by lane: where `a == b`, `yes`, else `no`.
  static APEX_INLINE Vec select_equal(Vec a, Vec b, Vec yes, Vec no) { return a.v == b.v ? yes.v : no.v; }
  friend APEX_INLINE Vec maximum(Vec a, Vec b) { return a.v < b.v ? b.v : a.v; }
  friend APEX_INLINE Vec sign_of(Vec x) {
    const lanes<S, width> zero{}, one = zero + S(1);
    return x.v > zero ? one : (x.v < zero ? -one : x.v);
  }
  // The first n lanes, zeros behind.
  static APEX_INLINE Vec first(Vec x, int n) {
    lanes<S, width> place;
    for (int i = 0; i < width; ++i) place[i] = S(i);
    return place < lanes<S, width>{} + S(n) ? x.v : lanes<S, width>{};
  }
};

#if APEX_VECTOR_BYTES == 64
APEX_INLINE Vec<float> square_root(Vec<float> x) { return lanes<float, 16>(_mm512_sqrt_ps(x.v)); }
APEX_INLINE Vec<double> square_root(Vec<double> x) { return lanes<double, 8>(_mm512_sqrt_pd(x.v)); }
#elif APEX_VECTOR_BYTES == 32
APEX_INLINE Vec<float> square_root(Vec<float> x) { return lanes<float, 8>(_mm256_sqrt_ps(x.v)); }
APEX_INLINE Vec<double> square_root(Vec<double> x) { return lanes<double, 4>(_mm256_sqrt_pd(x.v)); }
#elif defined(__SSE2__)
APEX_INLINE Vec<float> square_root(Vec<float> x) { return lanes<float, 4>(_mm_sqrt_ps(x.v)); }
APEX_INLINE Vec<double> square_root(Vec<double> x) { return lanes<double, 2>(_mm_sqrt_pd(x.v)); }
#else
template <class S>
APEX_INLINE Vec<S> square_root(Vec<S> x) {
  for (int i = 0; i < Vec<S>::width; ++i) x.v[i] = square_root(x.v[i]);
  return x;
}
#endif

// ---- the two half types ----

template <class T>
struct Raw {
  using type = T;
};
template <>
struct Raw<c10::Half> {
  using type = unsigned short;
};
template <>
struct Raw<c10::BFloat16> {
  using type = unsigned short;
};
template <class T>
using raw = typename Raw<T>::type;  // what memory holds

template <class T>
using signed_bits = std::conditional_t<sizeof(T) == 2, short, std::conditional_t<sizeof(T) == 4, int, long long>>;

// GCC's own __builtin_convertvector goes through half vectors, for several times the instructions.
template <int n>
APEX_INLINE lanes<unsigned, n> widen_bits(lanes<unsigned short, n> x) {
#if APEX_VECTOR_BYTES == 64
  if constexpr (n == 16) return (lanes<unsigned, n>)_mm512_cvtepu16_epi32((__m256i)x);
#endif
#if APEX_VECTOR_BYTES >= 32
  if constexpr (n == 8) return (lanes<unsigned, n>)_mm256_cvtepu16_epi32((__m128i)x);
#endif
  return __builtin_convertvector(x, lanes<unsigned, n>);
}

// Of numbers below 2^16.
template <int n>
APEX_INLINE lanes<unsigned short, n> narrow_bits(lanes<unsigned, n> x) {
#if APEX_VECTOR_BYTES == 64
  if constexpr (n == 16) return (lanes<unsigned short, n>)_mm512_cvtepi32_epi16((__m512i)x);
  if constexpr (n == 8) return (lanes<unsigned short, n>)_mm256_cvtepi32_epi16((__m256i)x);
#elif APEX_VECTOR_BYTES == 32
  if constexpr (n == 8)
    return (lanes<unsigned short, n>)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x),
                                                      _mm256_extracti128_si256((__m256i)x, 1));
#endif
  return __builtin_convertvector(x, lanes<unsigned short, n>);
}

template <int n>
APEX_INLINE lanes<float, n> decode(lanes<unsigned short, n> x, c10::BFloat16*) {
  return (lanes<float, n>)(widen_bits<n>(x) << 16);
}

// To the nearest, ties to even. A NaN stays one: the rounding must not carry it into infinity.
template <int n>
APEX_INLINE lanes<unsigned short, n> encode(lanes<float, n> x, c10::BFloat16*) {
  const auto bits = (lanes<unsigned, n>)x;
  const lanes<unsigned, n> rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const lanes<unsigned, n> quiet_nan = lanes<unsigned, n>{} + 0x7FC0u;
  return narrow_bits<n>(x == x ? rounded : quiet_nan);
}

template <int n>
APEX_INLINE lanes<float, n> decode(lanes<unsigned short, n> x, c10::Half*) {
#if APEX_VECTOR_BYTES == 64
  if constexpr (n == 16) return (lanes<float, n>)_mm512_cvtph_ps((__m256i)x);
#endif
#if APEX_VECTOR_BYTES >= 32
  if constexpr (n == 8) return (lanes<float, n>)_mm256_cvtph_ps((__m128i)x);
  if constexpr (n == 4) return (lanes<float, n>)_mm_cvtph_ps(_mm_set_epi64x(0, (long long)(x)));
#endif
  if constexpr (APEX_VECTOR_BYTES < 32) {
    lanes<float, n> y;
    for (int i = 0; i < n; ++i) y[i] = float(c10::Half(x[i], c10::Half::from_bits()));
    return y;
  }
}

template <int n>
APEX_INLINE lanes<unsigned short, n> encode(lanes<float, n> x, c10::Half*) {
#if APEX_VECTOR_BYTES == 64
  if constexpr (n == 16)
    return (lanes<unsigned short, n>)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
#if APEX_VECTOR_BYTES >= 32
  if constexpr (n == 8) return (lanes<unsigned short, n>)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  if constexpr (n == 4)
    return (lanes<unsigned short, n>)((__v2di)_mm_cvtps_ph((__m128)x, _MM_FROUND_TO_NEAREST_INT))[0];
#endif
  if constexpr (APEX_VECTOR_BYTES < 32) {
    lanes<unsigned short, n> y;
    for (int i = 0; i < n; ++i) y[i] = c10::Half(x[i]).x;
    return y;
  }
}

// ---- float and double ----

// GCC's own __builtin_convertvector goes through half vectors here, for three to four times the instructions.
template <class To, class From, int n>
APEX_INLINE lanes<To, n> convert(lanes<From, n> x) {
#if APEX_VECTOR_BYTES == 64
  if constexpr (n == 8 && sizeof(From) < sizeof(To)) return lanes<To, n>(_mm512_cvtps_pd((__m256)x));
  if constexpr (n == 8 && sizeof(From) > sizeof(To)) return lanes<To, n>(_mm512_cvtpd_ps((__m512d)x));
#elif APEX_VECTOR_BYTES == 32
  if constexpr (n == 4 && sizeof(From) < sizeof(To)) return lanes<To, n>(_mm256_cvtps_pd((__m128)x));
  if constexpr (n == 4 && sizeof(From) > sizeof(To)) return lanes<To, n>(_mm256_cvtpd_ps((__m256d)x));
#endif
  return __builtin_convertvector(x, lanes<To, n>);
}

// ---- lanes of S from and to memory that holds T ----

template <class S, class T, int n>
APEX_INLINE lanes<S, n> widen(lanes<raw<T>, n> x) {
  if constexpr (sizeof(T) == 2)
    return convert<S, float, n>(decode<n>(x, (T*)nullptr));
  else
    return convert<S, T, n>(x);
}

template <class T, class S, int n>
APEX_INLINE lanes<raw<T>, n> narrow(lanes<S, n> x) {
  if constexpr (sizeof(T) == 2)
    return encode<n>(convert<float, S, n>(x), (T*)nullptr);
  else
    return convert<T, S, n>(x);
}

template <class S, class T>
APEX_INLINE Vec<S> load(const T* from) {
  lanes<raw<T>, Vec<S>::width> x;
  __builtin_memcpy(&x, from, sizeof(x));
  return widen<S, T, Vec<S>::width>(x);
}

template <class T, class S>
APEX_INLINE void store(T* to, Vec<S> x) {
  const auto y = narrow<T, S, Vec<S>::width>(x.v);
  __builtin_memcpy(to, &y, sizeof(y));
}

// sum + x * x where the square is exact, as of any float: there a fused multiply-add gives the same bits.
APEX_INLINE Vec<double> add_exact_square(Vec<double> sum, Vec<double> x) {
#if APEX_VECTOR_BYTES == 64
  return lanes<double, 8>(_mm512_fmadd_pd(x.v, x.v, sum.v));
#elif APEX_VECTOR_BYTES == 32
  return lanes<double, 4>(_mm256_fmadd_pd(x.v, x.v, sum.v));
#else
  return sum + x * x;
#endif
}

APEX_INLINE void halves(Vec<float> x, lanes<float, Vec<double>::width> (&half)[2]) {
  constexpr int n = Vec<double>::width;
#if APEX_VECTOR_BYTES == 64
  half[0] = lanes<float, n>(_mm512_castps512_ps256(x.v));
  half[1] = lanes<float, n>(_mm512_extractf32x8_ps(x.v, 1));
#elif APEX_VECTOR_BYTES == 32
  half[0] = lanes<float, n>(_mm256_castps256_ps128(x.v));
  half[1] = lanes<float, n>(_mm256_extractf128_ps(x.v, 1));
#else
  static_assert(sizeof(half) == sizeof(x) && n > 0);
  __builtin_memcpy(half, &x, sizeof(half));
#endif
}

// Adds the squares of x to the doubles of the same elements.
APEX_INLINE void add_squares(Vec<double>* sums, Vec<float> x) {
  lanes<float, Vec<double>::width> half[2];
  halves(x, half);
  for (int i = 0; i < 2; ++i)
    sums[i] = add_exact_square(sums[i], Vec<double>(convert<double, float, Vec<double>::width>(half[i])));
}
APEX_INLINE void add_squares(Vec<double>* sums, Vec<double> x) { *sums = *sums + x * x; }

// The k-th of the vectors that hold the `block` elements at `from`. Of bfloat16 the even elements come first, then the
// odd ones: a shift or a mask of their pairs makes floats, and no lane has to move.
template <int block, class T>
APEX_INLINE Vec<double> part(const T* from, int k) {
  constexpr int n = Vec<double>::width;
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    constexpr int half = block / 2 / n;
    lanes<unsigned, n> pairs;
    __builtin_memcpy(&pairs, from + 2 * n * (k % half), sizeof(pairs));
    return convert<double, float, n>((lanes<float, n>)(k < half ? pairs << 16 : pairs & 0xFFFF0000u));
  } else {
    return load<double>(from + n * k);
  }
}

// The value that x has once stored as T.
template <class T, class S>
APEX_INLINE Vec<S> round_to(Vec<S> x) {
  return widen<S, T, Vec<S>::width>(narrow<T, S, Vec<S>::width>(x.v));
}

}  // namespace APEX_ISA

template <class S>
struct ScalarOf<APEX_ISA::Vec<S>> {
  using type = S;
};

}  // namespace lightning_apex
