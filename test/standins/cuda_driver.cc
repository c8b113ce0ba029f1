// A stand-in for NVIDIA's driver, with its names and its order of things, for machines without a GPU: streams are
// threads that do their work late and at random times, and device memory is memory that the host must not touch. It is
// stricter than the driver where the driver forgives: copies need page-locked memory, and calls a current context.
#include "cuda_driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Code {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
  kCaptureUnsupported = 900,
};
constexpr int kDevices = 4, kVersion = 12040;
constexpr int kDeviceOrdinal = 9;  // an attribute of a pointer

enum CaptureMode { kGlobal, kThreadLocal, kRelaxed };
thread_local int capture_mode = kGlobal;

std::atomic<int> captures{0};                                             // under way
std::atomic<int> host_memory_left{1 << 30}, device_memory_left{1 << 30};  // allocations
std::atomic<int> broken{0}, delay_us{kStandinDelay}, blocking_calls{0}, calls{0};

// ---- streams and events ----

// What a stream had to do when an event was recorded.
class Record {
 public:
  void reach() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  bool happened() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

// Whoever waits for an event waits for its last record at that time, whatever becomes of the event.
class Event {
 public:
  explicit Event(int device) : device(device) {}
  const int device;

  std::shared_ptr<Record> record() {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_ = std::make_shared<Record>();
    return last_;
  }
  std::shared_ptr<Record> last() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }
  bool happened() {
    const std::shared_ptr<Record> record = last();
    return !record || record->happened();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Record> last_;  // null = never
};

class Stream {
 public:
  static std::shared_ptr<Stream> make(unsigned seed, int device) {
    auto stream = std::make_shared<Stream>(seed, device);
    std::thread([stream] { stream->run(); }).detach();
    return stream;
  }
  Stream(unsigned seed, int device) : device(device), random_(seed) {}
  const int device;

  // False once it was destroyed.
  bool add(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (destroyed_) return false;
    destroyed_ = !work;
    work_.push_back(std::move(work));
    changed_.notify_all();
    return true;
  }
  void synchronize() {
    const auto done = std::make_shared<Record>();
    if (add([done] { done->reach(); })) done->wait();
  }
  // What it has to do is done; then it ends.
  void destroy() { add(nullptr); }
  std::atomic<bool> capturing{false};

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (!work) return;
      const int most = delay_us;
      if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<unsigned>(most)));
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;  // null = the end
  bool destroyed_ = false;
  std::minstd_rand random_;
};

// ---- memory ----

struct Allocation {
  size_t bytes;
  unsigned char* view;
  int device;
};

struct Driver {
  std::mutex mutex;
  std::map<uintptr_t, Allocation> device_memory;  // by its protected address
  std::map<uintptr_t, size_t> host_memory;        // page-locked
  std::map<void*, std::shared_ptr<Event>> events;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::set<void*> destroyed_streams;
  std::shared_ptr<Stream> legacy[kDevices];
  int retained[kDevices] = {};
  unsigned streams_made = 0;

  bool pinned(const void* data, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    auto found = host_memory.upper_bound(begin);
    if (found == host_memory.begin()) return false;
    --found;
    return begin + bytes <= found->first + found->second;
  }
  unsigned char* view(unsigned long long address, size_t bytes) {
    auto found = device_memory.upper_bound(address);
    if (found == device_memory.begin()) return nullptr;
    --found;
    const size_t at = address - found->first;
    return at + bytes <= found->second.bytes ? found->second.view + at : nullptr;
  }
  std::shared_ptr<Stream> made_stream(int device) {
    std::shared_ptr<Stream> stream = Stream::make(++streams_made, device);
    streams[stream.get()] = stream;
    destroyed_streams.erase(stream.get());
    return stream;
  }
};

// Never destroyed: streams' threads outlive main().
Driver& driver() {
  static Driver& made = *new Driver;
  return made;
}

// One end of a copy: device memory, or page-locked memory of the host.
struct End {
  unsigned long long address;
  bool on_device;
};

// Null: it is not what it should be.
unsigned char* memory_of(const End& end, size_t bytes) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  if (end.on_device) return driver().view(end.address, bytes);
  auto* const host = reinterpret_cast<unsigned char*>(static_cast<uintptr_t>(end.address));
  return driver().pinned(host, bytes) ? host : nullptr;
}

bool on_device(unsigned long long address, size_t bytes) { return memory_of({address, true}, bytes) != nullptr; }

thread_local std::vector<void*> current;  // contexts are addresses of retained[]

int current_device() {
  return current.empty() ? -1 : static_cast<int>(static_cast<int*>(current.back()) - driver().retained);
}

// Null: no such stream, or no context that the legacy stream could be of.
std::shared_ptr<Stream> stream_of(void* handle) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  if (handle != nullptr) {
    if (driver().destroyed_streams.count(handle) > 0) std::abort();  // what the driver then does is undefined
    const auto found = driver().streams.find(handle);
    return found == driver().streams.end() ? nullptr : found->second;
  }
  const int device = current_device();
  if (device < 0) return nullptr;
  std::shared_ptr<Stream>& legacy = driver().legacy[device];
  if (!legacy) legacy = driver().made_stream(device);
  return legacy;
}

std::vector<std::shared_ptr<Stream>> all_streams() {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : driver().streams) streams.push_back(stream);
  return streams;
}

// As the driver does before it frees memory.
void wait_for_all_of(int device) {
  for (const std::shared_ptr<Stream>& stream : all_streams())
    if (stream->device == device) stream->synchronize();
}

std::shared_ptr<Event> event_of(void* handle) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  const auto found = driver().events.find(handle);
  return found == driver().events.end() ? nullptr : found->second;
}

// What may not be called while another thread captures a stream.
template <class Body>
int outside_captures(const Body& body) {
  if (captures > 0 && capture_mode != kRelaxed) return kCaptureUnsupported;
  return body();
}

// The answer of a call in a context.
template <class Body>
int in_context(const Body& body) {
  if (broken != 0) return broken;
  return current.empty() ? static_cast<int>(kInvalidContext) : body();
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) { return flags == 0 ? kSuccess : kInvalidValue; }

int cuDriverGetVersion(int* version) {
  const char* told = std::getenv("STANDIN_CUDA_VERSION");
  *version = told == nullptr ? kVersion : std::atoi(told);
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return kSuccess;
}

int cuDeviceGet(int* device, int index) {
  if (index < 0 || index >= kDevices) return kInvalidDevice;
  *device = index;
  return kSuccess;
}

int cuDeviceGetUuid_v2(char* uuid, int device) {
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  const int shown = std::getenv("STANDIN_CUDA_ONE_GPU") == nullptr ? device : 0;
  std::memcpy(uuid, "standin for GPU", 15);
  uuid[15] = static_cast<char>('0' + shown);
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  const std::lock_guard<std::mutex> lock(driver().mutex);
  ++driver().retained[device];
  *context = &driver().retained[device];
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  if (device < 0 || device >= kDevices || driver().retained[device] == 0) return kInvalidContext;
  --driver().retained[device];
  return kSuccess;
}

int cuCtxPushCurrent_v2(void* context) {
  if (context == nullptr) return kInvalidContext;
  current.push_back(context);
  return kSuccess;
}

int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  return in_context([&] {
    const std::lock_guard<std::mutex> lock(driver().mutex);
    *stream = driver().made_stream(current_device()).get();
    return static_cast<int>(kSuccess);
  });
}

int cuStreamDestroy_v2(void* handle) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (stream == nullptr || handle == nullptr) return kInvalidHandle;
  const std::lock_guard<std::mutex> lock(driver().mutex);
  driver().streams.erase(handle);
  driver().destroyed_streams.insert(handle);
  stream->destroy();
  return kSuccess;
}

int cuStreamSynchronize(void* handle) {
  return in_context([&] {
    const std::shared_ptr<Stream> stream = stream_of(handle);
    if (stream == nullptr) return static_cast<int>(kInvalidHandle);
    stream->synchronize();
    return static_cast<int>(kSuccess);
  });
}

int cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  return in_context([&] {
    ++calls;
    const std::shared_ptr<Stream> stream = stream_of(handle);
    const std::shared_ptr<Event> event = event_of(event_handle);
    if (stream == nullptr || !event) return static_cast<int>(kInvalidHandle);
    if (const std::shared_ptr<Record> record = event->last()) stream->add([record] { record->wait(); });
    return static_cast<int>(kSuccess);
  });
}

int cuStreamIsCapturing(void* handle, int* status) {
  return in_context([&] {
    const std::shared_ptr<Stream> stream = stream_of(handle);
    if (stream == nullptr) return static_cast<int>(kInvalidHandle);
    *status = stream->capturing ? 1 : 0;
    return static_cast<int>(kSuccess);
  });
}

int cuStreamBeginCapture_v2(void* handle, int) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (!stream->capturing.exchange(true)) ++captures;
  return kSuccess;
}

int cuStreamEndCapture(void* handle, void** graph) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capturing.exchange(false)) --captures;
  *graph = nullptr;
  return kSuccess;
}

int cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  return in_context([&] {
    const std::shared_ptr<Stream> stream = stream_of(handle);
    if (stream == nullptr) return static_cast<int>(kInvalidHandle);
    stream->add([function, argument] { function(argument); });
    return static_cast<int>(kSuccess);
  });
}

int cuEventCreate(void** handle, unsigned) {
  return in_context([&] {
    auto event = std::make_shared<Event>(current_device());
    *handle = event.get();
    const std::lock_guard<std::mutex> lock(driver().mutex);
    driver().events[*handle] = std::move(event);
    return static_cast<int>(kSuccess);
  });
}

int cuEventDestroy_v2(void* handle) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  return driver().events.erase(handle) == 1 ? kSuccess : kInvalidHandle;
}

int cuEventRecord(void* handle, void* stream_handle) {
  return in_context([&] {
    ++calls;
    const std::shared_ptr<Stream> stream = stream_of(stream_handle);
    const std::shared_ptr<Event> event = event_of(handle);
    if (stream == nullptr || !event || event->device != stream->device) return static_cast<int>(kInvalidHandle);
    const std::shared_ptr<Record> record = event->record();
    stream->add([record] { record->reach(); });
    return static_cast<int>(kSuccess);
  });
}

int cuPointerGetAttribute(void* data, int attribute, unsigned long long address) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  auto found = driver().device_memory.upper_bound(address);
  if (attribute != kDeviceOrdinal || found == driver().device_memory.begin()) return kInvalidValue;
  --found;
  if (address >= found->first + found->second.bytes) return kInvalidValue;
  *static_cast<int*>(data) = found->second.device;
  return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}

int cuEventQuery(void* handle) {
  return in_context([&] {
    return outside_captures([&] {
      const std::shared_ptr<Event> event = event_of(handle);
      if (!event) return static_cast<int>(kInvalidHandle);
      return static_cast<int>(event->happened() ? kSuccess : kNotReady);
    });
  });
}

int cuEventSynchronize(void* handle) {
  return in_context([&] {
    const std::shared_ptr<Event> event = event_of(handle);
    if (!event) return static_cast<int>(kInvalidHandle);
    ++blocking_calls;
    if (const std::shared_ptr<Record> record = event->last()) record->wait();
    return static_cast<int>(kSuccess);
  });
}

int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  return in_context([&] {
    if (--device_memory_left < 0) return static_cast<int>(kOutOfMemory);
    const int file = ::memfd_create("standin", 0);
    const size_t size = bytes == 0 ? 1 : bytes;
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) return static_cast<int>(kOutOfMemory);
    void* hidden = ::mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    void* view = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (hidden == MAP_FAILED || view == MAP_FAILED) return static_cast<int>(kOutOfMemory);
    std::memset(view, 0x5c, size);  // whatever was there before
    const std::lock_guard<std::mutex> lock(driver().mutex);
    driver().device_memory[reinterpret_cast<uintptr_t>(hidden)] = {size, static_cast<unsigned char*>(view),
                                                                   current_device()};
    *address = reinterpret_cast<uintptr_t>(hidden);
    return static_cast<int>(kSuccess);
  });
}

int cuMemFree_v2(unsigned long long address) {
  return in_context([&] {
    int device = -1;
    cuPointerGetAttribute(&device, kDeviceOrdinal, address);
    wait_for_all_of(device);
    const std::lock_guard<std::mutex> lock(driver().mutex);
    const auto found = driver().device_memory.find(address);
    if (found == driver().device_memory.end()) return static_cast<int>(kInvalidValue);
    ::munmap(reinterpret_cast<void*>(found->first), found->second.bytes);
    ::munmap(found->second.view, found->second.bytes);
    driver().device_memory.erase(found);
    return static_cast<int>(kSuccess);
  });
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  return in_context([&] {
    return outside_captures([&] {
      if (--host_memory_left < 0 || posix_memalign(memory, 4096, bytes) != 0) return static_cast<int>(kOutOfMemory);
      std::memset(*memory, 0xc5, bytes);
      const std::lock_guard<std::mutex> lock(driver().mutex);
      driver().host_memory[reinterpret_cast<uintptr_t>(*memory)] = bytes;
      return static_cast<int>(kSuccess);
    });
  });
}

int cuMemFreeHost(void* memory) {
  return in_context([&] {
    wait_for_all_of(current_device());
    const std::lock_guard<std::mutex> lock(driver().mutex);
    if (driver().host_memory.erase(reinterpret_cast<uintptr_t>(memory)) == 0) return static_cast<int>(kInvalidValue);
    std::free(memory);
    return static_cast<int>(kSuccess);
  });
}

static int copy(void* stream_handle, End to, End from, size_t bytes) {
  return in_context([&] {
    ++calls;
    const std::shared_ptr<Stream> stream = stream_of(stream_handle);
    if (stream == nullptr) return static_cast<int>(kInvalidHandle);
    if (memory_of(to, bytes) == nullptr || memory_of(from, bytes) == nullptr) return static_cast<int>(kInvalidValue);
    stream->add([=] {
      unsigned char* const into = memory_of(to, bytes);
      const unsigned char* const out_of = memory_of(from, bytes);
      if (into == nullptr || out_of == nullptr) std::abort();  // freed while a copy was under way
      std::memcpy(into, out_of, bytes);
    });
    return static_cast<int>(kSuccess);
  });
}

int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  return copy(stream, {reinterpret_cast<uintptr_t>(to), false}, {from, true}, bytes);
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  return copy(stream, {to, true}, {reinterpret_cast<uintptr_t>(from), false}, bytes);
}

int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  return copy(stream, {to, true}, {from, true}, bytes);
}

// In a random order, which the driver leaves open.
int cuMemcpyBatchAsync(unsigned long long* to, unsigned long long* from, size_t* bytes, size_t count,
                       const int* attributes, const size_t* first_of_attributes, size_t attributes_count,
                       size_t* failed, void* stream) {
  constexpr int kInOrderOfTheStream = 1;
  if (count == 0 || stream == nullptr || attributes_count != 1 || first_of_attributes[0] != 0 ||
      attributes[0] != kInOrderOfTheStream)
    return kInvalidValue;
  static std::minstd_rand random;
  static std::mutex mutex;
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    std::shuffle(order.begin(), order.end(), random);
  }
  for (const size_t i : order) {
    const End into{to[i], on_device(to[i], bytes[i])}, out_of{from[i], on_device(from[i], bytes[i])};
    *failed = i;
    if (!into.on_device && !out_of.on_device) return kInvalidValue;
    if (const int code = copy(stream, into, out_of, bytes[i]); code != kSuccess) return code;
  }
  calls -= static_cast<int>(count) - 1;  // it was one call
  return kSuccess;
}

int cuGetErrorName(int code, const char** name) {
  *name = code == kInvalidValue     ? "CUDA_ERROR_INVALID_VALUE"
          : code == kOutOfMemory    ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == 700             ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                    : nullptr;
  return *name == nullptr ? kInvalidValue : kSuccess;
}

int cuGetErrorString(int code, const char** text) {
  *text = code == 700 ? "an illegal memory access was encountered" : nullptr;
  return *text == nullptr ? kInvalidValue : kSuccess;
}

void* standin_view(unsigned long long address) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  return driver().view(address, 0);
}

void* standin_kernel_memory(unsigned long long address, size_t bytes) {
  void* const view = memory_of({address, true}, bytes);
  return view != nullptr ? view : memory_of({address, false}, bytes);
}

void standin_break(int code) { broken = code; }
void standin_allow_host_memory(int allocations) { host_memory_left = allocations; }
void standin_allow_device_memory(int allocations) { device_memory_left = allocations; }
void standin_set_delay(int microseconds) { delay_us = microseconds; }
int standin_blocking_calls() { return blocking_calls; }
int standin_calls() { return calls; }
void standin_note_call() { ++calls; }
int standin_current_device() { return current_device(); }
int standin_stream_device(void* handle) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  return stream == nullptr ? -1 : stream->device;
}
void* standin_per_thread_stream() {
  void* const handle = reinterpret_cast<void*>(uintptr_t{2});
  const std::lock_guard<std::mutex> lock(driver().mutex);
  std::shared_ptr<Stream>& stream = driver().streams[handle];
  if (!stream) stream = Stream::make(0, 0);
  return handle;
}

}  // extern "C"
