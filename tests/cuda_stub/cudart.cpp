// A CUDA runtime without a GPU, to be loaded before the real one (LD_PRELOAD): two devices whose memory is the host's,
// kernels that are not run, and a log of what the host side asked for. What is not here is the real runtime's, which
// finds no driver and says so. Test-only; tests/test_cuda_host.py reads the log.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

constexpr int kDevices = 2;

struct State {
  std::mutex mutex;
  std::string log;
  std::map<const void*, std::string> kernels;  // by the address of the host's function
  bool is_capturing = false, is_busy = false;
  std::string failing;  // launches whose kernel's name has this in it fail
  uintptr_t streams = 0x1000;
};
State& state() {
  static auto* const all = new State;  // never destroyed: torch's own destructors come late
  return *all;
}
thread_local int device = 0;
thread_local cudaError_t last = cudaSuccess;

void note(const std::string& what) {
  const std::lock_guard lock(state().mutex);
  state().log += what + "\n";
}
std::string on(cudaStream_t stream) {
  return " " + std::to_string(device) + " " + std::to_string(reinterpret_cast<uintptr_t>(stream));
}
cudaError_t failed(cudaError_t error) { return last = error; }
cudaError_t allocate(void** p, size_t bytes, const char* what) {
  *p = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(*p, 0, bytes);
  note(what);
  return cudaSuccess;
}
cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  static const char* const names[] = {"h2h", "h2d", "d2h", "d2d", "default"};
  std::memmove(to, from, bytes);
  note("copy " + std::string(names[kind]) + on(stream));
  return cudaSuccess;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration configuration;

cudaError_t launched(const void* kernel, cudaStream_t stream) {
  const std::string& name = state().kernels[kernel];
  if (!state().failing.empty() && name.find(state().failing) != std::string::npos)
    return failed(cudaErrorLaunchOutOfResources);
  note("launch " + name + on(stream));
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- for the tests ----

const char* stub_log() { return state().log.c_str(); }
void stub_clear() { state().log.clear(); }
void stub_fail(const char* kernel) { state().failing = kernel; }
void stub_capture(bool on) { state().is_capturing = on; }
void stub_busy(bool on) { state().is_busy = on; }  // no event is reached

// ---- devices ----

cudaError_t cudaGetDeviceCount(int* n) { return *n = kDevices, cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { return *d = device, cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= kDevices) return failed(cudaErrorInvalidDevice);
  device = d;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof(*p));
  std::strcpy(p->name, "stub");
  p->totalGlobalMem = size_t(8) << 30;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 0, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -1, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return note("sync device"), cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t(8) << 30, cudaSuccess; }

// The driver's, which torch looks up by name: this library passes for libcuda.so.1 too.
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult stub_any_driver_call() { return CUDA_SUCCESS; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** call, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *call = reinterpret_cast<void*>(stub_any_driver_call);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- errors ----

cudaError_t cudaGetLastError() {
  const cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last; }

// ---- memory ----

cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes, "malloc device"); }
cudaError_t cudaFree(void* p) {
  if (p != nullptr) note("free device");
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return allocate(p, bytes, "malloc host"); }
cudaError_t cudaFreeHost(void* p) { return std::free(p), cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  *a = {};
  a->device = device;
  a->hostPointer = a->devicePointer = const_cast<void*>(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, n, kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  note("sync copy");
  return copy(to, from, n, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t stream) {
  std::memset(to, value, n);
  return note("memset" + on(stream)), cudaSuccess;
}

// ---- streams and events ----

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(state().streams += 0x10);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = state().is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id != nullptr) *id = 1;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return note("sync stream" + on(stream)), cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(state().streams += 0x10);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return state().is_busy ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return note("sync event"), cudaSuccess; }

// ---- kernels ----

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  const std::lock_guard lock(state().mutex);
  state().kernels[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(kernel, stream);
}
cudaError_t cudaLaunchKernel(const void* host, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(host, stream);
}
cudaError_t cudaFuncGetName(const char** name, const void* host) {
  return *name = state().kernels[host].c_str(), cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

}  // extern "C"
