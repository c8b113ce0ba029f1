// The image in host memory of one request's tensors, which lie on a device. It is loaded when what the framework's
// stream computes is there, reduced like any tensor of a CPU, and stored back in the order of our streams. Large
// tensors go in pieces either way, so that the network has the first one while others are copied. Only
// wait_until_loaded() blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/span.h"
#include "cuda/device.h"

namespace perseus::cuda {

class Staging {
 public:
  // `device` outlives it.
  explicit Staging(Device* device) : device_(*device) {}
  // Copies may still be under way; the memory is used again after them.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  int device() const { return device_.index(); }
  // Once load() was called: those with the same number are computed in the order in which that was.
  int queue() const { return device_.index() * Device::kLanes + lane_; }

  // A tensor that is read, written or both; null = not. `apart`: what is written has memory of its own.
  void add(const void* in, size_t in_bytes, void* out, size_t out_bytes, bool apart);
  // Begins to load, after all that `stream` has to do now. With `more_follow`, a small tensor waits for others that the
  // stream computes, until they are enough or launch() is called. Throws Error(kInvalidArgument) while the stream is
  // captured into a graph.
  void load(Handle stream, bool more_follow);
  // Before load(): the tensors stay on the device, and load() only notes when they are computed. There is no image yet,
  // and in() and out() are the tensors themselves.
  void keep() { kept_ = true; }
  // Of tensors that were kept, once computed(): they stay, with an image that has nothing in it yet or with none, or
  // they are loaded after all. Where that fails, loaded() says so.
  void stay(bool with_image);
  void fetch();
  // Likewise: they stay, with a slot for each of their chunks, and an Encoding does the rest. False where there is no
  // memory for that.
  bool stay_encoded();
  // That of the chunk with this byte of tensor i.
  Byte* slots(size_t i, size_t begin) const;
  // Then whoever reduced the tensors has read and written the device's memory.
  bool kept() const { return kept_; }
  bool encodes() const { return encodes_; }
  bool has_image() const { return block_.data != nullptr && !encodes_; }
  static void launch(Device* device);
  // For whoever looks again soon: what has grown since the last look may grow on, and is not launched yet. False then.
  static bool launch_settled(Device* device);
  // Instead of load(), where the tensors are the result: `stream` itself copies them where they go. Throws as load()
  // does.
  void pass_on(Handle stream);
  // Where tensor i is on the device, and after load() in its image.
  const Byte* device_in(size_t i) const { return static_cast<const Byte*>(tensors_[i].in); }
  Byte* device_out(size_t i) const { return static_cast<Byte*>(tensors_[i].out); }
  const Byte* in(size_t i) const { return block_.data == nullptr ? device_in(i) : block_.data + tensors_[i].in_at; }
  Byte* out(size_t i) const { return block_.data == nullptr ? device_out(i) : block_.data + tensors_[i].out_at; }
  // Has the stream done what the tensors waited for? What is not there yet, is soon. Throws Error(kIo) where the device
  // has failed, like all that follow.
  bool computed() const { return reached(0); }
  // Is tensor i there, up to this byte?
  bool loaded(size_t i, size_t end) const { return reached(tensors_[i].position + std::min(end, tensors_[i].loads)); }
  void wait_until_loaded() const;

  // Adds a part of tensor i, if that is written, to what is copied to its device.
  void store(size_t i, size_t begin, size_t bytes, Copies* copies);
  // A device writes to slots until then. One stream does that, for all.
  void note_encoding(std::shared_ptr<const Event> until) { encoded_ = std::move(until); }
  // Our stream to the device writes so much of tensor i by itself.
  void wrote(size_t i, size_t bytes);
  Device& of() const { return device_; }
  // What has been stored so far is not the result: end() stores all of it.
  void store_again() {
    for (Tensor& tensor : tensors_) tensor.stored = 0;
  }
  // Ends storing. With `wholly`, outputs of which nothing was stored yet are stored as a whole.
  void end(bool wholly);
  // What `stream` is given from now on waits until everything is stored, if anything is. Any thread, after end().
  // Throws Error(kInvalidArgument) while the stream is captured into a graph.
  void join(Handle stream) const;

 private:
  struct Tensor {
    const void* in;
    void* out;
    size_t in_bytes, out_bytes;
    size_t in_at, out_at;  // in the block
    size_t loads = 0;      // bytes
    size_t position = 0;   // of its first byte among those that are loaded
    size_t stored = 0;     // bytes
  };
  // So many bytes are there when the event has happened.
  struct Mark {
    size_t end;
    std::shared_ptr<const Event> event;
  };

  // Tries, and notes a failure.
  template <typename Body>
  void attempt(const Body& body);
  static void give(Device* device, Device::Burst* burst);
  void give_back_block();
  bool reached(size_t position) const;

  Device& device_;
  std::vector<Tensor> tensors_;
  size_t bytes_ = 0;
  int lane_ = 0;
  Device::Block block_;
  // Set by the thread that launches, before launched_.
  std::vector<Mark> marks_;
  std::string failure_;
  std::atomic<bool> launched_{false};
  mutable size_t happened_ = 0;  // marks
  bool kept_ = false, encodes_ = false;
  bool stores_ = false;  // something
  std::shared_ptr<const Event> stored_, encoded_;
};

// Which memory of a device parts of images stand for, of tensors that were kept there. Those without an image in host
// memory, or with slots instead, stand for themselves.
class Images {
 public:
  void clear() { parts_.clear(); }
  void add(const Staging& staging, size_t tensor, size_t begin, size_t bytes);
  // After the last add().
  void sort();
  Device& device() const { return *device_; }
  struct Place {
    const Byte* in;
    Byte* out;
    bool has_image;
  };
  // Of an address in a part of an image, or of the device; throws Error(kInternal) where it is in none.
  Place at(const Byte* image) const;

 private:
  struct Part {
    const Byte* image;
    size_t bytes;
    Place place;
  };
  Device* device_ = nullptr;
  std::vector<Part> parts_;
};

}  // namespace perseus::cuda
