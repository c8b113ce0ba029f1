// Pools grow to what is in use at once, which steps of training repeat, and never shrink.
#include "cuda/device.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/error.h"

namespace perseus::cuda {
namespace {

constexpr unsigned kNonBlockingStream = 1, kEventWithoutTime = 2, kPortableMemory = 1;
constexpr int kRelaxedCapture = 2;
constexpr int kHighestPriority = -5;  // the driver takes the nearest that the device has
constexpr size_t kLeastBytes = 64 * 1024;
constexpr int64_t kPatience = kSecond;  // for copies under way when a device is given up

// Four sizes for each doubling, so that blocks serve again for other tensors, and a quarter at most is wasted.
size_t rounded(size_t bytes) {
  size_t step = kLeastBytes / 4;
  while (step * 8 < bytes) step *= 2;
  return std::max(kLeastBytes, (bytes + step - 1) / step * step);
}

}  // namespace

Device::Current::Current(const Device& device) : capture_mode_(kRelaxedCapture) {
  const Driver& driver = Driver::get();
  driver.check(driver.call().push_context(device.context_), "cuCtxPushCurrent");
  driver.call().exchange_capture_mode(&capture_mode_);
}

Device::Current::~Current() {
  Handle context = nullptr;
  Driver::get().call().exchange_capture_mode(&capture_mode_);
  Driver::get().call().pop_context(&context);
}

Device::Device(int index) : driver_(Driver::get()), index_(index) {
  const int devices = driver_.devices();
  if (index < 0 || index >= devices)
    fail(ErrorKind::kInvalidArgument, "[cuda] a tensor is on GPU " + std::to_string(index) +
                                          ", but this process sees " + std::to_string(devices) +
                                          " (CUDA_VISIBLE_DEVICES)");
  driver_.check(driver_.call().device_get(&ordinal_, index), "cuDeviceGet");
  driver_.check(driver_.call().retain_primary(&context_, ordinal_), "cuDevicePrimaryCtxRetain");
  const Current current(*this);
  for (Handle* stream : {&to_host_, &to_device_})
    driver_.check(driver_.call().stream_create(stream, kNonBlockingStream, kHighestPriority),
                  "cuStreamCreateWithPriority");
}

Device::~Device() {
  const int64_t deadline = now_ns() + kPatience;
  const MutexLock lock(mutex_);
  try {
    const Current current(*this);
    for (collect(); !retiring_.empty() && now_ns() < deadline; collect())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Freeing waits for whatever the device does: a stream of the user's that never ends must not hold us.
    if (retiring_.empty())
      for (const auto& [bytes, data] : blocks_) driver_.call().host_free(data);
    for (Handle event : events_) driver_.call().event_destroy(event);
    driver_.call().stream_destroy(to_host_);
    driver_.call().stream_destroy(to_device_);
  } catch (const std::exception&) {
    // The process ends, and the driver has ended before it.
  }
  driver_.call().release_primary(ordinal_);
}

// Blocks whose events have happened are free again.
void Device::collect() {
  const auto happened = [this](const Retiring& retiring) PERSEUS_REQUIRES(mutex_) {
    if (driver_.call().event_query(retiring.event) == kNotReady) return false;
    blocks_.emplace(retiring.block.bytes, retiring.block.data);
    events_.push_back(retiring.event);
    return true;
  };
  retiring_.erase(std::remove_if(retiring_.begin(), retiring_.end(), happened), retiring_.end());
}

Device::Block Device::take_block(size_t bytes) {
  const MutexLock lock(mutex_);
  auto found = blocks_.lower_bound(bytes);
  if (found == blocks_.end() || found->first > 2 * bytes) {
    collect();
    found = blocks_.lower_bound(bytes);
  }
  if (found == blocks_.end() || found->first > 2 * bytes) return Block();
  const Block block{found->second, found->first};
  blocks_.erase(found);
  return block;
}

Device::Block Device::allocate(size_t bytes) {
  const size_t wanted = rounded(bytes);
  if (const Block block = take_block(wanted); block.data != nullptr) return block;
  void* memory = nullptr;
  driver_.check(driver_.call().host_allocate(&memory, wanted, kPortableMemory),
                ("cuMemHostAlloc of " + std::to_string(wanted) + " bytes of page-locked memory").c_str());
  const MutexLock lock(mutex_);
  pinned_ += wanted;
  return Block{static_cast<Byte*>(memory), wanted};
}

void Device::free(const Block& block, Handle event) {
  const MutexLock lock(mutex_);
  if (event == nullptr) blocks_.emplace(block.bytes, block.data);
  else retiring_.push_back({block, event});
}

Handle Device::take_event() {
  {
    const MutexLock lock(mutex_);
    if (!events_.empty()) {
      const Handle event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  Handle event = nullptr;
  driver_.check(driver_.call().event_create(&event, kEventWithoutTime), "cuEventCreate");
  return event;
}

void Device::give_event(Handle event) {
  const MutexLock lock(mutex_);
  events_.push_back(event);
}

size_t Device::pinned_bytes() const {
  const MutexLock lock(mutex_);
  return pinned_;
}

Device& Devices::at(int index) {
  const MutexLock lock(mutex_);
  std::unique_ptr<Device>& device = devices_[index];
  if (!device) device = std::make_unique<Device>(index);
  return *device;
}

size_t Devices::pinned_bytes() const {
  const MutexLock lock(mutex_);
  size_t bytes = 0;
  for (const auto& [index, device] : devices_)
    if (device) bytes += device->pinned_bytes();
  return bytes;
}

}  // namespace perseus::cuda
