// Frames of the control connection.
#include "transport/tcp_control_connection.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/little_endian.h"
#include "transport/tcp_protocol.h"

namespace perseus {
namespace {

// A peer that does not read gets no more than this: control messages are best effort.
constexpr size_t kMaxQueued = 64 * 1024;

uint64_t code_of(AuthenticationCode& code, const char* payload, size_t size) {
  code.begin(size);
  code.add(payload, size);
  return code.finish();
}

}  // namespace

TcpControlConnection::TcpControlConnection(Poller& poller, TcpTraffic& traffic, Listener& listener, int64_t& alive_ns,
                                           int me, int peer, Socket socket, std::string session)
    : poller_(poller),
      traffic_(traffic),
      listener_(listener),
      alive_ns_(alive_ns),
      peer_(peer),
      socket_(std::move(socket)),
      session_(std::move(session)),
      outgoing_code_(message_key(session_, me, peer, tcp_protocol::kControl)),
      incoming_code_(message_key(session_, peer, me, tcp_protocol::kControl)) {
  alive_ns_ = now_ns();
  poller_.add(socket_.fd(), EPOLLIN | EPOLLRDHUP, this);
}

TcpControlConnection::~TcpControlConnection() {
  if (!lost_) flush();
  poller_.remove(socket_.fd());
  // Closing with unread bytes would reset the connection and destroy our last control message on its way.
  ::shutdown(socket_.fd(), SHUT_WR);
  char rest[4096];
  for (int i = 0; i < 64 && recv_some(socket_.fd(), rest, sizeof rest) > 0; ++i) continue;
}

void TcpControlConnection::send_control_message(const std::string& message) {
  queue(message.substr(0, tcp_protocol::kMaxControlText));
}

void TcpControlConnection::send_heartbeat() {
  // Whatever is queued says the same.
  if (out_.empty()) queue("");
}

void TcpControlConnection::queue(const std::string& payload) {
  if (lost_ || out_.size() + 4 + payload.size() + AuthenticationCode::kBytes > kMaxQueued) return;
  out_.reserve(out_.size() + 4 + payload.size() + AuthenticationCode::kBytes);  // the whole frame, or nothing
  put_u32(&out_, static_cast<uint32_t>(payload.size()));
  out_ += payload;
  put_u64(&out_, code_of(outgoing_code_, payload.data(), payload.size()));
  flush();  // a failure shows as an event, too
}

bool TcpControlConnection::finish() {
  if (lost_ || !flush()) return true;
  if (!out_.empty()) return false;
  ::shutdown(socket_.fd(), SHUT_WR);
  return acknowledged(socket_.fd());
}

bool TcpControlConnection::flush() {
  while (!out_.empty()) {
    const ssize_t n = send_some(socket_.fd(), out_.data(), out_.size());
    if (n < 0) return false;
    if (n == 0) break;
    traffic_.sent += static_cast<size_t>(n);
    out_.erase(0, static_cast<size_t>(n));
  }
  if (waits_to_write_ == out_.empty()) {
    waits_to_write_ = !out_.empty();
    poller_.change(socket_.fd(), waits_to_write_ ? EPOLLIN | EPOLLRDHUP | EPOLLOUT : EPOLLIN | EPOLLRDHUP, this);
  }
  return true;
}

void TcpControlConnection::on_event(uint32_t events) {
  // What arrived before the end is delivered before the end.
  if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) receive();
  if (!lost_ && (events & EPOLLOUT) && !flush()) lose(std::strerror(errno));
}

void TcpControlConnection::receive() {
  for (;;) {
    char buffer[4096];
    const ssize_t n = recv_some(socket_.fd(), buffer, sizeof buffer);
    if (n == 0) return;
    if (n < 0) return lose(n == kEndOfStream ? "connection closed" : std::strerror(errno));
    traffic_.received += static_cast<size_t>(n);
    alive_ns_ = now_ns();
    in_.append(buffer, static_cast<size_t>(n));
    size_t at = 0;
    while (in_.size() - at >= 4) {
      const size_t size = get_u32(in_.data() + at);
      if (size > tcp_protocol::kMaxControlText)
        return lose("sent a control message of " + std::to_string(size) + " bytes, expected at most " +
                    std::to_string(tcp_protocol::kMaxControlText));
      if (in_.size() - at - 4 < size + AuthenticationCode::kBytes) break;
      const char* payload = in_.data() + at + 4;
      if (get_u64(payload + size) != code_of(incoming_code_, payload, size))
        return lose("from it came " + AuthenticationCode::refusal(size));
      if (size != 0) listener_.on_control_message(peer_, std::string(payload, size));
      at += 4 + size + AuthenticationCode::kBytes;
    }
    in_.erase(0, at);
    if (static_cast<size_t>(n) < sizeof buffer) return;
  }
}

void TcpControlConnection::lose(const std::string& why) {
  if (lost_) return;
  lost_ = true;
  out_.clear();
  poller_.remove(socket_.fd());
  listener_.on_gone(peer_, why);
}

}  // namespace perseus
