// Vectors at the edges of memory: whole ones, parts of one, stores that bypass the cache. Included once by each
// batch_norm_<isa>.cpp, after kernels.h and before isa_end.h (see vec.h why it includes nothing).

namespace lightning_apex {
namespace APEX_ISA {

// `to` is aligned to what is stored.
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

// After stores past the cache, before other threads are told.
APEX_INLINE void fence_if(bool past_cache) {
#if defined(__SSE2__)
  if (past_cache) _mm_sfence();
#endif
}

// A vector's worth of elements.
template <class S, bool aligned>
struct Whole {
  template <class T>
  APEX_INLINE Vec<S> load(const T* from) const {
    return APEX_ISA::load<S>(from);
  }
  // The same, and asks for what will be loaded soon.
  template <class T>
  APEX_INLINE Vec<S> stream(const T* from) const {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + kPrefetch));
    return APEX_ISA::load<S>(from);
  }
  template <class T>
  APEX_INLINE void store(T* to, Vec<S> x, bool past_cache) const {
    if (aligned && past_cache)
      store_past_cache(to, x);
    else
      APEX_ISA::store(to, x);
  }
};

// Fewer.
template <class S>
struct Some {
  int64_t n;
  template <class T>
  APEX_INLINE Vec<S> load(const T* from) const {
    return APEX_ISA::load<S>(Padded<T>().take(from, n));
  }
  template <class T>
  APEX_INLINE Vec<S> stream(const T* from) const {
    return load(from);
  }
  template <class T>
  APEX_INLINE void store(T* to, Vec<S> x, bool) const {
    Padded<T> copy;
    APEX_ISA::store(copy.get(), x);
    copy.put(to, n);
  }
};

// body(at, lanes) for the elements [0, n), each once: `head` of them, then whole vectors, then the rest.
template <class S, class Body>
APEX_INLINE void for_each_once(int64_t head, int64_t n, const Body& body) {
  constexpr int64_t w = Vec<S>::width;
  for (int64_t at = 0; at < head; at += w) body(at, Some<S>{head - at < w ? head - at : w});
  int64_t at = head;
  for (; at + w <= n; at += w) body(at, Whole<S, true>());
  if (at < n) body(at, Some<S>{n - at});
}

// The same where doing an element twice does no harm: then the last vector overlaps the one before.
template <class S, class Body>
APEX_INLINE void for_each(int64_t n, const Body& body) {
  constexpr int64_t w = Vec<S>::width;
  if (n < w) return body(0, Some<S>{n});
  int64_t at = 0;
  for (; at + w <= n; at += w) body(at, Whole<S, true>());
  if (at < n) body(n - w, Whole<S, false>());
}

// The one for stores into `out`: past the cache, lines must be written at once and from their start.
template <class S, class T, class Body>
APEX_INLINE void for_each_of(const T* out, int64_t n, bool past_cache, const Body& body) {
  if (!past_cache) return for_each<S>(n, body);
  const int64_t past = int64_t(reinterpret_cast<uintptr_t>(out) % kCacheLine);
  const int64_t head = past == 0 ? 0 : (kCacheLine - past) / int64_t(sizeof(T));
  for_each_once<S>(head < n ? head : n, n, body);
}

template <class S>
APEX_INLINE Vec<S> zero_where_not_positive(Vec<S> judge, Vec<S> x) {
  return judge.v <= 0 ? lanes<S, Vec<S>::width>{} : x.v;
}

// Ones for some lanes of a block, zeros for the others.
template <class S>
struct MaskTable {
  alignas(64) S lane[3 * kBlock];
  constexpr MaskTable() : lane() {
    for (int64_t i = kBlock; i < 2 * kBlock; ++i) lane[i] = 1;
  }
};
template <class S>
inline constexpr MaskTable<S> kMasks{};
// The k-th vector of the mask for the first, or for the last, n lanes.
template <class S>
APEX_INLINE Vec<S> first_lanes(int64_t n, int k) {
  return load<S>(kMasks<S>.lane + 2 * kBlock - n + k * Vec<S>::width);
}
template <class S>
APEX_INLINE Vec<S> last_lanes(int64_t n, int k) {
  return load<S>(kMasks<S>.lane + n + k * Vec<S>::width);
}

// Adds up the lanes of a block, the upper half to the lower until one is left.
template <class S>
APEX_INLINE S fold(S* lane) {
  for (int64_t half = kBlock / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

}  // namespace APEX_ISA
}  // namespace lightning_apex
