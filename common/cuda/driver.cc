// Finds the driver's functions by their names in the library, versions included, as its header would.
#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdint>

#include "base/error.h"

namespace perseus::cuda {
namespace {

// The driver's name on every Linux: it comes with the kernel module, never with CUDA or a framework.
constexpr const char* kName = "libcuda.so.1";
constexpr int kCopiesInBatches = 12080;
constexpr int kOldest = 11040;  // what today's frameworks ask for is newer

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver(kName);  // an exception leaves it to the next call
  return driver;
}

template <typename Function>
void Driver::look_up(const char* name, Function* function) const {
  *function = reinterpret_cast<Function>(::dlsym(library_, name));
  if (*function == nullptr)
    fail(ErrorKind::kIo,
         "[cuda] " + path_ + " has no " + name + ": install a driver for CUDA " + version_text(kOldest) + " or newer");
}

Driver::Driver(const std::string& path) : path_(path), library_(::dlopen(path.c_str(), RTLD_NOW)) {
  if (library_ == nullptr) {
    const char* why = ::dlerror();
    fail(ErrorKind::kIo, std::string("[cuda] GPUs need NVIDIA's driver, which cannot be opened (") +
                             (why == nullptr ? kName : why) +
                             "): install it, or put its directory into LD_LIBRARY_PATH");
  }
  look_up("cuInit", &functions_.init);
  look_up("cuDriverGetVersion", &functions_.driver_version);
  look_up("cuGetErrorName", &functions_.error_name);
  look_up("cuGetErrorString", &functions_.error_text);
  check(functions_.driver_version(&version_), "cuDriverGetVersion");
  if (version_ < kOldest)
    fail(ErrorKind::kIo, "[cuda] NVIDIA's driver serves CUDA " + version_text(version_) + ": install one for CUDA " +
                             version_text(kOldest) + " or newer");
  look_up("cuDeviceGetCount", &functions_.device_count);
  look_up("cuDeviceGet", &functions_.device_get);
  look_up("cuDevicePrimaryCtxRetain", &functions_.retain_primary);
  look_up("cuDevicePrimaryCtxRelease_v2", &functions_.release_primary);
  look_up("cuCtxPushCurrent_v2", &functions_.push_context);
  look_up("cuCtxPopCurrent_v2", &functions_.pop_context);
  look_up("cuThreadExchangeStreamCaptureMode", &functions_.exchange_capture_mode);
  look_up("cuDeviceGetUuid_v2", &functions_.device_uuid);
  look_up("cuPointerGetAttribute", &functions_.pointer_attribute);
  look_up("cuStreamCreateWithPriority", &functions_.stream_create);
  look_up("cuStreamDestroy_v2", &functions_.stream_destroy);
  look_up("cuStreamSynchronize", &functions_.stream_synchronize);
  look_up("cuStreamWaitEvent", &functions_.stream_wait);
  look_up("cuStreamIsCapturing", &functions_.stream_is_capturing);
  look_up("cuEventCreate", &functions_.event_create);
  look_up("cuEventDestroy_v2", &functions_.event_destroy);
  look_up("cuEventRecord", &functions_.event_record);
  look_up("cuEventQuery", &functions_.event_query);
  look_up("cuEventSynchronize", &functions_.event_synchronize);
  look_up("cuMemHostAlloc", &functions_.host_allocate);
  look_up("cuMemFreeHost", &functions_.host_free);
  look_up("cuMemAlloc_v2", &functions_.allocate);
  look_up("cuMemFree_v2", &functions_.free);
  look_up("cuMemcpyDtoHAsync_v2", &functions_.copy_to_host);
  look_up("cuMemcpyHtoDAsync_v2", &functions_.copy_to_device);
  look_up("cuMemcpyDtoDAsync_v2", &functions_.copy_on_device);
  if (version_ >= kCopiesInBatches) look_up("cuMemcpyBatchAsync", &functions_.copy_batch);
}

int Driver::devices() const {
  int devices = 0;
  check(functions_.init(0), "cuInit");
  check(functions_.device_count(&devices), "cuDeviceGetCount");
  return devices;
}

int Driver::device_of(const void* pointer) const {
  constexpr int kDeviceOrdinal = 9;
  int device = -1;
  check(functions_.init(0), "cuInit");
  const auto address = static_cast<Address>(reinterpret_cast<uintptr_t>(pointer));
  if (functions_.pointer_attribute(&device, kDeviceOrdinal, address) != kSuccess || device < 0)
    fail(ErrorKind::kInvalidArgument, "[cuda] the memory of an array is not that of a GPU");
  return device;
}

void Driver::check(Result code, const char* what) const {
  if (code == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  functions_.error_name(code, &name);
  functions_.error_text(code, &text);
  fail(ErrorKind::kIo, std::string("[cuda] ") + what + ": " + (name == nullptr ? std::to_string(code) : name) + " (" +
                           (text == nullptr ? "an error that this driver does not describe" : text) + ")");
}

}  // namespace perseus::cuda
