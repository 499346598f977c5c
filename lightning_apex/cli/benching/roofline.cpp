// The memory traffic of an optimizer step and none of its arithmetic: streams that are read, some of them written in
// place, in one sweep or in several, with the prefetch and the split among threads that serve such a loop best. Every
// value stays what it was.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kChunk = 64 * 1024;  // elements
constexpr int64_t kGroup = 64;         // elements: an element of n bytes makes n lines of them
constexpr int64_t kLine = 64, kAhead = 2048;

typedef uint64_t Line __attribute__((vector_size(kLine)));

// One tensor of a list.
struct Stream {
  char* data;
  int64_t element;  // bytes
  bool written;
};

struct Chunk {
  int64_t tensor, begin, end;
};

// `zero` is 0, which the compiler does not know.
template <bool written>
inline Line touch(char* at, int64_t lines, uint64_t zero) {
  Line seen{};
  for (int64_t i = 0; i < lines; ++i, at += kLine) {
    __builtin_prefetch(at + kAhead);
    Line line;
    std::memcpy(&line, at, kLine);
    seen |= line;
    if (written) {
      line += zero;
      std::memcpy(at, &line, kLine);
    }
  }
  return seen;
}

uint64_t walk(const Stream* streams, int count, int64_t n, int64_t begin, uint64_t zero) {
  Line seen{};
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup)
    for (int s = 0; s < count; ++s) {
      const Stream stream = streams[s];  // a copy that no store can change
      char* at = stream.data + (begin + i) * stream.element;
      seen |= stream.written ? touch<true>(at, stream.element, zero) : touch<false>(at, stream.element, zero);
    }
  for (int s = 0; s < count; ++s)
    for (int64_t at = (begin + i) * streams[s].element; at < (begin + n) * streams[s].element; ++at) {
      seen[0] |= static_cast<unsigned char>(streams[s].data[at]);
      if (streams[s].written) streams[s].data[at] = static_cast<char>(streams[s].data[at] + zero);
    }
  uint64_t all = 0;
  for (int k = 0; k < 8; ++k) all |= seen[k];
  return all;
}

}  // namespace

// data: for each stream the addresses of all tensors. sweeps: how many of the streams each sweep has, one sweep after
// the other. Returns what was read, so that it has to be.
extern "C" uint64_t traffic(char* const* data, const int64_t* elements, const int64_t* written, const int64_t* sweeps,
                            int64_t n_sweeps, const int64_t* sizes, int64_t tensors, int threads, uint64_t zero) {
  std::vector<Chunk> chunks;
  for (int64_t t = 0; t < tensors; ++t)
    for (int64_t i = 0; i < sizes[t]; i += kChunk) chunks.push_back({t, i, std::min(i + kChunk, sizes[t])});
  const int64_t count = static_cast<int64_t>(chunks.size());
  uint64_t seen = 0;
  int64_t first = 0;
  for (int64_t sweep = 0; sweep < n_sweeps; first += sweeps[sweep++]) {
    const int streams_here = static_cast<int>(sweeps[sweep]);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : seen)
    for (int64_t k = 0; k < count; ++k) {
      Stream streams[8];
      for (int s = 0; s < streams_here; ++s)
        streams[s] = {data[(first + s) * tensors + chunks[k].tensor], elements[first + s], written[first + s] != 0};
      seen |= walk(streams, streams_here, chunks[k].end - chunks[k].begin, chunks[k].begin, zero);
    }
  }
  return seen;
}
