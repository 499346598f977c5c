// The one door between our kernels and the machine they run on.
//
//   nvcc, and g++ for the host files of a CUDA build   CUDA
//   g++ -DSIMT_EMU                                     the test-only SIMT machine of tests/simt, tensors in host memory
//
// No ATen here: nvcc needs a quarter of a minute to parse it, and kernels have no use for it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <type_traits>

#if defined(SIMT_EMU)
#include "simt.h"
#else
#include <cuda_runtime.h>
#endif

namespace lightning_apex {

// A type carried as a value, and a parameter type that is not deduced.
template <class T>
struct Tag {
  using type = T;
};
template <class T>
using Exactly = typename Tag<T>::type;

// Calls f(Tag<T>{}) for every element type that kernels know.
template <class F>
void for_each_type(F&& f) {
  f(Tag<c10::Half>{});
  f(Tag<c10::BFloat16>{});
  f(Tag<float>{});
  f(Tag<double>{});
}
template <class T>
constexpr c10::ScalarType dtype_of = c10::CppTypeToScalarType<T>::value;

// The type a kernel computes in: double where a double takes part, else float.
template <class... T>
using compute_t = std::conditional_t<(std::is_same_v<T, double> || ...), double, float>;

// What a vector access moves at once: N elements, in pieces of at most 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T v[N];
};

constexpr unsigned kFullWarp = 0xffffffffu;

// How many threads a block has, and how many elements a chunk: what the code says. Only the SIMT machine's tests choose
// others, to see that nothing depends on it. `most`: what a block's shared arrays have room for.
#if defined(SIMT_EMU)
inline unsigned block_threads(int usual, int most = 1024) { return simt::block_threads(usual, most); }
inline int chunk_size(int usual) { return simt::chunk_size(usual); }
#else
__host__ __device__ constexpr unsigned block_threads(int usual, int /*most*/ = 1024) { return unsigned(usual); }
__host__ __device__ constexpr int chunk_size(int usual) { return usual; }
#endif

// A launch is asynchronous, so it may be named in another's error message: then this says where it was made.
#if defined(SIMT_EMU)
struct Stream {};
#else
using Stream = cudaStream_t;
// `kernel`: what was launched, for the message; in host.cpp.
void throw_on_error(cudaError_t status, const char* file, int line, const void* kernel = nullptr);
#endif
struct Grid {
  dim3 blocks, threads;
  size_t shared_bytes;
  Stream stream;
  const char* file;
  int line;
  Grid(dim3 blocks, dim3 threads, size_t shared_bytes, Stream stream, const char* file = __builtin_FILE(),
       int line = __builtin_LINE())
      : blocks(blocks), threads(threads), shared_bytes(shared_bytes), stream(stream), file(file), line(line) {}
};

#if defined(SIMT_EMU)

#define APEX_SHARED(name, ...) SIMT_SHARED(name, __VA_ARGS__)
#define APEX_DYNAMIC_SHARED(T, name) SIMT_DYNAMIC_SHARED(T, name)

// The size of the parameters is checked when it runs here, so that a test can see it refused.
template <class... P>
void launch(void (*kernel)(P...), const Grid& grid, const Exactly<P>&... args) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "kernel parameters are copied as bytes");
  auto thread = [&] { kernel(args...); };
  simt::run({grid.blocks, grid.threads, grid.shared_bytes, (((sizeof(P) + 7) / 8 * 8) + ... + 0)},
            [](const void* t) { (*static_cast<const decltype(thread)*>(t))(); }, &thread, {grid.file, grid.line});
}

template <int N, class T>
Vec<T, N> load(const T* p, simt::Where where = simt::Where::current()) {
  simt::check_aligned(p, alignof(Vec<T, N>), where);
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, class T>
void store(T* p, const Vec<T, N>& value, simt::Where where = simt::Where::current()) {
  simt::check_aligned(p, alignof(Vec<T, N>), where);
  *reinterpret_cast<Vec<T, N>*>(p) = value;
}
template <class T>
void store_relaxed(T* p, T value) {
  __atomic_store(p, &value, __ATOMIC_RELAXED);
}
template <class T>
T load_relaxed(const T* p) {
  T value;
  __atomic_load(p, &value, __ATOMIC_RELAXED);
  return value;
}

#elif defined(__CUDACC__)

#define APEX_SHARED(name, ...) __shared__::lightning_apex::Exactly<__VA_ARGS__> name
#define APEX_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char apex_dynamic_shared_[]; \
  T* name = reinterpret_cast<T*>(apex_dynamic_shared_)

template <class... P>
void launch(void (*kernel)(P...), const Grid& grid, const Exactly<P>&... args) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "kernel parameters are copied as bytes");
  static_assert((((sizeof(P) + 7) / 8 * 8) + ... + 0) <= 4096, "kernel parameters are at most 4 KB");
  if (grid.shared_bytes > 48u << 10)
    throw_on_error(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(grid.shared_bytes)),
                   grid.file, grid.line, reinterpret_cast<const void*>(kernel));
  kernel<<<grid.blocks, grid.threads, grid.shared_bytes, grid.stream>>>(args...);
  throw_on_error(cudaGetLastError(), grid.file, grid.line, reinterpret_cast<const void*>(kernel));
}

// Tensors are in global memory. The compiler cannot know it of an address that it reads from a table, and would take
// instructions that ask, for each access, where it is.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  __builtin_assume(__isGlobal(p));
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
// One instruction. Left to itself, the compiler takes the store of a vector apart whose elements are made in branches.
__device__ __forceinline__ void store_word(void* p, uint4 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(p)), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}
__device__ __forceinline__ void store_word(void* p, uint2 w) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(__cvta_generic_to_global(p)), "r"(w.x), "r"(w.y) : "memory");
}
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& value) {
  if constexpr (alignof(Vec<T, N>) < 8) {
    __builtin_assume(__isGlobal(p));
    *reinterpret_cast<Vec<T, N>*>(p) = value;
  } else {
    using Word = std::conditional_t<alignof(Vec<T, N>) == 16, uint4, uint2>;
    for (int i = 0; i < int(sizeof(value) / sizeof(Word)); ++i) {
      Word word;
      __builtin_memcpy(&word, reinterpret_cast<const Word*>(&value) + i, sizeof(word));
      store_word(reinterpret_cast<Word*>(p) + i, word);
    }
  }
}
// Several threads may store the same value at the same place: one of them lands whole.
template <class T>
__device__ __forceinline__ void store_relaxed(T* p, T value) {
  *static_cast<volatile T*>(p) = value;
}
// What another block wrote, past this multiprocessor's own cache.
template <class T>
__device__ __forceinline__ T load_relaxed(const T* p) {
  return *static_cast<const volatile T*>(p);
}

#endif

#if defined(SIMT_EMU) || defined(__CUDACC__)

// Whether this is the last of `count` calls with `arrivals`: 0 before the first, and again after the last. What the
// calling threads did before, the last may read, and what they read, it may overwrite.
__device__ __forceinline__ bool arrives_last(uint32_t* arrivals, uint32_t count) {
  __threadfence();
  const bool last = atomicInc(arrivals, count - 1) == count - 1;
  __threadfence();
  return last;
}

template <int N, class T>
__device__ __forceinline__ bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Vec<T, N>) == 0;
}
// The one element at `p`.
__device__ __forceinline__ double read_scalar(const void* p, c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Double) return *static_cast<const double*>(p);
  if (dtype == c10::ScalarType::Float) return *static_cast<const float*>(p);
  if (dtype == c10::ScalarType::Half) return float(*static_cast<const c10::Half*>(p));
  return float(*static_cast<const c10::BFloat16*>(p));
}
template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

#endif

}  // namespace lightning_apex
