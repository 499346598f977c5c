#include "backend.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>

namespace lightning_apex {

namespace {

constexpr const char* kVariable = "LIGHTNING_APEX_CPU_BACKEND";

const std::vector<const Backend*>& available() {
  static const std::vector<const Backend*> found = [] {
    std::vector<const Backend*> list;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      list.push_back(&kAvx512Backend);
    if (avx2) list.push_back(&kAvx2Backend);
#endif
    list.push_back(&kPortableBackend);
    return list;
  }();
  return found;
}

const Backend* find(const std::string& name, const char* asked_by) {
  std::string names;
  for (const Backend* backend : available()) {
    if (name == backend->name) return backend;
    names += (names.empty() ? "" : ", ") + std::string(backend->name);
  }
  TORCH_CHECK_VALUE(false, asked_by, " asks for \"", name, "\", which this machine cannot run; it has ", names);
}

std::atomic<const Backend*> chosen{nullptr};

}  // namespace

const Backend& cpu_backend() {
  const Backend* backend = chosen.load(std::memory_order_relaxed);
  if (backend == nullptr) {
    const char* wanted = std::getenv(kVariable);
    backend = wanted != nullptr && *wanted != '\0' ? find(wanted, kVariable) : available().front();
    chosen.store(backend, std::memory_order_relaxed);
  }
  return *backend;
}

std::vector<std::string> cpu_backends() {
  std::vector<std::string> names;
  for (const Backend* backend : available()) names.emplace_back(backend->name);
  return names;
}

void set_cpu_backend(const std::string& name) {
  chosen.store(find(name, "set_cpu_backend"), std::memory_order_relaxed);
}

}  // namespace lightning_apex
