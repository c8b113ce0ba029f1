// Ranks as threads of one process: rings on the heap, control messages in mailboxes. The fabric is shared and locked.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "base/progress_lock.h"
#include "net/waker.h"
#include "transport/ring.h"
#include "transport/transport.h"

namespace perseus {

class MemFabric {
 public:
  explicit MemFabric(int size) : seats_(size), owners_(size) {}

  // Zeroed memory of the ring from one rank to another, made by whoever asks first.
  std::shared_ptr<void> ring(int from, int to, Channel channel) {
    const MutexLock lock(mutex_);
    std::shared_ptr<void>& memory = rings_[{from, to, channel.key()}];
    if (!memory) {
      const size_t bytes = kRingHeaderBytes + ring_capacity(channel.stream);
      void* raw = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
      if (raw == nullptr) fail(ErrorKind::kIo, "[mem] out of memory for a ring");
      memory.reset(raw, std::free);
      std::memset(raw, 0, kRingHeaderBytes);
    }
    return memory;
  }
  // Between two ranks, on the channels of a group. Who still has a link keeps its rings.
  void forget(int rank, int other, uint32_t group) {
    const MutexLock lock(mutex_);
    for (const auto& [from, to] : {std::make_pair(rank, other), std::make_pair(other, rank)})
      rings_.erase(rings_.lower_bound({from, to, Channel{group, 0}.key()}),
                   rings_.upper_bound({from, to, Channel{group, UINT32_MAX}.key()}));
  }
  void sit(int rank, Waker& waker) {
    const MutexLock lock(mutex_);
    waker.place_flag(&seats_[rank].sleeping);
    owners_[rank].event_fd = waker.event_fd();
    owners_[rank].present = true;
    seats_[rank].alive_ns.store(now_ns(), std::memory_order_relaxed);
  }
  void leave(int rank) {
    const MutexLock lock(mutex_);
    owners_[rank].present = false;
    for (size_t other = 0; other < seats_.size(); ++other)
      if (static_cast<int>(other) != rank) post_locked(other, PeerEvent{rank, PeerEvent::Kind::kGone, "thread ended"});
  }
  void post(int to, PeerEvent event) {
    const MutexLock lock(mutex_);
    post_locked(to, std::move(event));
  }
  bool take(int rank, PeerEvent* event) {
    if (seats_[rank].mail.load(std::memory_order_acquire) == 0) return false;
    const MutexLock lock(mutex_);
    std::deque<PeerEvent>& mailbox = owners_[rank].mailbox;
    if (mailbox.empty()) return false;
    *event = std::move(mailbox.front());
    mailbox.pop_front();
    seats_[rank].mail.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }
  void ring_bell(int rank) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with Waker::prepare_sleep
    if (seats_[rank].sleeping.load(std::memory_order_relaxed) == 0) return;
    // Its owner may leave at any time and take the descriptor along.
    const MutexLock lock(mutex_);
    ring_locked(rank);
  }
  int64_t alive_ns(int rank) const { return seats_[rank].alive_ns.load(std::memory_order_relaxed); }
  void send_heartbeat(int rank) { seats_[rank].alive_ns.store(now_ns(), std::memory_order_relaxed); }

 private:
  // What peers may look at at any time.
  struct Seat {
    std::atomic<uint32_t> sleeping{0};  // the owner's Waker flag
    std::atomic<int64_t> alive_ns{0};
    std::atomic<uint32_t> mail{0};  // how many are in the mailbox
  };
  struct Owner {
    int event_fd = -1;  // valid while present
    bool present = false;
    std::deque<PeerEvent> mailbox;
  };

  void post_locked(int to, PeerEvent event) PERSEUS_REQUIRES(mutex_) {
    if (!owners_[to].present) return;
    owners_[to].mailbox.push_back(std::move(event));
    seats_[to].mail.fetch_add(1, std::memory_order_release);
    ring_locked(to);
  }
  void ring_locked(int rank) PERSEUS_REQUIRES(mutex_) {
    if (owners_[rank].present) Doorbell{&seats_[rank].sleeping, owners_[rank].event_fd}.ring();
  }

  std::deque<Seat> seats_;
  Mutex mutex_;
  std::vector<Owner> owners_ PERSEUS_GUARDED_BY(mutex_);
  std::map<std::tuple<int, int, uint64_t>, std::shared_ptr<void>> rings_ PERSEUS_GUARDED_BY(mutex_);
};

namespace {

class MemLink final : public Link {
 public:
  MemLink(MemFabric& fabric, int peer, std::shared_ptr<void> out, std::shared_ptr<void> in, size_t capacity,
          uint64_t* sent, uint64_t* received)
      : fabric_(fabric),
        peer_(peer),
        out_memory_(std::move(out)),
        in_memory_(std::move(in)),
        out_(out_memory_.get(), capacity),
        in_(in_memory_.get(), capacity),
        sent_(sent),
        received_(received) {}

  bool has_windows() const override { return true; }
  Span send_window(size_t n) override PERSEUS_REQUIRES(progress_lock) { return out_.window(n); }
  void send_commit(size_t n) override PERSEUS_REQUIRES(progress_lock) {
    out_.commit(n);
    *sent_ += n;
    fabric_.ring_bell(peer_);
  }
  ConstSpan recv_window(size_t n) override PERSEUS_REQUIRES(progress_lock) { return in_.window(n); }
  void recv_release(size_t n) override PERSEUS_REQUIRES(progress_lock) {
    in_.release(n);
    *received_ += n;
    fabric_.ring_bell(peer_);
  }
  size_t try_send(const iovec*, int) override PERSEUS_REQUIRES(progress_lock) {
    fail(ErrorKind::kInternal, "[mem] try_send on a link with windows");
  }
  size_t try_recv(const iovec*, int) override PERSEUS_REQUIRES(progress_lock) {
    fail(ErrorKind::kInternal, "[mem] try_recv on a link with windows");
  }

 private:
  MemFabric& fabric_;
  int peer_;
  std::shared_ptr<void> out_memory_, in_memory_;
  RingProducer out_;
  RingConsumer in_;
  uint64_t *sent_, *received_;
};

class MemTransport final : public Transport {
 public:
  MemTransport(const World& world, std::shared_ptr<MemFabric> fabric, Waker& waker)
      : rank_(world.rank), size_(world.size), fabric_(std::move(fabric)) {
    fabric_->sit(rank_, waker);
  }
  ~MemTransport() override { fabric_->leave(rank_); }

  TransportKind kind() const override { return TransportKind::kMem; }
  bool reaches(int peer) const override { return peer >= 0 && peer < size_; }
  Link& link(int peer, Channel channel) override PERSEUS_REQUIRES(progress_lock) {
    std::unique_ptr<MemLink>& link = links_[{peer, channel.key()}];
    if (!link) {
      link = std::make_unique<MemLink>(*fabric_, peer, fabric_->ring(rank_, peer, channel),
                                       fabric_->ring(peer, rank_, channel), ring_capacity(channel.stream), &sent_,
                                       &received_);
      staging_ += ring_capacity(channel.stream);  // the outgoing ring; the other is the peer's
    }
    return *link;
  }
  void forget(int peer, uint32_t group) override PERSEUS_REQUIRES(progress_lock) {
    const auto first = links_.lower_bound({peer, Channel{group, 0}.key()});
    const auto end = links_.upper_bound({peer, Channel{group, UINT32_MAX}.key()});
    for (auto link = first; link != end; ++link) staging_ -= ring_capacity(Channel::of_key(link->first.second).stream);
    links_.erase(first, end);
    fabric_->forget(rank_, peer, group);
  }
  void poll(bool) override PERSEUS_REQUIRES(progress_lock) {}
  void send_control_message(int peer, const std::string& message) override PERSEUS_REQUIRES(progress_lock) {
    fabric_->post(peer, PeerEvent{rank_, PeerEvent::Kind::kControlMessage, message});
  }
  bool next_event(PeerEvent* event) override PERSEUS_REQUIRES(progress_lock) { return fabric_->take(rank_, event); }
  void send_heartbeats() override PERSEUS_REQUIRES(progress_lock) { fabric_->send_heartbeat(rank_); }
  int64_t last_alive_ns(int peer) override PERSEUS_REQUIRES(progress_lock) { return fabric_->alive_ns(peer); }
  uint64_t bytes_sent() const override PERSEUS_REQUIRES(progress_lock) { return sent_; }
  uint64_t bytes_received() const override PERSEUS_REQUIRES(progress_lock) { return received_; }
  uint64_t staging_bytes() const override PERSEUS_REQUIRES(progress_lock) { return staging_; }

 private:
  int rank_, size_;
  std::shared_ptr<MemFabric> fabric_;
  std::map<std::pair<int, uint64_t>, std::unique_ptr<MemLink>> links_;
  uint64_t sent_ = 0, received_ = 0, staging_ = 0;
};

}  // namespace

std::shared_ptr<MemFabric> make_mem_fabric(int size) { return std::make_shared<MemFabric>(size); }

std::unique_ptr<Transport> connect_mem(const World& world, std::shared_ptr<MemFabric> fabric, Waker& waker) {
  return std::make_unique<MemTransport>(world, std::move(fabric), waker);
}

}  // namespace perseus
