// Control messages and heartbeats on the TCP connection of two ranks, in pieces of any size, with right codes and
// without.
#include <sys/socket.h>

#include <memory>
#include <string>

#include "base/little_endian.h"
#include "fuzz.h"
#include "net/poller.h"
#include "transport/tcp_control_connection.h"
#include "transport/tcp_protocol.h"

using namespace perseus;
using perseus_fuzz::expect;

namespace {

constexpr const char* kSession = "session";

class Hearer : public TcpControlConnection::Listener {
 public:
  void on_control_message(int, std::string text) override {
    expect(!gone, "nothing comes from a peer that is gone");
    expect(!text.empty() && text.size() <= tcp_protocol::kMaxControlText, "a message is as large as the protocol says");
  }
  void on_gone(int, const std::string& why) override {
    expect(!gone && !why.empty(), "a peer goes once, and why");
    gone = true;
  }
  bool gone = false;
};

// As the peer would send it.
std::vector<uint8_t> framed(const std::vector<uint8_t>& text, AuthenticationCode& code) {
  code.begin(text.size());
  code.add(text.data(), text.size());
  std::string frame;
  put_u32(&frame, static_cast<uint32_t>(text.size()));
  frame.append(text.begin(), text.end());
  put_u64(&frame, code.finish());
  return {frame.begin(), frame.end()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Poller poller("fuzz");
  int ends[2];
  expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
  Socket peer([&] { return ends[0]; });
  TcpTraffic traffic;
  Hearer hearer;
  int64_t alive_ns = 0;
  TcpControlConnection connection(poller, traffic, hearer, alive_ns, 0, 1, Socket([&] { return ends[1]; }), kSession);
  AuthenticationCode code(message_key(kSession, 1, 0, tcp_protocol::kControl));
  perseus_fuzz::Input input(data, size);
  while (!hearer.gone && input.left() > 0) {
    const bool frame = input.choice(2) == 0;
    std::vector<uint8_t> piece = input.take(1 + input.choice(2000));
    if (frame) piece = framed(piece, code);
    if (!piece.empty() && ::send(peer.fd(), piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) break;
    connection.on_event(EPOLLIN);
  }
  peer.reset();
  if (!hearer.gone) connection.on_event(EPOLLIN | EPOLLRDHUP);
  return 0;
}
