// The Store contract over memory and TCP.
#include "bootstrap/store.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <numeric>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "bootstrap/store_protocol.h"
#include "net/socket.h"
#include "store_support.h"

namespace perseus {
namespace {

using namespace store_protocol;

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

void check_contract_of_many(Store& store) {
  using Missing = std::vector<int>;
  store.set("n/3", "three", in_ms(kPatienceMs));
  store.set("n/03", "not three", in_ms(kPatienceMs));
  store.set("n/3x", "not three", in_ms(kPatienceMs));
  store.set("m/12", "of another prefix", in_ms(kPatienceMs));
  store.set("n/12", std::string("t\0welve", 8), in_ms(kPatienceMs));
  Values values;
  EXPECT_EQ(store.get_all("n/", {3, 12}, in_ms(kPatienceMs), into(&values)), Missing());
  EXPECT_EQ(values, (Values{{3, "three"}, {12, std::string("t\0welve", 8)}}));
  values.clear();
  EXPECT_EQ(store.get_all("n/", {}, in_ms(kPatienceMs), into(&values)), Missing());
  EXPECT_EQ(values, Values());
  EXPECT_EQ(store.get_present("n/", {0, 3, 4, 12, 2147483647}, in_ms(kPatienceMs), into(&values)),
            (Missing{0, 4, 2147483647}));
  EXPECT_EQ(values, (Values{{3, "three"}, {12, std::string("t\0welve", 8)}}));

  // What is there by the deadline comes, and the others are named.
  values.clear();
  const int64_t begin = now_ns();
  EXPECT_EQ(store.get_all("n/", {0, 3, 4}, in_ms(250), into(&values)), (Missing{0, 4}));
  EXPECT_GE(now_ns() - begin, 240 * kMillisecond);
  EXPECT_EQ(values, (Values{{3, "three"}}));

  int asked = 0;
  const auto third = [&] { return ++asked == 3; };
  const Error stopped = error_of([&] {
    static_cast<void>(store.get_all("n/", {3, 12, 700}, in_ms(kPatienceMs), [](int, const std::string&) {}, third));
  });
  EXPECT_EQ(stopped.kind(), ErrorKind::kAborted);
  EXPECT_TRUE(contains(stopped, "'n/700'")) << stopped.what();
  EXPECT_EQ(asked, 3);

  for (const std::vector<int>& numbers : {Missing{2, 1}, Missing{1, 1}, Missing{-1, 0}})
    EXPECT_EQ(error_of([&] { static_cast<void>(store.get_all("n/", numbers, in_ms(10), into(&values))); }).kind(),
              ErrorKind::kInvalidArgument);

  // What on_value throws comes out, and the store serves on.
  const auto refuse = [](int number, const std::string&) { throw std::out_of_range(std::to_string(number)); };
  EXPECT_THROW(static_cast<void>(store.get_all("n/", {3, 12}, in_ms(kPatienceMs), refuse)), std::out_of_range);

  // Those that appear later come too, also when on_value sets them itself.
  values.clear();
  std::atomic<bool> waits{false};
  Missing missing{-1};
  std::thread waiter([&] {
    const auto take = [&](int number, const std::string& value) {
      into (&values)(number, value);
      if (number == 7) store.set("later/8", "by on_value", in_ms(kPatienceMs));
    };
    missing = store.get_all("later/", {7, 8, 1000}, in_ms(kPatienceMs), take, [&] { return waits = true, false; });
  });
  while (!waits) std::this_thread::yield();
  store.set("later/1000", "first", in_ms(kPatienceMs));
  store.set("later/7", "second", in_ms(kPatienceMs));
  waiter.join();
  EXPECT_EQ(missing, Missing());
  EXPECT_EQ(values, (Values{{7, "second"}, {8, "by on_value"}, {1000, "first"}}));
}

void check_contract(Store& store) {
  store.set("a", "one", in_ms(kPatienceMs));
  EXPECT_EQ(store.get("a", in_ms(kPatienceMs)), "one");
  store.set("a", std::string("t\0wo", 4), in_ms(kPatienceMs));
  EXPECT_EQ(store.get("a", in_ms(kPatienceMs)), std::string("t\0wo", 4));
  store.set("empty", "", in_ms(kPatienceMs));
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
  store.set("other", "x", in_ms(kPatienceMs));
  store.set("later", "now", in_ms(kPatienceMs));
  waiter.join();
  EXPECT_EQ(got, "now");
}

// Elastic jobs have many worlds. Until one has begun, ranks that come late are to learn why the ones before have not.
TEST(Store, OnceAWorldHasBegunTheServerForgetsThoseLongBefore) {
  const auto server = serve();
  const auto store = client_of(*server);
  const std::vector<std::string> others = {"world/",          "world/1",  "world/x/rank/0",
                                           "worlds/1/rank/0", "1/rank/0", "a/world/1/rank/0"};
  for (const std::string& key : others) store->set(key, "kept", in_ms(kPatienceMs));
  const auto has = [&](const std::string& key) {
    const size_t number = key.find_last_not_of("0123456789") + 1;
    if (number == key.size()) return store->get(key, in_ms(kPatienceMs)) == "kept";
    Values values;
    return store->get_present(key.substr(0, number), {std::stoi(key.substr(number))}, in_ms(kPatienceMs), into(&values))
        .empty();
  };
  const auto present = [&](int epoch) { return has("world/" + std::to_string(epoch) + "/rank/0"); };
  for (int epoch = 0; epoch < 12; ++epoch)
    store->set("world/" + std::to_string(epoch) + "/rank/0", "entry", in_ms(kPatienceMs));
  EXPECT_TRUE(present(0));
  store->set("world/1/left/1", "", in_ms(kPatienceMs));
  EXPECT_TRUE(present(0));
  store->set("world/10/left/1", "", in_ms(kPatienceMs));
  for (int epoch = 0; epoch < 12; ++epoch) EXPECT_EQ(present(epoch), epoch >= 3) << epoch;
  store->set("world/1/rank/0", "late", in_ms(kPatienceMs));
  store->set("world/9/left/1", "", in_ms(kPatienceMs));
  EXPECT_TRUE(present(1));
  EXPECT_TRUE(present(3));
  for (const std::string& key : others) EXPECT_TRUE(has(key)) << key;
  EXPECT_FALSE(has("world/1/left/1"));
}

TEST(MemoryStore, KeepsTheContract) { check_contract(*make_memory_store()); }
TEST(MemoryStore, KeepsTheContractOfManyKeys) { check_contract_of_many(*make_memory_store()); }

TEST(TcpStore, KeepsTheContract) {
  const auto server = serve();
  check_contract(*client_of(*server));
}

TEST(TcpStore, KeepsTheContractOfManyKeys) {
  const auto server = serve();
  check_contract_of_many(*client_of(*server));
}

TEST(TcpStore, ManyKeysTakeOneRequestHoweverTheyAppear) {
  const auto server = serve();
  const auto store = client_of(*server), other = client_of(*server);
  constexpr int kKeys = 100;
  std::vector<int> numbers(kKeys);
  std::iota(numbers.begin(), numbers.end(), 0);
  for (int number = 0; number < kKeys; number += 2)
    other->set("k/" + std::to_string(number), "early", in_ms(kPatienceMs));
  const uint64_t before = server->requests();
  std::atomic<int> got{0};
  std::thread waiter([&] {
    EXPECT_TRUE(store->get_all("k/", numbers, in_ms(kPatienceMs), [&](int, const std::string&) { ++got; }).empty());
  });
  while (got < kKeys / 2) std::this_thread::yield();  // those that are there come without the others
  for (int number = 1; number < kKeys; number += 2)
    other->set("k/" + std::to_string(number), "late", in_ms(kPatienceMs));
  waiter.join();
  EXPECT_EQ(got, kKeys);
  EXPECT_EQ(server->requests() - before, 1u + kKeys / 2);
}

TEST(TcpStore, ManyKeysMayHaveValuesOfAnySize) {
  const auto server = serve();
  const auto store = client_of(*server);
  std::vector<int> numbers;
  Values expected;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{65'535}, size_t{65'536}, size_t{65'537}, size_t{200'000},
                            kMaxValue, size_t{0}, size_t{5}}) {
    const int number = static_cast<int>(numbers.size());
    numbers.push_back(number);
    std::string& value = expected[number];
    value.resize(size);
    for (size_t i = 0; i < size; ++i) value[i] = static_cast<char>(i * 7 + (i >> 8) + static_cast<size_t>(number));
    store->set("size/" + std::to_string(number), value, in_ms(kPatienceMs));
  }
  Values values;
  EXPECT_TRUE(store->get_all("size/", numbers, in_ms(kPatienceMs), into(&values)).empty());
  EXPECT_TRUE(values == expected);
}

// An interruption counts, however many parts of an answer keep the client busy.
TEST(TcpStore, ManyKeysThatKeepAppearingCanBeInterrupted) {
  const auto server = serve();
  const auto store = client_of(*server), other = client_of(*server);
  std::vector<int> numbers(100'000);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::atomic<bool> stopped{false};
  std::thread setter([&] {
    for (size_t number = 0; number + 1 < numbers.size() && !stopped; ++number)
      other->set("k/" + std::to_string(number), "", in_ms(kPatienceMs));
  });
  const Error error = error_of([&] {
    static_cast<void>(
        store->get_all("k/", numbers, in_ms(kPatienceMs), [](int, const std::string&) {}, [] { return true; }));
  });
  stopped = true;
  setter.join();
  EXPECT_EQ(error.kind(), ErrorKind::kAborted);
  EXPECT_TRUE(contains(error, "'k/")) << error.what();
}

TEST(TcpStore, ManyClientsMeetThroughOneServer) {
  const auto server = serve();
  constexpr int kRanks = 16;
  std::atomic<int> right{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      const auto store = client_of(*server);
      store->set("rank/" + std::to_string(rank), std::string(rank * 1000 + 1, static_cast<char>('a' + rank)),
                 in_ms(kPatienceMs));
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
  store->set("big", value, in_ms(kPatienceMs));
  EXPECT_TRUE(store->get("big", in_ms(kPatienceMs)) == value);
  EXPECT_EQ(error_of([&] { store->set("bigger", value + "x", in_ms(kPatienceMs)); }).kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_of([&] { store->set(std::string(kMaxKey + 1, 'k'), "", in_ms(kPatienceMs)); }).kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_of([&] { store->get("", in_ms(10)); }).kind(), ErrorKind::kInvalidArgument);
  store->set(std::string(kMaxKey, 'k'), "long key", in_ms(kPatienceMs));
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
  store->set("k", "v", in_ms(kPatienceMs));
  EXPECT_EQ(store->get("k", in_ms(kPatienceMs)), "v");
}

TEST(TcpStore, ServesEveryInterfaceAndBothFamilies) {
  const auto server = StoreServer::listen("", 0, false, "secret");
  connect_store("127.0.0.1", server->port(), "secret", in_ms(kPatienceMs))->set("k", "v", in_ms(kPatienceMs));
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
  client_of(*server)->set("k", "v", in_ms(kPatienceMs));
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
    Opening ours = opening();
    ours.nonce = std::string(kNonceSize, 'n');
    const std::string lines = ours.encode() + std::string(kProofSize, 'p');
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
  client_of(*second)->set("k", "second", in_ms(kPatienceMs));
  client_of(*first)->set("k", "first", in_ms(kPatienceMs));
  EXPECT_EQ(client_of(*second)->get("k", in_ms(kPatienceMs)), "second");
}

// As when its host hangs. No key is missing then.
TEST(TcpStore, AServerThatDoesNotAnswerIsNamed) {
  const StoppableServer server;
  const auto store = server.client();
  const auto set = [&] { store->set("k", "v", in_ms(250)); };
  const auto look = [&] {
    static_cast<void>(store->get_present("n/", {1}, in_ms(250), [](int, const std::string&) {}));
  };
  for (const std::function<void()>& call : std::vector<std::function<void()>>{set, look}) {
    server.go_on();
    store->set("a connection", "is idle", in_ms(kPatienceMs));
    server.stop();
    const Error error = error_of(call);
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_TRUE(contains(
        error, "the store server at 127.0.0.1:" + std::to_string(server.port()) + " did not answer in time, key '"))
        << error.what();
  }
  server.go_on();
  store->set("a connection", "is idle", in_ms(kPatienceMs));
  server.stop();
  int asked = 0;
  const Error stopped = error_of([&] { store->set("k", "v", in_ms(kPatienceMs), [&] { return ++asked == 3; }); });
  EXPECT_EQ(stopped.kind(), ErrorKind::kAborted);
  EXPECT_EQ(asked, 3);
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
  EXPECT_EQ(error_of([&] { store->set("k", "v", in_ms(kPatienceMs)); }).kind(), ErrorKind::kIo);
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
  client_of(*server)->set("k", "v", in_ms(kPatienceMs));
  server.reset();
  EXPECT_NO_THROW(StoreServer::listen("127.0.0.1", port, false, "secret"));
  ::close(hold[1]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace perseus
