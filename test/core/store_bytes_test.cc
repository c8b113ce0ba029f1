// What the store and its clients make of each other's bytes: wrong ones, those of others, and too many connections.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <filesystem>
#include <iterator>
#include <optional>
#include <thread>
#include <vector>

#include "bootstrap/store_protocol.h"
#include "net/socket.h"
#include "store_support.h"

namespace perseus {
namespace {

using namespace store_protocol;

int open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd"), end;
  return static_cast<int>(std::distance(all, end)) - 1;  // the look itself takes one
}

// A peer that speaks whatever the test says.
class RawPeer {
 public:
  explicit RawPeer(int port) {
    SocketAddress address;
    parse_address("127.0.0.1", port, &address);
    socket_ = start_connect(address);
    pollfd entry{socket_.fd(), POLLOUT, 0};
    ::poll(&entry, 1, static_cast<int>(kPatienceMs));
  }
  void say(const std::string& bytes) { send_some(socket_.fd(), bytes.data(), bytes.size()); }
  // What the server says until it closes or `enough` bytes are here.
  std::string receive(bool* closed, size_t enough = SIZE_MAX) {
    std::string received;
    const int64_t deadline = in_ms(kPatienceMs);
    *closed = false;
    while (now_ns() < deadline && received.size() < enough) {
      char buffer[4096];
      const ssize_t n = recv_some(socket_.fd(), buffer, sizeof buffer);
      if (n > 0) received.append(buffer, static_cast<size_t>(n));
      *closed = n < 0;
      if (n < 0) break;
      pollfd entry{socket_.fd(), POLLIN, 0};
      if (n == 0) ::poll(&entry, 1, 20);
    }
    return received;
  }

 private:
  Socket socket_;
};

// A peer that has proved the secret.
class RawMember : public RawPeer {
 public:
  explicit RawMember(int port, uint32_t format = kFormat) : RawPeer(port) {
    bool closed = false;
    Handshake handshake(Handshake::Side::kConnector, "secret", "", opening(), Versions::kAny);
    const std::string greeting = receive(&closed, kOpeningSize);
    EXPECT_EQ(greeting.size(), kOpeningSize);
    std::string answer = handshake.feed(greeting.data(), greeting.size());
    answer[4] = static_cast<char>(format);
    say(answer);
    verdict = receive(&closed, kProofSize);
    handshake.feed(verdict.data(), verdict.size());
    EXPECT_EQ(handshake.proven(), format == kFormat) << handshake.refusal().why;
    if (!handshake.proven()) return;
    of_requests_ = code_of_requests(handshake.session());
    of_replies_ = code_of_replies(handshake.session());
  }
  // A request of ours, as it goes over the connection, and what is expected of the server.
  std::string coded(const std::string& request) { return request + of_requests_->behind(request); }
  std::string coded_reply(const std::string& reply) { return reply + of_replies_->behind(reply); }
  void ask(const std::string& request) { say(coded(request)); }
  std::string verdict;

 private:
  std::optional<AuthenticationCode> of_requests_, of_replies_;
};

std::string numbers_text(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (const uint32_t number : numbers) put_u32(&text, number);
  return text;
}

std::string frame(uint32_t size, uint32_t op, uint32_t key_size, const std::string& rest) {
  return numbers_text({size, op, key_size}) + rest;
}

// A request as it ought to be.
std::string request(uint32_t op, const std::string& key, const std::string& body) {
  return frame(static_cast<uint32_t>(kRequestHeader + key.size() + body.size()), op, static_cast<uint32_t>(key.size()),
               key + body);
}

std::string entry(uint32_t number, const std::string& value) {
  return numbers_text({number, static_cast<uint32_t>(value.size())}) + value;
}

// A server that knows the secret and then says whatever the test wants to its one client: messages with their codes,
// and bytes behind them.
class PlayedServer {
 public:
  struct Words {
    std::vector<std::string> messages;
    std::string rest;
    size_t wrong = SIZE_MAX;  // the message that has another code
  };
  explicit PlayedServer(const Words& says, uint32_t format = kFormat) {
    SocketAddress any;
    parse_address("127.0.0.1", 0, &any);
    listener_ = listen_on(any);
    thread_ = std::thread([this, says, format] { play(says, format); });
  }
  ~PlayedServer() { thread_.join(); }
  PlayedServer(const PlayedServer&) = delete;
  PlayedServer& operator=(const PlayedServer&) = delete;
  int port() const { return local_address(listener_.fd()).port(); }

 private:
  void play(const Words& says, uint32_t format) {
    await(listener_.fd());
    const Socket client = accept_one(listener_.fd());
    Opening ours = opening();
    ours.format = format;
    ours.version = "1.2.3+old";
    Handshake handshake(Handshake::Side::kListener, "secret", "", ours, Versions::kAny);
    send(client, handshake.open());
    const std::string answer = receive(client, handshake.wanted());
    if (answer.size() == handshake.wanted()) {
      send(client, handshake.feed(answer.data(), answer.size()));
      receive(client, 4 + kRequestHeader + 1);  // a request has begun
      AuthenticationCode of_replies = code_of_replies(handshake.session());
      std::string bytes;
      for (size_t i = 0; i < says.messages.size(); ++i) {
        bytes += says.messages[i] + of_replies.behind(says.messages[i]);
        if (i == says.wrong) bytes.back() = static_cast<char>(bytes.back() ^ 1);
      }
      send(client, bytes + says.rest);
    }
    receive(client, SIZE_MAX);  // until it hangs up
  }
  static void await(int fd) {
    pollfd entry{fd, POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(kPatienceMs));
  }
  static void send(const Socket& to, const std::string& bytes) { send_some(to.fd(), bytes.data(), bytes.size()); }
  static std::string receive(const Socket& from, size_t size) {
    std::string bytes;
    while (bytes.size() < size) {
      char buffer[256];
      await(from.fd());
      const ssize_t n = recv_some(from.fd(), buffer, std::min(size - bytes.size(), sizeof buffer));
      if (n < 0) break;
      bytes.append(buffer, static_cast<size_t>(n));
    }
    return bytes;
  }

  Socket listener_;
  std::thread thread_;
};

TEST(TcpStore, ServerThatAnswersNonsenseIsNamed) {
  const std::string too_long = numbers_text({1, static_cast<uint32_t>(kMaxValue) + 1});
  const std::pair<PlayedServer::Words, std::string> cases[] = {
      {{{entry(2, "not asked for")}, ""}, "number 2 was not asked for"},
      {{{entry(0xffffffff, "")}, ""}, "was not asked for"},
      {{{entry(1, ""), entry(1, "again")}, ""}, "number 1 was not asked for"},
      {{{too_long}, ""}, "expected at most 16777216 bytes, got 16777217"},
      {{{numbers_text({1, kAbsent})}, ""}, "expected at most 16777216 bytes, got 4294967295"},
      {{{entry(1, "one"), entry(3, "three")}, "!"}, "1 bytes after the last value"},
      {{{entry(1, "one"), entry(3, "three")}, "", 0}, "a message of 11 bytes with a wrong authentication code"},
      {{{entry(1, "one"), entry(3, "three")}, "", 1}, "a message of 13 bytes with a wrong authentication code"},
  };
  for (const auto& [says, why] : cases) {
    const PlayedServer server(says);
    const auto store = connect_store("127.0.0.1", server.port(), "secret", in_ms(kPatienceMs));
    Values values;
    const Error error =
        error_of([&] { static_cast<void>(store->get_all("k/", {1, 3}, in_ms(kPatienceMs), into(&values))); });
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_TRUE(contains(error, "sent nonsense: ")) << error.what();
    EXPECT_TRUE(contains(error, why)) << error.what();
  }
}

TEST(TcpStore, ServerOfAnotherFormatIsNamedWithItsVersion) {
  const PlayedServer server({}, kFormat - 1);
  const Error error = error_of([&] { connect_store("127.0.0.1", server.port(), "secret", in_ms(kPatienceMs)); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_TRUE(contains(error, "runs Perseus 1.2.3+old, this rank Perseus ")) << error.what();
  EXPECT_TRUE(contains(error, "(format " + std::to_string(kFormat - 1) + " of the store, not " +
                                  std::to_string(kFormat) + "); install the same Perseus on every host"))
      << error.what();
}

TEST(StoreServer, GarbageAndSilenceDisturbNobody) {
  const auto server = serve();
  const auto store = client_of(*server);
  RawPeer silent(server->port()), garbage(server->port()), loris(server->port());
  garbage.say(std::string(100'000, 'G'));
  loris.say("x");
  bool closed = false;
  const std::string received = garbage.receive(&closed);
  EXPECT_TRUE(closed);
  EXPECT_LE(received.size(), kOpeningSize + kProofSize);
  store->set("k", "v", in_ms(kPatienceMs));
  EXPECT_EQ(client_of(*server)->get("k", in_ms(kPatienceMs)), "v");
  silent.receive(&closed);
  EXPECT_TRUE(closed);
  loris.receive(&closed);
  EXPECT_TRUE(closed);
  EXPECT_EQ(store->get("k", in_ms(kPatienceMs)), "v");
}

TEST(StoreServer, CrowdOfPendingConnectionsLeavesRoomForMembers) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur < 4000) GTEST_SKIP() << "needs 4000 descriptors, the hard limit is " << files.rlim_cur;
  const auto server = serve();
  std::vector<RawPeer> crowd;
  for (int i = 0; i < 1500; ++i) crowd.emplace_back(server->port());
  client_of(*server)->set("k", "v", in_ms(kPatienceMs));
  EXPECT_EQ(client_of(*server)->get("k", in_ms(kPatienceMs)), "v");
}

// Those who have proved nothing must not use up the descriptors of rank 0's process.
TEST(StoreServer, PendingConnectionsGetAShareOfTheDescriptors) {
  constexpr int kCrowd = 200;
  constexpr rlim_t kLimit = 256;
  constexpr int kShare = static_cast<int>(kLimit) / 8;
  const auto server = serve();
  int tell[2], hold[2];
  ASSERT_EQ(::pipe(tell), 0);
  ASSERT_EQ(::pipe(hold), 0);
  const int before = open_descriptors();
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const rlimit few{kLimit, files.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(hold[1]);
    std::deque<RawPeer> crowd;
    for (int i = 0; i < kCrowd; ++i) crowd.emplace_back(server->port());
    for (int i = 0; i < kCrowd - kShare; ++i) {  // the oldest, which were pushed out
      bool closed = false;
      crowd[static_cast<size_t>(i)].receive(&closed);
      if (!closed) _exit(1);
    }
    char byte = 0;
    if (::write(tell[1], &byte, 1) != 1) _exit(2);
    _exit(::read(hold[0], &byte, 1) == 0 ? 0 : 3);
  }
  char byte = 1;
  EXPECT_EQ(::read(tell[0], &byte, 1), 1);
  EXPECT_LE(open_descriptors(), before + kShare);
  client_of(*server)->set("k", "v", in_ms(kPatienceMs));
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  ::close(hold[1]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (const int fd : {tell[0], tell[1], hold[0]}) ::close(fd);
}

// Sizes that lie after a valid proof cost the liar its connection and nobody else anything.
TEST(StoreServer, ImpossibleSizesCloseTheConnection) {
  const auto server = serve();
  const auto store = client_of(*server);
  const std::vector<std::string> bad[] = {
      {frame(0xffffffff, kSet, 1, "k")},
      {frame(4, kSet, 1, "k")},
      {frame(9, kSet, 2, "k")},
      {frame(9, 77, 1, "k")},
      {frame(9, kSet, 0xffffffff, "k")},
      {frame(8, kGet, 0, "")},
      {frame(8 + kMaxKey + 1, kGet, kMaxKey + 1, std::string(kMaxKey + 1, 'k'))},
      {frame(9, kGet, 1, "z"), frame(9, kGet, 1, "z")},
      {request(kGetAll, "z/", "123")},
      {request(kGetAll, "z/", numbers_text({2, 1}))},
      {request(kGetPresent, "z/", numbers_text({1, 1}))},
      {request(kGetAll, "z/", numbers_text({0x80000000}))},
      {request(kGetAll, "z/", numbers_text({1, 0xffffffff}))},
      {request(kGetAll, "z/", numbers_text({1})), request(kGetAll, "z/", numbers_text({2}))},
      {request(kGetAll, "", numbers_text({1}))},
  };
  for (const std::vector<std::string>& requests : bad) {
    RawMember peer(server->port());
    bool closed = false;
    std::string bytes;
    for (const std::string& each : requests) bytes += peer.coded(each);
    peer.say(bytes);
    peer.receive(&closed);
    EXPECT_TRUE(closed) << "request " << &requests - bad;
  }
  store->set("k", "v", in_ms(kPatienceMs));
  EXPECT_EQ(store->get("k", in_ms(kPatienceMs)), "v");
}

// Whoever can inject packets into a connection knows neither its key nor how often it was used.
TEST(StoreServer, OnlyTheClientCanAsk) {
  const auto server = serve();
  const auto store = client_of(*server);
  const std::string set = request(kSet, "k", "hostile");
  const uint64_t before = server->requests();
  for (size_t at = 0; at < set.size() + kCode; ++at) {
    RawMember peer(server->port());
    std::string bytes = peer.coded(set);
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    if (at < 4) bytes.append(300'000, '\0');  // up to where the size says now, if that is possible
    bool closed = false;
    peer.say(bytes);
    peer.receive(&closed);
    EXPECT_TRUE(closed) << "byte " << at;
  }
  EXPECT_EQ(server->requests(), before);
  RawMember peer(server->port()), other(server->port());
  const std::string once = peer.coded(request(kSet, "k2", "v"));
  bool closed = false;
  other.say(once);
  other.receive(&closed);
  EXPECT_TRUE(closed) << "a request of another connection";
  peer.say(once);
  const std::string done = peer.coded_reply(numbers_text({0}));
  EXPECT_EQ(peer.receive(&closed, done.size()), done);
  peer.say(once);
  peer.receive(&closed);
  EXPECT_TRUE(closed) << "the same request again";
  EXPECT_EQ(store->get("k2", in_ms(kPatienceMs)), "v");
  EXPECT_EQ(error_of([&] { store->get("k", in_ms(50)); }).kind(), ErrorKind::kTimeout) << "nobody has set it";
}

// What exists goes out at once; what appears later, though others are still missing.
TEST(StoreServer, AnswersTheKeysThatExistBeforeTheOthers) {
  const auto server = serve();
  const auto store = client_of(*server);
  store->set("k/5", "five", in_ms(kPatienceMs));
  RawMember peer(server->port());
  bool closed = false;
  const auto expect_next = [&](const std::string& coded) { EXPECT_EQ(peer.receive(&closed, coded.size()), coded); };
  peer.ask(request(kGetAll, "k/", numbers_text({2, 5, 9})));
  expect_next(peer.coded_reply(entry(5, "five")));
  store->set("k/9", "nine", in_ms(kPatienceMs));
  expect_next(peer.coded_reply(entry(9, "nine")));
  store->set("k/2", "", in_ms(kPatienceMs));
  expect_next(peer.coded_reply(entry(2, "")));
  peer.ask(request(kGetPresent, "k/", numbers_text({1, 2, 9})));
  std::string rest;
  for (const std::string& each : {numbers_text({1, kAbsent}), entry(2, ""), entry(9, "nine")})
    rest += peer.coded_reply(each);
  expect_next(rest);
  EXPECT_FALSE(closed);
}

TEST(StoreServer, ClientsThatLeaveWhileTheyWaitForManyKeysDisturbNobody) {
  const auto server = serve();
  const auto store = client_of(*server);
  store->set("k/1", std::string(kMaxValue, 'v'), in_ms(kPatienceMs));
  {
    RawMember waits(server->port()), gathers(server->port()), reads_nothing(server->port());
    const uint64_t before = server->requests();
    for (RawMember* peer : {&waits, &gathers}) peer->ask(request(kGetAll, "k/", numbers_text({2, 3})));
    reads_nothing.ask(request(kGetAll, "k/", numbers_text({1, 2})));
    while (server->requests() < before + 3) std::this_thread::yield();
    store->set("k/2", "two", in_ms(kPatienceMs));
  }
  store->set("k/3", "three", in_ms(kPatienceMs));
  Values values;
  EXPECT_TRUE(store->get_all("k/", {2, 3}, in_ms(kPatienceMs), into(&values)).empty());
  EXPECT_EQ(values, (Values{{2, "two"}, {3, "three"}}));
}

TEST(StoreServer, ClientOfAnotherFormatIsRefused) {
  const auto server = serve();
  RawMember old(server->port(), kFormat - 1);
  EXPECT_EQ(old.verdict, "");
  bool closed = false;
  old.receive(&closed);
  EXPECT_TRUE(closed);
}

}  // namespace
}  // namespace perseus
