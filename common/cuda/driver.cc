// Finds the driver's functions by their names in the library, versions included, as its header would.
#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdint>

#include "base/error.h"
#include "base/look_up.h"

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

Driver::Driver(const std::string& path) : path_(path), library_(::dlopen(path.c_str(), RTLD_NOW)) {
  if (library_ == nullptr) {
    const char* why = ::dlerror();
    fail(ErrorKind::kIo, std::string("[cuda] GPUs need NVIDIA's driver, which cannot be opened (") +
                             (why == nullptr ? kName : why) +
                             "): install it, or put its directory into LD_LIBRARY_PATH");
  }
  const auto find = [this](const char* name, auto* function) {
    look_up(library_, "[cuda] " + path_, name, "install a driver for CUDA " + version_text(kOldest) + " or newer",
            function);
  };
  find("cuInit", &functions_.init);
  find("cuDriverGetVersion", &functions_.driver_version);
  find("cuGetErrorName", &functions_.error_name);
  find("cuGetErrorString", &functions_.error_text);
  check(functions_.driver_version(&version_), "cuDriverGetVersion");
  if (version_ < kOldest)
    fail(ErrorKind::kIo, "[cuda] NVIDIA's driver serves CUDA " + version_text(version_) + ": install one for CUDA " +
                             version_text(kOldest) + " or newer");
  find("cuDeviceGetCount", &functions_.device_count);
  find("cuDeviceGet", &functions_.device_get);
  find("cuDevicePrimaryCtxRetain", &functions_.retain_primary);
  find("cuDevicePrimaryCtxRelease_v2", &functions_.release_primary);
  find("cuCtxPushCurrent_v2", &functions_.push_context);
  find("cuCtxPopCurrent_v2", &functions_.pop_context);
  find("cuThreadExchangeStreamCaptureMode", &functions_.exchange_capture_mode);
  find("cuDeviceGetUuid_v2", &functions_.device_uuid);
  find("cuPointerGetAttribute", &functions_.pointer_attribute);
  find("cuStreamCreateWithPriority", &functions_.stream_create);
  find("cuStreamDestroy_v2", &functions_.stream_destroy);
  find("cuStreamSynchronize", &functions_.stream_synchronize);
  find("cuStreamWaitEvent", &functions_.stream_wait);
  find("cuStreamIsCapturing", &functions_.stream_is_capturing);
  find("cuEventCreate", &functions_.event_create);
  find("cuEventDestroy_v2", &functions_.event_destroy);
  find("cuEventRecord", &functions_.event_record);
  find("cuEventQuery", &functions_.event_query);
  find("cuEventSynchronize", &functions_.event_synchronize);
  find("cuMemHostAlloc", &functions_.host_allocate);
  find("cuMemFreeHost", &functions_.host_free);
  find("cuMemAlloc_v2", &functions_.allocate);
  find("cuMemFree_v2", &functions_.free);
  find("cuMemcpyDtoHAsync_v2", &functions_.copy_to_host);
  find("cuMemcpyHtoDAsync_v2", &functions_.copy_to_device);
  find("cuMemcpyDtoDAsync_v2", &functions_.copy_on_device);
  find("cuModuleLoadData", &functions_.load_module);
  find("cuModuleUnload", &functions_.unload_module);
  find("cuModuleGetFunction", &functions_.find_function);
  find("cuLaunchKernel", &functions_.launch);
  if (version_ >= kCopiesInBatches) find("cuMemcpyBatchAsync", &functions_.copy_batch);
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
