// Pools grow to what is in use at once, which steps of training repeat, and never shrink.
#include "cuda/device.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "cuda/chunk_list.h"
#include "cuda/copy_list.h"

namespace perseus::cuda {
namespace {

constexpr unsigned kNonBlockingStream = 1, kEventWithoutTime = 2, kPortableMemory = 1;
constexpr int kRelaxedCapture = 2;
constexpr int kHighestPriority = -5;  // the driver takes the nearest that the device has
constexpr size_t kLeastBytes = 64 * 1024;
constexpr const char* kWorkBefore = "the work on a GPU's stream before a tensor was copied";
constexpr int64_t kAskAgain = 10 * kMicrosecond;
constexpr int64_t kPatience = kSecond;  // for copies under way when a device is given up

// What kernels are for whatever device: its driver compiles the rest, and keeps that for the next time.
constexpr const char kCopySource[] =
#include "cuda/kernels.ptx.inc"
    ;
constexpr const char kChunkSource[] =
#include "cuda/chunk_kernels.ptx.inc"
    ;

// Ordered as Kernel.
constexpr const char* kNames[kKernels] = {"perseus_copy",          "perseus_largest",
                                          "perseus_encode_halves", "perseus_encode_integers",
                                          "perseus_accumulate",    "perseus_decode"};

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

Event::~Event() { device_.give_event(handle_); }

bool Event::happened() const {
  if (happened_.load(std::memory_order_acquire)) return true;
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  const Result result = driver.call().event_query(handle_);
  if (result == kNotReady) return false;
  driver.check(result, kWorkBefore);
  happened_.store(true, std::memory_order_release);
  return true;
}

bool Event::poll() const {
  if (happened_.load(std::memory_order_acquire)) return true;
  if (now_ns() < ask_from_.load(std::memory_order_relaxed)) return false;
  const bool over = happened();
  if (!over) ask_from_.store(now_ns() + kAskAgain, std::memory_order_relaxed);
  return over;
}

void Event::wait() const {
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  driver.check(driver.call().event_synchronize(handle_), kWorkBefore);
}

void Copies::add(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  to_.push_back(static_cast<Address>(reinterpret_cast<uintptr_t>(to)));
  from_.push_back(static_cast<Address>(reinterpret_cast<uintptr_t>(from)));
  bytes_.push_back(bytes);
  total_ += bytes;
}

void Copies::clear() {
  to_.clear();
  from_.clear();
  bytes_.clear();
  total_ = 0;
}

void Copies::give(Way way, Handle stream) {
  const Driver& driver = Driver::get();
  const Functions& call = driver.call();
  const auto copy_all = [&] {
    if (call.copy_batch != nullptr && bytes_.size() > 1 && stream != nullptr) {
      CopyAttributes attributes;
      size_t first = 0, failed = 0;
      driver.check(call.copy_batch(to_.data(), from_.data(), bytes_.data(), bytes_.size(), &attributes, &first, 1,
                                   &failed, stream),
                   "cuMemcpyBatchAsync");
      return;
    }
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (way == Way::kToHost)
        driver.check(
            call.copy_to_host(reinterpret_cast<void*>(static_cast<uintptr_t>(to_[i])), from_[i], bytes_[i], stream),
            "cuMemcpyDtoHAsync");
      else if (way == Way::kToDevice)
        driver.check(
            call.copy_to_device(to_[i], reinterpret_cast<void*>(static_cast<uintptr_t>(from_[i])), bytes_[i], stream),
            "cuMemcpyHtoDAsync");
      else driver.check(call.copy_on_device(to_[i], from_[i], bytes_[i], stream), "cuMemcpyDtoDAsync");
    }
  };
  try {
    copy_all();
  } catch (...) {
    clear();
    throw;
  }
  clear();
}

// The driver's own copies inside a device cost the host as much as one launch each, and batches of them no less.
void Copies::move(const Device& device, Handle stream) {
  if (!device.has_kernels() || bytes_.size() < 2) return give(Way::kOnDevice, stream);
  try {
    launch(device, stream);
  } catch (...) {
    clear();
    throw;
  }
  clear();
}

void Copies::launch(const Device& device, Handle stream) const {
  CopyList list;
  list.count = list.unused = 0;
  uint32_t blocks = 0;
  const auto flush = [&] {
    if (blocks > 0) device.launch(Kernel::kCopy, blocks, &list, stream);
    list.count = blocks = 0;
  };
  for (size_t i = 0; i < bytes_.size(); ++i) {
    list.runs[list.count++] = {to_[i], from_[i], bytes_[i], blocks, 0};
    blocks += static_cast<uint32_t>((bytes_[i] + kBlockBytes - 1) / kBlockBytes);
    if (list.count == CopyList::kMost) flush();
  }
  flush();
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
  to_device_ = make_stream();
  fetching_ = make_stream();
  CopyList nothing;
  nothing.count = nothing.unused = 0;
  no_kernels_ = load_kernels(kCopySource, {Kernel::kCopy}, &nothing, &module_);
  const MutexLock giving(giving_), lock(order_);
  for (Burst* burst : {&burst_, &given_}) burst->ready = take_event();
}

Handle Device::make_stream() {
  Handle stream = nullptr;
  driver_.check(driver_.call().stream_create(&stream, kNonBlockingStream, kHighestPriority),
                "cuStreamCreateWithPriority");
  return stream;
}

Device::Lane Device::lane_of(Handle stream) {
  constexpr size_t kMostKnown = 1024;  // streams that come and go
  const MutexLock lock(lanes_mutex_);
  if (lanes_.size() >= kMostKnown) lanes_.clear();
  const std::thread::id thread = stream == kPerThreadStream ? std::this_thread::get_id() : std::thread::id();
  const auto [known, is_new] = lanes_.emplace(std::make_pair(stream, thread), 0);
  if (is_new) known->second = static_cast<int>(lanes_.size() - 1) % kLanes;
  const auto number = static_cast<size_t>(known->second);
  while (to_host_.size() <= number) to_host_.push_back(make_stream());
  return {known->second, to_host_[number]};
}

// Launches each, too: drivers put off loading to the first launch, and may then wait for all that the device does,
// which can be a kernel of NCCL that waits for another rank.
std::string Device::load_kernels(const char* source, std::initializer_list<Kernel> kernels, void* nothing,
                                 Handle* module) {
  try {
    driver_.check(driver_.call().load_module(module, source), "cuModuleLoadData");
    for (const Kernel kernel : kernels) {
      const auto number = static_cast<size_t>(kernel);
      driver_.check(driver_.call().find_function(&kernels_[number], *module, kNames[number]), "cuModuleGetFunction");
      launch(kernel, 1, nothing, to_device_);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool Device::encodes() {
  std::call_once(chunk_kernels_loaded_, [this] {
    const Current current(*this);
    ChunkList nothing;
    nothing.count = nothing.unused = 0;
    const std::string why_not = load_kernels(
        kChunkSource,
        {Kernel::kLargest, Kernel::kEncodeHalves, Kernel::kEncodeIntegers, Kernel::kAccumulate, Kernel::kDecode},
        &nothing, &chunk_module_);
    encodes_ = why_not.empty();
  });
  return encodes_;
}

void Device::launch(Kernel kernel, uint32_t blocks, void* list, Handle stream) const {
  void* parameters[] = {list};
  driver_.check(driver_.call().launch(kernels_[static_cast<size_t>(kernel)], blocks, 1, 1, kBlockThreads, 1, 1, 0,
                                      stream, parameters, nullptr),
                "cuLaunchKernel");
}

Device::~Device() {
  const int64_t deadline = now_ns() + kPatience;
  // Their events come back to the pool.
  std::vector<Retiring> over, left;
  last_stored_.reset();
  const auto idle = [&] {
    const MutexLock lock(mutex_);
    collect(&over);
    return retiring_.empty();
  };
  try {
    const Current current(*this);
    while (!idle() && now_ns() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const bool all_free = idle();
    {
      const MutexLock lock(mutex_);
      left.swap(retiring_);
    }
    over.clear();
    left.clear();
    {
      const MutexLock giving(giving_), lock(order_);
      for (const Burst* burst : {&burst_, &given_}) give_event(burst->ready);
    }
    give_back(all_free && !given_up_);
  } catch (const std::exception&) {
    // The process ends, and the driver has ended before it; or there is no thread to be had.
  }
}

// To the driver, what is in use excepted. Freeing memory waits for whatever the device does: a stream of the user's, or
// a kernel of another library that never ends, must not hold us. So a thread does it, which may be left alone.
void Device::give_back(bool with_memory) {
  struct Belongings {
    std::vector<Byte*> blocks, device_blocks;
    std::vector<Handle> events, streams, modules;
    Handle context = nullptr;
    Ordinal ordinal = 0;
    std::mutex mutex;
    std::condition_variable changed;
    bool returned = false;
  };
  const auto belongings = std::make_shared<Belongings>();
  belongings->context = context_;
  belongings->ordinal = ordinal_;
  belongings->streams = {to_device_, fetching_};
  {
    const MutexLock lock(lanes_mutex_);
    belongings->streams.insert(belongings->streams.end(), to_host_.begin(), to_host_.end());
  }
  {
    const MutexLock lock(mutex_);
    belongings->events = events_;
    if (with_memory) {
      for (const auto& [bytes, data] : blocks_) belongings->blocks.push_back(data);
      for (const auto& [bytes, data] : device_blocks_) belongings->device_blocks.push_back(data);
      belongings->modules = {module_, chunk_module_};
    }
  }
  std::thread([belongings] {
    const Functions& call = Driver::get().call();
    Handle context = nullptr;
    call.push_context(belongings->context);
    for (Byte* data : belongings->blocks) call.host_free(data);
    for (Byte* data : belongings->device_blocks) call.free(static_cast<Address>(reinterpret_cast<uintptr_t>(data)));
    for (Handle module : belongings->modules)
      if (module != nullptr) call.unload_module(module);
    for (Handle event : belongings->events) call.event_destroy(event);
    for (Handle stream : belongings->streams) call.stream_destroy(stream);
    call.pop_context(&context);
    call.release_primary(belongings->ordinal);
    const std::lock_guard<std::mutex> lock(belongings->mutex);
    belongings->returned = true;
    belongings->changed.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(belongings->mutex);
  belongings->changed.wait_for(lock, std::chrono::nanoseconds(kPatience), [&] { return belongings->returned; });
}

void Device::collect(std::vector<Retiring>* over) {
  const auto busy = [](const Retiring& retiring) {
    try {
      for (const auto* event : {&retiring.event, &retiring.other})
        if (*event && !(*event)->happened()) return true;
      return false;
    } catch (const Error&) {
      return false;  // nothing happens on this device any more
    }
  };
  const auto first = std::stable_partition(retiring_.begin(), retiring_.end(), busy);
  for (auto retiring = first; retiring != retiring_.end(); ++retiring) {
    if (retiring->block.data != nullptr) blocks_.emplace(retiring->block.bytes, retiring->block.data);
    over->push_back(std::move(*retiring));
  }
  retiring_.erase(first, retiring_.end());
}

std::array<char, 16> Device::uuid() const {
  std::array<char, 16> uuid{};
  driver_.check(driver_.call().device_uuid(uuid.data(), ordinal_), "cuDeviceGetUuid");
  return uuid;
}

// The legacy stream answers with an error while a stream that it waits for is captured.
void Device::refuse_capture(Handle stream) const {
  constexpr Result kImplicitCapture = 906;
  int capturing = 0;
  const Result result = driver_.call().stream_is_capturing(stream, &capturing);
  if (result != kImplicitCapture) driver_.check(result, "cuStreamIsCapturing");
  if (capturing != 0 || result == kImplicitCapture)
    fail(ErrorKind::kInvalidArgument,
         "[cuda] this stream is being captured into a CUDA graph, which cannot hold an exchange between ranks: capture "
         "the forward and backward passes alone");
}

// Not one of more than twice the size, which others may need.
Device::Block Device::take(size_t bytes, std::multimap<size_t, Byte*>* blocks) {
  const auto found = blocks->lower_bound(bytes);
  if (found == blocks->end() || found->first > 2 * bytes) return Block();
  const Block block{found->second, found->first};
  blocks->erase(found);
  return block;
}

Device::Block Device::take_block(size_t bytes) {
  std::vector<Retiring> over;
  const MutexLock lock(mutex_);
  Block block = take(bytes, &blocks_);
  if (block.data != nullptr) return block;
  collect(&over);
  return take(bytes, &blocks_);
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

void Device::free(const Block& block, std::shared_ptr<const Event> event, std::shared_ptr<const Event> other) {
  const MutexLock lock(mutex_);
  if (!event && !other) blocks_.emplace(block.bytes, block.data);
  else retiring_.push_back({block, std::move(event), std::move(other), nullptr});
}

void Device::keep(std::shared_ptr<const void> used, std::shared_ptr<const Event> event) {
  const MutexLock lock(mutex_);
  retiring_.push_back({Block(), std::move(event), nullptr, std::move(used)});
}

Device::Block Device::allocate_on_device(size_t bytes) {
  const size_t wanted = rounded(bytes);
  {
    const MutexLock lock(mutex_);
    if (const Block block = take(wanted, &device_blocks_); block.data != nullptr) return block;
  }
  Address memory = 0;
  driver_.check(driver_.call().allocate(&memory, wanted),
                ("cuMemAlloc of " + std::to_string(wanted) + " bytes of a GPU's memory").c_str());
  return Block{reinterpret_cast<Byte*>(static_cast<uintptr_t>(memory)), wanted};
}

void Device::free_on_device(const Block& block) {
  const MutexLock lock(mutex_);
  device_blocks_.emplace(block.bytes, block.data);
}

std::shared_ptr<const Event> Device::record(Handle stream) {
  const auto event = std::make_shared<const Event>(this, take_event());
  driver_.check(driver_.call().event_record(event->handle(), stream), "cuEventRecord");
  return event;
}

std::shared_ptr<const Event> Device::stored() {
  if (stores_since_) last_stored_ = record(to_device_);
  stores_since_ = false;
  return last_stored_;
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

std::shared_ptr<Byte> LastingMemory::allocate(Device* device, size_t bytes) {
  constexpr size_t kShared = 1024 * 1024, kLine = 64;
  const auto whole = [device](size_t size) {
    const Device::Current current(*device);
    const Device::Block block = device->allocate(size);
    return std::shared_ptr<Byte>(block.data, [device, block](Byte*) { device->free(block, nullptr); });
  };
  if (bytes > kShared / 4) return whole(bytes);
  if (shared_ == nullptr || device_ != device || used_ + bytes > kShared) {
    shared_ = whole(kShared);
    device_ = device;
    used_ = 0;
  }
  Byte* const piece = shared_.get() + used_;
  used_ += (bytes + kLine - 1) / kLine * kLine;
  return std::shared_ptr<Byte>(shared_, piece);
}

Byte* DeviceMemory::at_least(size_t bytes, Device* device) {
  if (bytes <= block_.bytes) return block_.data;
  give_back();
  device_ = device;
  block_ = device->allocate_on_device(bytes);
  return block_.data;
}

void DeviceMemory::give_back() {
  if (block_.data != nullptr) device_->free_on_device(block_);
  block_ = Device::Block();
}

Device& Devices::at(int index) {
  const auto place = [&]() -> Place& {
    const MutexLock lock(mutex_);
    return devices_[index];
  };
  const auto made = [&]() -> Device* {
    const MutexLock lock(mutex_);
    return devices_[index].device.get();
  };
  if (Device* const device = made(); device != nullptr) return *device;
  const MutexLock making(place().making);
  if (Device* const device = made(); device != nullptr) return *device;
  auto device = std::make_unique<Device>(index);
  const MutexLock lock(mutex_);
  return *(devices_[index].device = std::move(device));
}

void Devices::for_each(const std::function<void(Device&)>& body) {
  const auto next_after = [this](int index) -> Device* {
    const MutexLock lock(mutex_);
    for (auto found = devices_.upper_bound(index); found != devices_.end(); ++found)
      if (found->second.device) return found->second.device.get();
    return nullptr;
  };
  for (Device* device = next_after(-1); device != nullptr; device = next_after(device->index())) body(*device);
}

size_t Devices::pinned_bytes() const {
  const MutexLock lock(mutex_);
  size_t bytes = 0;
  for (const auto& [index, place] : devices_)
    if (place.device) bytes += place.device->pinned_bytes();
  return bytes;
}

}  // namespace perseus::cuda
