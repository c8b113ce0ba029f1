// One CUDA device as Perseus uses it: streams of our own for copies in either direction, beside those of the framework,
// and pools of what costs much to make: page-locked memory and events. Any thread.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/span.h"
#include "cuda/driver.h"

namespace perseus::cuda {

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

  // Streams that never wait for the framework's but by events, of the highest priority: copies are short, and the
  // network waits for them.
  Handle to_host() const { return to_host_; }
  Handle to_device() const { return to_device_; }

  // Page-locked memory of at least so many bytes, on a cache line.
  struct Block {
    Byte* data = nullptr;
    size_t bytes = 0;
  };
  Block allocate(size_t bytes);
  // The block is free once the event has happened; null = it is.
  void free(const Block& block, Handle event);
  // Held while the copies of one request are given to a stream, so that no other request's come between them.
  Mutex& order() { return order_; }
  // An event without timing.
  Handle take_event();
  void give_event(Handle event);

  // Page-locked memory, in use or not.
  size_t pinned_bytes() const;

 private:
  struct Retiring {
    Block block;
    Handle event;
  };
  void collect() PERSEUS_REQUIRES(mutex_);
  // A free one of about so many bytes; null = there is none.
  Block take_block(size_t bytes) PERSEUS_EXCLUDES(mutex_);

  const Driver& driver_;
  const int index_;
  Ordinal ordinal_ = 0;
  Handle context_ = nullptr, to_host_ = nullptr, to_device_ = nullptr;
  Mutex order_;
  mutable Mutex mutex_;
  std::multimap<size_t, Byte*> blocks_ PERSEUS_GUARDED_BY(mutex_);  // free ones, by size
  std::vector<Retiring> retiring_ PERSEUS_GUARDED_BY(mutex_);       // free once their events have happened
  std::vector<Handle> events_ PERSEUS_GUARDED_BY(mutex_);
  size_t pinned_ PERSEUS_GUARDED_BY(mutex_) = 0;
};

// Those that requests have named so far.
class Devices {
 public:
  Device& at(int index);
  size_t pinned_bytes() const;

 private:
  mutable Mutex mutex_;
  std::map<int, std::unique_ptr<Device>> devices_ PERSEUS_GUARDED_BY(mutex_);
};

}  // namespace perseus::cuda
