// The Store contract over memory and TCP, and a server that bad clients cannot disturb.
#include "bootstrap/store.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <iterator>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "bootstrap/store_protocol.h"
#include "net/auth.h"
#include "net/socket.h"

namespace perseus {
namespace {

using namespace store_protocol;

constexpr int64_t kPatienceMs = 30'000;  // for what comes at once, on however busy a machine

int64_t in_ms(int64_t ms) { return now_ns() + ms * kMillisecond; }

// What a call throws; fails the test when it throws nothing.
template <class Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorKind::kInternal, "no error");
}

bool contains(const Error& error, const std::string& part) {
  return std::string(error.what()).find(part) != std::string::npos;
}

std::unique_ptr<StoreServer> serve(const std::string& secret = "secret") {
  return StoreServer::listen("127.0.0.1", 0, false, secret);
}

std::shared_ptr<Store> client_of(const StoreServer& server, const std::string& secret = "secret") {
  return connect_store("127.0.0.1", server.port(), secret, in_ms(kPatienceMs));
}

int open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd"), end;
  return static_cast<int>(std::distance(all, end)) - 1;  // the look itself takes one
}

// A port of this host at which nobody listens, and which nobody else is given meanwhile.
class QuietPort {
 public:
  QuietPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    SocketAddress any;
    parse_address("127.0.0.1", 0, &any);
    EXPECT_EQ(::bind(fd_, any.raw(), any.size), 0);
  }
  ~QuietPort() { ::close(fd_); }
  QuietPort(const QuietPort&) = delete;
  QuietPort& operator=(const QuietPort&) = delete;
  int number() const { return local_address(fd_).port(); }

 private:
  const int fd_;
};

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

void check_contract(Store& store) {
  store.set("a", "one");
  EXPECT_EQ(store.get("a", in_ms(kPatienceMs)), "one");
  store.set("a", std::string("t\0wo", 4));
  EXPECT_EQ(store.get("a", in_ms(kPatienceMs)), std::string("t\0wo", 4));
  store.set("empty", "");
  EXPECT_EQ(store.get("empty", in_ms(kPatienceMs)), "");

  const int64_t begin = now_ns();
  const Error late = error_of([&] { store.get("never/set", in_ms(250)); });
  EXPECT_EQ(late.kind(), ErrorKind::kTimeout);
  EXPECT_TRUE(contains(late, "never/set")) << late.what();
  EXPECT_GE(now_ns() - begin, 240 * kMillisecond);

  int asked = 0;
  const Error stopped = error_of([&] { store.get("never/set", in_ms(kPatienceMs), [&] { return ++asked == 3; }); });
  EXPECT_EQ(stopped.kind(), ErrorKind::kAborted);
  EXPECT_EQ(asked, 3);

  // A waiting get() gets what is set later, and holds up no other call of the same client.
  std::string got;
  std::atomic<bool> waits{false};
  std::thread waiter([&] { got = store.get("later", in_ms(kPatienceMs), [&] { return waits = true, false; }); });
  while (!waits) std::this_thread::yield();
  store.set("other", "x");
  store.set("later", "now");
  waiter.join();
  EXPECT_EQ(got, "now");
}

TEST(MemoryStore, KeepsTheContract) { check_contract(*make_memory_store()); }

TEST(TcpStore, KeepsTheContract) {
  const auto server = serve();
  check_contract(*client_of(*server));
}

TEST(TcpStore, ManyClientsMeetThroughOneServer) {
  const auto server = serve();
  constexpr int kRanks = 16;
  std::atomic<int> right{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      const auto store = client_of(*server);
      store->set("rank/" + std::to_string(rank), std::string(rank * 1000 + 1, static_cast<char>('a' + rank)));
      for (int peer = 0; peer < kRanks; ++peer)
        right += store->get("rank/" + std::to_string(peer), in_ms(kPatienceMs)) ==
                 std::string(peer * 1000 + 1, static_cast<char>('a' + peer));
    });
  for (std::thread& thread : ranks) thread.join();
  EXPECT_EQ(right, kRanks * kRanks);
}

TEST(TcpStore, CarriesTheLargestValueAndRefusesLarger) {
  const auto server = serve();
  const auto store = client_of(*server);
  std::string value(kMaxValue, '\0');
  for (size_t i = 0; i < value.size(); ++i) value[i] = static_cast<char>(i * 7 + (i >> 8));
  store->set("big", value);
  EXPECT_TRUE(store->get("big", in_ms(kPatienceMs)) == value);
  EXPECT_EQ(error_of([&] { store->set("bigger", value + "x"); }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_of([&] { store->set(std::string(kMaxKey + 1, 'k'), ""); }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_of([&] { store->get("", in_ms(10)); }).kind(), ErrorKind::kInvalidArgument);
  store->set(std::string(kMaxKey, 'k'), "long key");
  EXPECT_EQ(store->get(std::string(kMaxKey, 'k'), in_ms(kPatienceMs)), "long key");
}

TEST(TcpStore, NamesResolveAndClientsWaitForTheServer) {
  std::unique_ptr<StoreServer> server;
  const QuietPort port;
  std::atomic<bool> tried{false};
  std::thread late([&] {
    while (!tried) std::this_thread::yield();
    server = StoreServer::listen("localhost", port.number(), false, "secret");
  });
  const auto store =
      connect_store("localhost", port.number(), "secret", in_ms(kPatienceMs), [&] { return tried = true, false; });
  late.join();
  store->set("k", "v");
  EXPECT_EQ(store->get("k", in_ms(kPatienceMs)), "v");
}

TEST(TcpStore, ServesEveryInterfaceAndBothFamilies) {
  const auto server = StoreServer::listen("", 0, false, "secret");
  connect_store("127.0.0.1", server->port(), "secret", in_ms(kPatienceMs))->set("k", "v");
  SocketAddress loopback;
  parse_address("::1", 0, &loopback);
  if (!listen_on(loopback)) GTEST_SKIP() << "this host has no IPv6";
  EXPECT_EQ(connect_store("::1", server->port(), "secret", in_ms(kPatienceMs))->get("k", in_ms(kPatienceMs)), "v");
}

TEST(TcpStore, WrongSecretIsNamedAtOnce) {
  const auto server = serve();
  const int64_t begin = now_ns();
  const Error error = error_of([&] { client_of(*server, "wrong"); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_TRUE(contains(error, "secret")) << error.what();
  EXPECT_TRUE(contains(error, "127.0.0.1:" + std::to_string(server->port()))) << error.what();
  EXPECT_LT(now_ns() - begin, kPatienceMs / 2 * kMillisecond) << "it was tried again";
  client_of(*server)->set("k", "v");
}

// The client must not hand its keys to somebody who only listens on the port.
TEST(TcpStore, ServerThatCannotProveTheSecretIsRefused) {
  SocketAddress any;
  parse_address("127.0.0.1", 0, &any);
  const Socket listener = listen_on(any);
  std::thread impostor([&] {
    pollfd entry{listener.fd(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(kPatienceMs));
    const Socket victim = accept_one(listener.fd());
    std::string lines;
    put_u32(&lines, kMagic);
    put_u32(&lines, kFormat);
    lines += version_field(this_version()) + std::string(kNonceSize, 'n');
    put_u32(&lines, 1);
    lines += std::string(kProofSize, 'p');
    send_some(victim.fd(), lines.data(), lines.size());
    // Until the victim has received it and hangs up.
    char answer[256];
    for (ssize_t n = 0; n >= 0; n = recv_some(victim.fd(), answer, sizeof answer)) {
      pollfd talk{victim.fd(), POLLIN, 0};
      ::poll(&talk, 1, static_cast<int>(kPatienceMs));
    }
  });
  const Error error =
      error_of([&] { connect_store("127.0.0.1", local_address(listener.fd()).port(), "s", in_ms(kPatienceMs)); });
  impostor.join();
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_TRUE(contains(error, "could not prove")) << error.what();
}

TEST(TcpStore, NobodyThereIsAnErrorThatNamesTheAddress) {
  const QuietPort quiet;
  const int port = quiet.number();
  const Error error = error_of([&] { connect_store("127.0.0.1", port, "secret", in_ms(300)); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_TRUE(contains(error, "127.0.0.1:" + std::to_string(port))) << error.what();
  const Error stopped =
      error_of([&] { connect_store("127.0.0.1", port, "s", in_ms(kPatienceMs), [] { return true; }); });
  EXPECT_EQ(stopped.kind(), ErrorKind::kAborted);
  const Error unknown = error_of([&] { connect_store("no-such-host.invalid", port, "s", in_ms(100)); });
  EXPECT_TRUE(contains(unknown, "no-such-host.invalid")) << unknown.what();
}

TEST(StoreServer, TakenPortIsNamedOrTheNextOneTaken) {
  const auto first = serve();
  const Error error = error_of([&] { StoreServer::listen("127.0.0.1", first->port(), false, "secret"); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_TRUE(contains(error, "port " + std::to_string(first->port()) + " is taken")) << error.what();
  EXPECT_TRUE(contains(error, "PERSEUS_MASTER_PORT")) << error.what();
  const auto second = StoreServer::listen("127.0.0.1", first->port(), true, "secret");
  EXPECT_GT(second->port(), first->port());
  EXPECT_LE(second->port(), first->port() + 100);
  client_of(*second)->set("k", "second");
  client_of(*first)->set("k", "first");
  EXPECT_EQ(client_of(*second)->get("k", in_ms(kPatienceMs)), "second");
}

TEST(StoreServer, EndsAtOnceAndItsWaitersLearnOfIt) {
  auto server = serve();
  const auto store = client_of(*server);
  std::atomic<bool> waits{false};
  std::thread waiter([&] {
    const Error error = error_of([&] { store->get("never", in_ms(kPatienceMs), [&] { return waits = true, false; }); });
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_TRUE(contains(error, "gone")) << error.what();
    EXPECT_TRUE(contains(error, "never")) << error.what();
  });
  while (!waits) std::this_thread::yield();
  const int64_t begin = now_ns();
  server.reset();
  EXPECT_LT(now_ns() - begin, kPatienceMs / 2 * kMillisecond) << "it waits for its client";
  waiter.join();
  EXPECT_EQ(error_of([&] { store->set("k", "v"); }).kind(), ErrorKind::kIo);
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
  EXPECT_LE(received.size(), kGreetingSize + kVerdictSize);
  store->set("k", "v");
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
  client_of(*server)->set("k", "v");
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
  client_of(*server)->set("k", "v");
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  ::close(hold[1]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (const int fd : {tell[0], tell[1], hold[0]}) ::close(fd);
}

TEST(StoreServer, AnEmptySecretIsRefused) {
  const Error server = error_of([] { serve(""); });
  EXPECT_EQ(server.kind(), ErrorKind::kInvalidArgument);
  EXPECT_TRUE(contains(server, "a store server with an empty secret would serve anybody")) << server.what();
  const auto good = serve();
  const Error client = error_of([&] { client_of(*good, ""); });
  EXPECT_EQ(client.kind(), ErrorKind::kInvalidArgument);
  EXPECT_TRUE(contains(client, "an empty secret proves nothing")) << client.what();
  EXPECT_TRUE(contains(client, "127.0.0.1:" + std::to_string(good->port()))) << client.what();
}

// Sizes that lie after a valid proof cost the liar its connection and nobody else anything.
TEST(StoreServer, ImpossibleSizesCloseTheConnection) {
  const auto server = serve();
  const auto store = client_of(*server);
  const auto frame = [](uint32_t size, uint32_t op, uint32_t key_size, const std::string& rest) {
    std::string bytes;
    put_u32(&bytes, size);
    put_u32(&bytes, op);
    put_u32(&bytes, key_size);
    return bytes + rest;
  };
  const std::string bad[] = {
      frame(0xffffffff, kSet, 1, "k"),
      frame(4, kSet, 1, "k"),
      frame(9, kSet, 2, "k"),
      frame(9, 77, 1, "k"),
      frame(9, kSet, 0xffffffff, "k"),
      frame(8, kGet, 0, ""),
      frame(8 + kMaxKey + 1, kGet, kMaxKey + 1, std::string(kMaxKey + 1, 'k')),
      frame(9, kGet, 1, "z") + frame(9, kGet, 1, "z"),
  };
  for (const std::string& bytes : bad) {
    RawPeer peer(server->port());
    bool closed = false;
    const std::string greeting = peer.receive(&closed, kGreetingSize);
    ASSERT_EQ(greeting.size(), kGreetingSize);
    const std::string nonce(kNonceSize, 'c');
    const Digest proof =
        prove("secret", {kClientLabel, format_text(), greeting.substr(kGreetingSize - kNonceSize), nonce});
    peer.say(nonce + std::string(reinterpret_cast<const char*>(proof.data()), proof.size()));
    EXPECT_EQ(peer.receive(&closed, kVerdictSize).size(), kVerdictSize);
    ASSERT_FALSE(closed);
    peer.say(bytes);
    peer.receive(&closed);
    EXPECT_TRUE(closed) << "request " << &bytes - bad;
  }
  store->set("k", "v");
  EXPECT_EQ(store->get("k", in_ms(kPatienceMs)), "v");
}

// A DataLoader worker must neither keep the port alive nor hang when it destroys what it inherited.
TEST(StoreServer, ForkedChildHoldsNoneOfIt) {
  auto server = serve();
  const int port = server->port();
  int hold[2], ready[2];
  ASSERT_EQ(::pipe(hold), 0);
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  char byte = 0;
  if (child == 0) {
    server.reset();
    ::close(hold[1]);
    if (::write(ready[1], &byte, 1) != 1) _exit(2);
    _exit(::read(hold[0], &byte, 1) == 0 ? 0 : 1);  // lives until the parent closes its end
  }
  ::close(hold[0]);
  // fork() returns here before the child has run far enough to let go.
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::close(ready[0]);
  ::close(ready[1]);
  client_of(*server)->set("k", "v");
  server.reset();
  EXPECT_NO_THROW(StoreServer::listen("127.0.0.1", port, false, "secret"));
  ::close(hold[1]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace perseus
