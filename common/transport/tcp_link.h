// One channel to one peer over its own TCP connection: copies nothing on the way out, stages what recv_window() must
// show in one piece. The thread that may use its TcpTransport may use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/progress_lock.h"
#include "net/message_check.h"
#include "net/socket.h"
#include "transport/transport.h"

namespace perseus {

// What the links of one transport share.
struct TcpTraffic {
  // Counts the moments at which trying a socket again may be worth a system call.
  uint64_t round = 1;
  // Tries of this round that moved nothing.
  uint32_t fruitless = 0;
  int64_t now_ns = 0;  // at the last poll()
  uint64_t sent = 0, received = 0;
  uint64_t staging = 0;  // bytes of memory
};

class TcpLink : public Link {
 public:
  using Check = std::unique_ptr<MessageCheck>;
  TcpLink(TcpTraffic& traffic, int64_t& alive_ns, int peer, Channel channel, Check outgoing, Check incoming)
      : traffic_(traffic),
        alive_ns_(alive_ns),
        peer_(peer),
        channel_(channel),
        outgoing_check_(std::move(outgoing)),
        incoming_check_(std::move(incoming)) {}

  ~TcpLink() override { traffic_.staging -= capacity_; }

  Channel channel() const { return channel_; }
  int peer() const { return peer_; }
  // Connected, and the hello has been sent or verified.
  void attach(Socket socket);
  bool attached() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.fd(); }
  // From now on calls that cannot be served from the staging do nothing, and throw Error(kIo) a second later.
  void break_off(const std::string& why);

  bool has_windows() const override { return false; }
  MessageCheck* outgoing_check() override { return outgoing_check_.get(); }
  MessageCheck* incoming_check() override { return incoming_check_.get(); }
  std::string peer_text() const override;
  Span send_window(size_t n) override PERSEUS_REQUIRES(progress_lock);
  void send_commit(size_t n) override PERSEUS_REQUIRES(progress_lock);
  size_t try_send(const iovec* pieces, int count) override PERSEUS_REQUIRES(progress_lock);
  ConstSpan recv_window(size_t n) override PERSEUS_REQUIRES(progress_lock);
  void recv_release(size_t n) override PERSEUS_REQUIRES(progress_lock);
  size_t try_recv(const iovec* pieces, int count) override PERSEUS_REQUIRES(progress_lock);
  bool delivered() const override PERSEUS_REQUIRES(progress_lock);
  // Nothing more is sent. Has the peer's host acknowledged everything, or is the connection broken?
  bool finish() PERSEUS_REQUIRES(progress_lock);

 private:
  void measure_segment();
  size_t worth_sending(size_t bytes) const;
  size_t staged() const { return tail_ - head_; }
  size_t greedy() const;  // how much to read when less is asked for
  size_t take_staged(const iovec* pieces, int count);
  void make_room(size_t n);
  bool may_receive();
  size_t account(ssize_t received, size_t asked);
  void report_broken() const;  // throws once the grace is over

  TcpTraffic& traffic_;
  int64_t& alive_ns_;  // of the peer
  const int peer_;
  const Channel channel_;
  const Check outgoing_check_, incoming_check_;
  Socket socket_;
  std::string where_;      // the peer's address, for messages
  std::string broken_;     // why, "" = not
  int64_t broken_ns_ = 0;  // since when
  size_t segment_ = 0;     // what the kernel sends at once, where that is large (loopback), else 0
  uint64_t sent_ = 0, measure_at_ = 0;
  uint64_t send_tried_ = 0, recv_tried_ = 0;  // the round in which the socket had nothing more to give

  std::unique_ptr<Byte[]> staging_;
  size_t capacity_ = 0, head_ = 0, tail_ = 0;  // [head, tail) is received and not yet taken
};

}  // namespace perseus
