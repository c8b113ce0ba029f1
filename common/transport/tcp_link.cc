// sendmsg and recvmsg behind TcpLink, with as few fruitless calls as can be.
#include "transport/tcp_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "transport/pieces.h"

namespace perseus {
namespace {

// Small messages are read together with what follows them, up to this much at once.
constexpr size_t kGreedy = 16 * 1024;
constexpr size_t kGreedyControl = 2 * kMaxControlMessage;
constexpr int kMaxPieces = 64;
// Loopback's segments have 64 KiB less some headers: a message of 64 KiB would go as a full one and one of 53 bytes,
// each of which costs both sides a round through the whole stack. Two halves cost half as much.
constexpr int kLargeSegment = 16 * 1024;
constexpr size_t kRunt = 4 * 1024;
// A peer that ends closes all its connections at once, and its control connection tells whether it left or died: only
// when that stays open is the broken link itself the news.
constexpr int64_t kGrace = kSecond;

// What one system call handles: of the pieces without their first `skip` bytes at most `limit` bytes.
struct Part {
  Part(const iovec* pieces, int count, size_t skip, size_t limit) {
    for (int i = 0; i < count && used < kMaxPieces && bytes < limit; ++i) {
      const size_t passed = std::min(skip, pieces[i].iov_len);
      const size_t n = std::min(pieces[i].iov_len - passed, limit - bytes);
      skip -= passed;
      if (n != 0) add(static_cast<Byte*>(pieces[i].iov_base) + passed, n);
      bytes += n;
    }
  }
  void add(Byte* data, size_t n) { entries[used++] = iovec{data, n}; }
  msghdr message() {
    msghdr header{};
    header.msg_iov = entries;
    header.msg_iovlen = static_cast<size_t>(used);
    return header;
  }

  iovec entries[kMaxPieces + 1];
  int used = 0;
  size_t bytes = 0;
};

}  // namespace

void TcpLink::attach(Socket socket) {
  socket_ = std::move(socket);
  where_ = peer_address(socket_.fd()).text();
  send_tried_ = recv_tried_ = 0;
}

// The kernel starts with half of what it takes once the peer's window has grown: asked again, ever more rarely.
void TcpLink::measure_segment() {
  int segment = 0;
  socklen_t size = sizeof segment;
  ::getsockopt(socket_.fd(), IPPROTO_TCP, TCP_MAXSEG, &segment, &size);
  segment_ = segment >= kLargeSegment ? static_cast<size_t>(segment) : 0;
  measure_at_ = 2 * sent_ + 4 * kMaxMessage;
}

void TcpLink::break_off(const std::string& why) {
  if (!broken_.empty()) return;
  broken_ = why;
  broken_ns_ = now_ns();
}

void TcpLink::report_broken() const {
  if (now_ns() - broken_ns_ < kGrace) return;
  fail(ErrorKind::kIo,
       "[tcp] connection to " + peer_text() + " failed: " + broken_ + "; look at what that rank printed last");
}

std::string TcpLink::peer_text() const {
  return "rank " + std::to_string(peer_) + (where_.empty() ? "" : " (" + where_ + ")");
}

Span TcpLink::send_window(size_t) { fail(ErrorKind::kInternal, "[tcp] send_window() on a link without windows"); }
void TcpLink::send_commit(size_t) { fail(ErrorKind::kInternal, "[tcp] send_commit() on a link without windows"); }

size_t TcpLink::try_send(const iovec* pieces, int count) {
  if (!broken_.empty()) {
    report_broken();
    return 0;
  }
  if (!socket_ || send_tried_ == traffic_.round) return 0;
  if (sent_ >= measure_at_) measure_segment();
  const size_t all = total_bytes(pieces, count);
  size_t sent = 0;
  while (sent < all) {
    Part part(pieces, count, sent, worth_sending(all - sent));
    const msghdr message = part.message();
    const ssize_t n = ::sendmsg(socket_.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
      break_off(errno == EPIPE ? "connection closed" : std::strerror(errno));
      break;
    }
    if (n > 0) sent += static_cast<size_t>(n);
    if (n >= 0 && static_cast<size_t>(n) == part.bytes) continue;
    send_tried_ = traffic_.round;
    if (sent == 0) ++traffic_.fruitless;
    break;
  }
  traffic_.sent += sent;
  sent_ += sent;
  return sent;
}

// Leaves half a segment for the next system call rather than a runt for this one.
size_t TcpLink::worth_sending(size_t bytes) const {
  if (segment_ == 0 || bytes < segment_ || bytes % segment_ >= kRunt || bytes % segment_ == 0) return bytes;
  return bytes - segment_ / 2;
}

bool TcpLink::may_receive() {
  if (!broken_.empty()) {
    report_broken();
    return false;
  }
  return socket_ && recv_tried_ != traffic_.round;
}

// Of one recv: bookkeeping, and the bytes it brought.
size_t TcpLink::account(ssize_t received, size_t asked) {
  if (received == 0) break_off("connection closed");
  if (received < 0 && errno != EAGAIN && errno != EINTR) break_off(std::strerror(errno));
  if (!broken_.empty()) return 0;  // reported when somebody cannot be served without
  if (received < 0) {
    recv_tried_ = traffic_.round;
    ++traffic_.fruitless;
    return 0;
  }
  const auto bytes = static_cast<size_t>(received);
  if (bytes < asked) recv_tried_ = traffic_.round;
  traffic_.received += bytes;
  alive_ns_ = traffic_.now_ns;
  return bytes;
}

size_t TcpLink::greedy() const { return channel_.stream >= kControlStream ? kGreedyControl : kGreedy; }

void TcpLink::make_room(size_t n) {
  if (head_ == tail_) head_ = tail_ = 0;
  const size_t wanted = std::max(n, greedy());
  if (capacity_ < wanted) {
    std::unique_ptr<Byte[]> larger(new Byte[wanted]);
    if (staged() != 0) std::memcpy(larger.get(), staging_.get() + head_, staged());
    staging_ = std::move(larger);
    traffic_.staging += wanted - capacity_;
    capacity_ = wanted;
  } else if (head_ + n > capacity_) {
    std::memmove(staging_.get(), staging_.get() + head_, staged());
  } else {
    return;
  }
  tail_ -= head_;
  head_ = 0;
}

ConstSpan TcpLink::recv_window(size_t n) {
  if (staged() < n) {
    if (!may_receive()) return {};
    make_room(n);
    // A large message is read alone: what follows it may go straight into the caller's memory.
    const size_t asked = std::min(capacity_ - tail_, std::max(n, greedy()) - staged());
    tail_ += account(::recv(socket_.fd(), staging_.get() + tail_, asked, MSG_DONTWAIT), asked);
    if (staged() < n) return {};
  }
  return ConstSpan(staging_.get() + head_, n);
}

bool TcpLink::delivered() const { return !socket_ || acknowledged(socket_.fd()); }

bool TcpLink::finish() {
  if (socket_) ::shutdown(socket_.fd(), SHUT_WR);
  return delivered();
}

void TcpLink::recv_release(size_t n) { head_ += n; }

size_t TcpLink::take_staged(const iovec* pieces, int count) {
  size_t taken = 0;
  for (int i = 0; i < count && head_ < tail_; ++i) {
    const size_t n = std::min(pieces[i].iov_len, staged());
    if (n == 0) continue;
    std::memcpy(pieces[i].iov_base, staging_.get() + head_, n);
    head_ += n;
    taken += n;
  }
  return taken;
}

size_t TcpLink::try_recv(const iovec* pieces, int count) {
  size_t taken = take_staged(pieces, count);
  const size_t all = total_bytes(pieces, count);
  // What was taken is delivered first; the error waits for the next call.
  if (taken == all || (taken != 0 && !broken_.empty())) return taken;
  while (taken < all && may_receive()) {
    Part part(pieces, count, taken, all - taken);
    size_t extra = 0;
    if (taken + part.bytes == all && part.bytes < greedy()) {
      make_room(1);
      extra = std::min(capacity_, greedy());
      part.add(staging_.get(), extra);
    }
    msghdr message = part.message();
    const size_t got = account(::recvmsg(socket_.fd(), &message, MSG_DONTWAIT), part.bytes + extra);
    head_ = 0;
    tail_ = got > part.bytes ? got - part.bytes : 0;
    taken += std::min(got, part.bytes);
    if (got < part.bytes + extra) break;
  }
  return taken;
}

}  // namespace perseus
