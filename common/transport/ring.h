// A ring of bytes between one producer and one consumer in memory both can see, carrying messages whose sizes both ends
// know. One thread (at a time) on each end; the two sides may be in different processes.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/span.h"
#include "transport/transport.h"

namespace perseus {

// Lives at the start of the shared memory, the data right behind it. Zero bytes are a valid, empty ring.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> head;  // bytes ever produced, padding included
  alignas(64) std::atomic<uint64_t> tail;  // bytes ever consumed
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");
constexpr size_t kRingHeaderBytes = sizeof(RingHeader);
constexpr size_t kRingAlign = 64;  // messages start on cache lines: no line is written by both ends

// Where the next message of n bytes lies: never across the end; the gap left there is skipped by both ends alike.
struct RingSlot {
  size_t offset;
  size_t advance;  // padding before and behind it included
};
inline RingSlot ring_slot(uint64_t position, size_t n, size_t capacity) {
  const size_t need = (n + kRingAlign - 1) / kRingAlign * kRingAlign;
  const size_t offset = position % capacity;
  if (offset + need <= capacity) return {offset, need};
  return {0, capacity - offset + need};
}

class RingProducer {
 public:
  RingProducer() = default;
  // `memory` holds kRingHeaderBytes + capacity bytes.
  RingProducer(void* memory, size_t capacity)
      : header_(static_cast<RingHeader*>(memory)),
        data_(static_cast<Byte*>(memory) + kRingHeaderBytes),
        capacity_(capacity) {}

  Span window(size_t n) {
    const RingSlot slot = ring_slot(head_, n, capacity_);
    if (head_ + slot.advance - tail_ > capacity_) {
      // Pairs with RingConsumer::release: what the consumer read is free to be written.
      tail_ = header_->tail.load(std::memory_order_acquire);
      if (head_ + slot.advance - tail_ > capacity_) return {};
    }
    return {data_ + slot.offset, n};
  }
  void commit(size_t n) {
    head_ += ring_slot(head_, n, capacity_).advance;
    // Pairs with RingConsumer::window: the bytes are there before the count says so.
    header_->head.store(head_, std::memory_order_release);
  }

 private:
  RingHeader* header_ = nullptr;
  Byte* data_ = nullptr;
  size_t capacity_ = 0;
  uint64_t head_ = 0;  // ours
  uint64_t tail_ = 0;  // theirs, as last seen
};

class RingConsumer {
 public:
  RingConsumer() = default;
  RingConsumer(void* memory, size_t capacity)
      : header_(static_cast<RingHeader*>(memory)),
        data_(static_cast<Byte*>(memory) + kRingHeaderBytes),
        capacity_(capacity) {}

  ConstSpan window(size_t n) {
    const RingSlot slot = ring_slot(tail_, n, capacity_);
    if (head_ - tail_ < slot.advance) {
      head_ = header_->head.load(std::memory_order_acquire);  // pairs with RingProducer::commit
      if (head_ - tail_ < slot.advance) return {};
    }
    return {data_ + slot.offset, n};
  }
  void release(size_t n) {
    tail_ += ring_slot(tail_, n, capacity_).advance;
    header_->tail.store(tail_, std::memory_order_release);  // pairs with RingProducer::window
  }

 private:
  RingHeader* header_ = nullptr;
  const Byte* data_ = nullptr;
  size_t capacity_ = 0;
  uint64_t head_ = 0;  // theirs, as last seen
  uint64_t tail_ = 0;  // ours
};

// Room for a chunk of each kind in every stage of the pipeline (collective/exchange.h does the arithmetic).
constexpr size_t kDataRingBytes = 512 * 1024;
constexpr size_t kControlRingBytes = 16 * 1024;
inline size_t ring_capacity(uint32_t stream) { return stream >= kControlStream ? kControlRingBytes : kDataRingBytes; }

}  // namespace perseus
