// One channel between two ranks of a host: two rings, each in memory of its writer, which the reader maps. Used by the
// thread that holds the progress lock; the peer's engine works at the other ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/progress_lock.h"
#include "net/waker.h"
#include "transport/ring.h"
#include "transport/shared_segment.h"
#include "transport/transport.h"

namespace perseus {

class ShmLink final : public Link {
 public:
  ShmLink(Doorbell bell, SharedSegment out, size_t capacity, uint64_t* sent, uint64_t* received)
      : bell_(bell),
        out_memory_(std::move(out)),
        out_(out_memory_.data(), capacity),
        capacity_(capacity),
        sent_(sent),
        received_(received) {}

  // The descriptor to send to the peer, until it is announced().
  int fd() const { return out_memory_.fd(); }
  void announced() { out_memory_.close_fd(); }

  bool connected() const { return in_memory_.data() != nullptr; }
  void connect(SharedSegment in) {
    in_memory_ = std::move(in);
    in_ = RingConsumer(in_memory_.data(), capacity_);
  }

  bool has_windows() const override { return true; }
  Span send_window(size_t n) override PERSEUS_REQUIRES(progress_lock) { return out_.window(n); }
  void send_commit(size_t n) override PERSEUS_REQUIRES(progress_lock) {
    out_.commit(n);
    *sent_ += n;
    bell_.ring();
  }
  ConstSpan recv_window(size_t n) override PERSEUS_REQUIRES(progress_lock) {
    return connected() ? in_.window(n) : ConstSpan();
  }
  void recv_release(size_t n) override PERSEUS_REQUIRES(progress_lock) {
    in_.release(n);
    *received_ += n;
    bell_.ring();
  }
  size_t try_send(const iovec*, int) override PERSEUS_REQUIRES(progress_lock) {
    fail(ErrorKind::kInternal, "[shm] try_send on a link with windows");
  }
  size_t try_recv(const iovec*, int) override PERSEUS_REQUIRES(progress_lock) {
    fail(ErrorKind::kInternal, "[shm] try_recv on a link with windows");
  }

 private:
  Doorbell bell_;
  SharedSegment out_memory_, in_memory_;
  RingProducer out_;
  RingConsumer in_;
  size_t capacity_;
  uint64_t *sent_, *received_;
};

}  // namespace perseus
