// The control connection of two ranks, with somebody in the middle who may change what passes: what arrives is what the
// peer sent, once and in order, or the peer is gone and the reason says why.
#include "transport/tcp_control_connection.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace perseus_test {
namespace {

using namespace perseus;

constexpr size_t kMore = 4 + 8;  // a frame has its size and its code besides the message

class Hearer : public TcpControlConnection::Listener {
 public:
  void on_control_message(int peer, std::string text) override { heard.push_back(std::to_string(peer) + ": " + text); }
  void on_gone(int, const std::string& why) override { gone = why; }

  std::vector<std::string> heard;
  std::string gone;
};

// Rank 3 or 5 and its end of a wire, whose other end is ours.
struct Side {
  Side(int me, int peer) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    wire = Socket([&] { return ends[0]; });
    connection = std::make_unique<TcpControlConnection>(poller, traffic, hearer, alive_ns, me, peer,
                                                        Socket([&] { return ends[1]; }), "session");
  }
  std::string sent() {
    char bytes[8192];
    const ssize_t n = ::recv(wire.fd(), bytes, sizeof bytes, MSG_DONTWAIT);
    return n > 0 ? std::string(bytes, static_cast<size_t>(n)) : "";
  }
  void hear(const std::string& bytes, size_t piece = 8192) {
    for (size_t at = 0; at < bytes.size(); at += piece) {
      const std::string part = bytes.substr(at, piece);
      EXPECT_EQ(::send(wire.fd(), part.data(), part.size(), MSG_NOSIGNAL), static_cast<ssize_t>(part.size()));
      poller.run(0);
    }
  }

  Poller poller{"test"};
  TcpTraffic traffic;
  Hearer hearer;
  int64_t alive_ns = 0;
  Socket wire;
  std::unique_ptr<TcpControlConnection> connection;
};

struct Two {
  Side three{3, 5}, five{5, 3};
};

TEST(TcpControlConnection, CarriesMessagesAndHeartbeatsInPiecesOfAnySize) {
  for (const size_t piece : {size_t{1}, size_t{5}, size_t{8192}}) {
    Two two;
    for (const char* text : {"A of three", "W", "S 3 1:17 "}) {
      two.three.connection->send_control_message(text);
      two.three.connection->send_heartbeat();
    }
    two.five.alive_ns = 0;
    two.five.hear(two.three.sent(), piece);
    EXPECT_EQ(two.five.hearer.heard, (std::vector<std::string>{"3: A of three", "3: W", "3: S 3 1:17 "}));
    EXPECT_EQ(two.five.hearer.gone, "");
    EXPECT_GT(two.five.alive_ns, 0);
    two.five.connection->send_control_message("and back");
    two.three.hear(two.five.sent());
    EXPECT_EQ(two.three.hearer.heard, std::vector<std::string>{"5: and back"});
  }
}

void expect_refused(Side& side, size_t heard, const std::string& what) {
  EXPECT_NE(side.hearer.gone.find("wrong authentication code"), std::string::npos) << what << ": " << side.hearer.gone;
  EXPECT_LE(side.hearer.heard.size(), heard) << what;
}

TEST(TcpControlConnection, LosesAPeerWhoseFramesHaveChanged) {
  // The size is in the first four bytes; one that is too large is refused as such, and one that is larger is waited
  // for.
  for (size_t place = 4; place < 4 + 6 + 8; ++place) {
    Two two;
    two.three.connection->send_control_message("seldom");
    std::string frame = two.three.sent();
    ASSERT_EQ(frame.size(), 6 + kMore);
    frame[place] = static_cast<char>(frame[place] ^ 1 << place % 8);
    two.five.hear(frame);
    expect_refused(two.five, 0, "byte " + std::to_string(place));
  }
  Two two;
  two.three.connection->send_control_message("seldom");
  std::string frame = two.three.sent();
  frame[0] = 5;
  two.five.hear(frame);
  expect_refused(two.five, 0, "a smaller size");
}

TEST(TcpControlConnection, LosesAPeerWhoseFramesAreRepeatedLeftOutSwappedOrItsOwn) {
  const std::vector<std::pair<std::string, std::function<std::string(const std::string&, const std::string&)>>> ways = {
      {"repeated", [](const auto& first, const auto&) { return first + first; }},
      {"left out", [](const auto&, const auto& second) { return second; }},
      {"swapped", [](const auto& first, const auto& second) { return second + first; }},
  };
  for (const auto& [what, way] : ways) {
    Two two;
    two.three.connection->send_control_message("first");
    const std::string first = two.three.sent();
    two.three.connection->send_heartbeat();
    two.five.hear(way(first, two.three.sent()));
    expect_refused(two.five, 1, what);
  }
  Two two;
  two.three.connection->send_control_message("mine");
  two.three.hear(two.three.sent());
  expect_refused(two.three, 0, "sent back");
}

}  // namespace
}  // namespace perseus_test
