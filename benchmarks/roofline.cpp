// The memory traffic of an AdamW step and next to none of its arithmetic: four streams read, three of them written in
// place, with the prefetch and the split among threads that serve such a loop best.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Chunk {
  float* p;
  const float* g;
  float *m, *v;
  int64_t n;
};

constexpr int64_t kChunk = 64 * 1024;
constexpr int64_t kLine = 16;
constexpr int64_t kAhead = 512;  // floats, 2 KB

inline void touch(float* p, const float* g, float* m, float* v, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    m[i] = m[i] * 0.9f + g[i];
    v[i] = v[i] * 0.999f + g[i] * g[i];
    p[i] = p[i] * 0.9999f + g[i];
  }
}

void walk(const Chunk& c) {
  const int64_t lines = c.n / kLine * kLine;
  for (int64_t i = 0; i < lines; i += kLine) {
    __builtin_prefetch(c.p + i + kAhead, 1);
    __builtin_prefetch(c.g + i + kAhead, 0);
    __builtin_prefetch(c.m + i + kAhead, 1);
    __builtin_prefetch(c.v + i + kAhead, 1);
    touch(c.p + i, c.g + i, c.m + i, c.v + i, kLine);
  }
  touch(c.p + lines, c.g + lines, c.m + lines, c.v + lines, c.n - lines);
}

}  // namespace

extern "C" void traffic(float* const* p, const float* const* g, float* const* m, float* const* v, const int64_t* sizes,
                        int64_t tensors, int threads) {
  std::vector<Chunk> chunks;
  for (int64_t t = 0; t < tensors; ++t)
    for (int64_t i = 0; i < sizes[t]; i += kChunk)
      chunks.push_back({p[t] + i, g[t] + i, m[t] + i, v[t] + i, std::min(kChunk, sizes[t] - i)});
  const int64_t count = static_cast<int64_t>(chunks.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t k = 0; k < count; ++k) walk(chunks[k]);
}
