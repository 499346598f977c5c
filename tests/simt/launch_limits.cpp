#include "launch_limits.h"

#include <stdexcept>

namespace simt {
namespace {

constexpr unsigned kMaxThreads = 1024, kMaxThreadsZ = 64, kMaxBlocksYZ = 65535, kMaxBlocksX = 2147483647;
constexpr size_t kMaxDynamicShared = 64 << 10, kMaxParameters = 4096;

}  // namespace

std::string text(uint3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string text(Where where) {
  const std::string file = where.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(where.line);
}

void check_launch(const Launch& launch, Where where) {
  const dim3 b = launch.blocks, t = launch.threads;
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error("simt: invalid launch at " + text(where) + ": " + what);
  };
  if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > kMaxBlocksX || b.y > kMaxBlocksYZ || b.z > kMaxBlocksYZ)
    refuse("a grid of " + text(uint3{b.x, b.y, b.z}) + " blocks");
  const uint64_t threads = uint64_t(t.x) * t.y * t.z;
  if (threads == 0 || threads > kMaxThreads || t.z > kMaxThreadsZ)
    refuse("a block of " + text(uint3{t.x, t.y, t.z}) + " threads");
  if (launch.shared_bytes > kMaxDynamicShared) refuse(std::to_string(launch.shared_bytes) + " bytes of shared memory");
  if (launch.parameter_bytes > kMaxParameters)
    refuse(std::to_string(launch.parameter_bytes) + " bytes of kernel parameters");
}

}  // namespace simt
