// Control messages and heartbeats on the TCP connection of two ranks, in pieces of any size.
#include <sys/socket.h>

#include <memory>

#include "fuzz.h"
#include "net/poller.h"
#include "transport/tcp_control_connection.h"
#include "transport/tcp_protocol.h"

using namespace perseus;
using perseus_fuzz::expect;

namespace {

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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Poller poller("fuzz");
  int ends[2];
  expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
  Socket peer([&] { return ends[0]; });
  TcpTraffic traffic;
  Hearer hearer;
  int64_t alive_ns = 0;
  TcpControlConnection connection(poller, traffic, hearer, alive_ns, 1, Socket([&] { return ends[1]; }), "session");
  perseus_fuzz::Input input(data, size);
  while (!hearer.gone && input.left() > 0) {
    const std::vector<uint8_t> piece = input.take(1 + input.choice(2000));
    if (!piece.empty() && ::send(peer.fd(), piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) break;
    connection.on_event(EPOLLIN);
  }
  peer.reset();
  if (!hearer.gone) connection.on_event(EPOLLIN | EPOLLRDHUP);
  return 0;
}
