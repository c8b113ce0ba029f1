// One CUDA device as Perseus uses it: streams of our own for copies in either direction, beside those of the framework,
// and pools of what costs much to make: page-locked memory and events. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/span.h"
#include "cuda/driver.h"

namespace perseus::cuda {

class Device;
class Staging;

// CU_STREAM_PER_THREAD: one handle for a stream of each thread.
inline const Handle kPerThreadStream = reinterpret_cast<Handle>(uintptr_t{2});

// What a stream had to do when it was recorded. Requests share it, so the driver is asked once. Any thread.
class Event {
 public:
  Event(Device* device, Handle handle) : device_(*device), handle_(handle) {}
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  Handle handle() const { return handle_; }
  // Throws Error(kIo) where the device has failed.
  bool happened() const;
  // The same for those who ask without end: may say no for some microseconds longer. Every question to the driver takes
  // a lock that the framework's threads need to launch kernels.
  bool poll() const;
  void wait() const;

 private:
  Device& device_;
  const Handle handle_;
  mutable std::atomic<bool> happened_{false};
  mutable std::atomic<int64_t> ask_from_{0};  // who polls
};

// Copies between page-locked memory and a device, or inside a device, given to the driver with as few calls as it
// allows. All of one list go the same way. Belongs to one thread at a time.
class Copies {
 public:
  void add(void* to, const void* from, size_t bytes);
  size_t bytes() const { return total_; }
  void clear();
  // Gives them to a stream, in whatever order: to the host, to the device, or inside it. The device must be current.
  void load(Handle stream) { give(Way::kToHost, stream); }
  void store(Handle stream) { give(Way::kToDevice, stream); }
  void move(const Device& device, Handle stream);

 private:
  enum class Way { kToHost, kToDevice, kOnDevice };
  void give(Way way, Handle stream);
  void launch(const Device& device, Handle stream) const;

  std::vector<Address> to_, from_;
  std::vector<size_t> bytes_;
  size_t total_ = 0;
};

// Of kernels.cu, with a CopyList, and of chunk_kernels.cu, with a ChunkList.
enum class Kernel : uint8_t { kCopy, kLargest, kEncodeHalves, kEncodeIntegers, kAccumulate, kDecode };
constexpr size_t kKernels = 6;

class Device {
 public:
  // Throws Error(kInvalidArgument) where this process sees no such device, and Error(kIo) as Driver does.
  explicit Device(int index);
  // Waits a little for copies that are under way. What is still in use then is left to the driver.
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // While it lives, calls of this thread concern the device, and do not disturb another thread that captures a graph:
  // by default, its capture would end with an error if we asked for an event.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    int capture_mode_;  // of this thread before
  };

  int index() const { return index_; }
  // Does the driver have our kernel that copies? And why not.
  bool has_kernels() const { return no_kernels_.empty(); }
  const std::string& no_kernels() const { return no_kernels_; }
  // The same of those for chunks, which the first call loads.
  bool encodes();
  // With so many blocks of kBlockThreads. The device must be current.
  void launch(Kernel kernel, uint32_t blocks, void* list, Handle stream) const;
  // 16 bytes by which every process of a host tells GPUs apart.
  std::array<char, 16> uuid() const;

  // Throws Error(kInvalidArgument) while the stream is captured into a graph. The device must be current.
  void refuse_capture(Handle stream) const;

  // Streams that never wait for the framework's but by events, of the highest priority: copies are short, and the
  // network waits for them.
  Handle to_device() const { return to_device_; }
  // To the host, beside tensors that are still being computed.
  Handle fetching() const { return fetching_; }
  // To the host, behind what `stream` of this thread computes. Streams have lanes of their own, up to kLanes of them:
  // what one of them does may wait for another rank, which may wait for a tensor of another stream.
  static constexpr int kLanes = 16;
  struct Lane {
    int number = 0;
    Handle to_host = nullptr;
  };
  Lane lane_of(Handle stream);

  // Page-locked memory of at least so many bytes, on a cache line.
  struct Block {
    Byte* data = nullptr;
    size_t bytes = 0;
  };
  Block allocate(size_t bytes);
  // The block is free once both events have happened; null = it is.
  void free(const Block& block, std::shared_ptr<const Event> event, std::shared_ptr<const Event> other = nullptr);
  // Until the event has happened.
  void keep(std::shared_ptr<const void> used, std::shared_ptr<const Event> event);
  // Memory of the device. The driver would wait for all that the device does before it freed any, so what is given back
  // serves again. The device must be current.
  Block allocate_on_device(size_t bytes);
  void free_on_device(const Block& block);
  // An event behind all that the stream has to do now. The device must be current.
  std::shared_ptr<const Event> record(Handle stream);

  // Requests whose tensors the same stream computes, and whose copies to the host will be given to ours together.
  struct Burst {
    Handle stream = nullptr, ready = nullptr;  // the event behind the last one's work
    Handle to_host = nullptr;
    std::vector<Staging*> requests;
    size_t bytes = 0;
    size_t seen = 0;  // requests at the last look
    int looks = 0;
    Copies copies;
  };
  // Requests join the burst under this mutex, which nobody holds while the driver copies.
  Mutex& order() PERSEUS_RETURN_CAPABILITY(order_) { return order_; }
  Burst& burst() PERSEUS_REQUIRES(order_) { return burst_; }
  // Who gives a burst to the driver holds this one, too, from before it takes the burst, so bursts keep their order.
  Mutex& giving() PERSEUS_RETURN_CAPABILITY(giving_) { return giving_; }
  Burst& given() PERSEUS_REQUIRES(giving_) { return given_; }

  // Of copies to the device, which one thread at a time gives. stored(): an event behind all of them.
  void note_store() { stores_since_ = true; }
  std::shared_ptr<const Event> stored();

  // Something on the device does not end, so nothing of it may be freed any more.
  void give_up() { given_up_ = true; }

  // Page-locked memory, in use or not.
  size_t pinned_bytes() const;

 private:
  friend class Event;
  struct Retiring {
    Block block;
    std::shared_ptr<const Event> event, other;  // null = happened
    std::shared_ptr<const void> used;           // instead of a block
  };
  // Gives the reason where the driver cannot have them.
  std::string load_kernels(const char* source, std::initializer_list<Kernel> kernels, void* nothing, Handle* module);
  void give_back(bool with_memory);
  Handle make_stream();
  // An event without timing.
  Handle take_event();
  void give_event(Handle event);
  // Makes free what waits for events that have happened, and appends it: who destroys that must not hold the mutex.
  void collect(std::vector<Retiring>* over) PERSEUS_REQUIRES(mutex_);
  // A free one of about so many bytes; null = there is none.
  Block take_block(size_t bytes) PERSEUS_EXCLUDES(mutex_);
  static Block take(size_t bytes, std::multimap<size_t, Byte*>* blocks);

  const Driver& driver_;
  const int index_;
  Ordinal ordinal_ = 0;
  Handle context_ = nullptr, to_device_ = nullptr, fetching_ = nullptr;
  Handle module_ = nullptr, chunk_module_ = nullptr;
  std::array<Handle, kKernels> kernels_{};
  std::once_flag chunk_kernels_loaded_;
  bool encodes_ = false;  // set with it
  std::string no_kernels_;
  std::atomic<bool> given_up_{false};
  Mutex lanes_mutex_;
  std::vector<Handle> to_host_ PERSEUS_GUARDED_BY(lanes_mutex_);  // by lane
  std::map<std::pair<Handle, std::thread::id>, int> lanes_ PERSEUS_GUARDED_BY(lanes_mutex_);
  mutable Mutex mutex_;
  std::vector<Handle> events_ PERSEUS_GUARDED_BY(mutex_);  // before those that come back to it
  Mutex giving_, order_;
  Burst burst_ PERSEUS_GUARDED_BY(order_), given_ PERSEUS_GUARDED_BY(giving_);
  bool stores_since_ = false;  // the last stored event
  std::shared_ptr<const Event> last_stored_;
  std::multimap<size_t, Byte*> blocks_ PERSEUS_GUARDED_BY(mutex_);  // free ones, by size
  std::multimap<size_t, Byte*> device_blocks_ PERSEUS_GUARDED_BY(mutex_);
  std::vector<Retiring> retiring_ PERSEUS_GUARDED_BY(mutex_);  // free once their events have happened
  size_t pinned_ PERSEUS_GUARDED_BY(mutex_) = 0;
};

// Page-locked memory that lasts as long as who has it: small pieces share a block. Belongs to one thread at a time.
class LastingMemory {
 public:
  // Of that device, which outlives it. Throws as Device::allocate() does.
  std::shared_ptr<Byte> allocate(Device* device, size_t bytes);

 private:
  Device* device_ = nullptr;
  std::shared_ptr<Byte> shared_;
  size_t used_ = 0;
};

// Memory of a device that grows to what is asked for. Belongs to one thread at a time.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() { give_back(); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // At least so many bytes; what was there is lost where it grows. The device, always the same one, must be current and
  // outlive this, and nothing may be under way with what was given before.
  Byte* at_least(size_t bytes, Device* device);
  size_t bytes() const { return block_.bytes; }

 private:
  void give_back();

  Device* device_ = nullptr;
  Device::Block block_;
};

// Those that requests have named so far.
class Devices {
 public:
  Device& at(int index);
  void for_each(const std::function<void(Device&)>& body);
  size_t pinned_bytes() const;

 private:
  // Making a device may take the driver seconds: who asks for others, or for all, does not wait for that.
  struct Place {
    Mutex making;                    // before mutex_
    std::unique_ptr<Device> device;  // guarded by mutex_
  };
  mutable Mutex mutex_;
  std::map<int, Place> devices_ PERSEUS_GUARDED_BY(mutex_);
};

}  // namespace perseus::cuda
