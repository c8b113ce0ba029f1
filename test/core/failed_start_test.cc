// Starts that fail: what the rank that fails says, what the others are told, and that neither takes too long.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <functional>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/little_endian.h"
#include "bootstrap/store_protocol.h"
#include "perseus/perseus.h"
#include "store_support.h"

namespace {

using namespace perseus::store_protocol;

// What happens to the calling thread, which is a rank.
struct Events {
  std::function<void(uint32_t op)> on_request;  // of the store, before it is sent
  std::function<void(uint32_t op)> on_reply;    // when its first bytes are here
  std::function<void()> on_connect;
  uint32_t asked = 0;    // the last request's op
  int64_t paused_s = 0;  // by which its clock is ahead
};
thread_local Events* events = nullptr;

uint32_t op_of(const void* data, size_t size) {
  return size < 4 + kRequestHeader ? 0 : perseus::get_u32(static_cast<const char*>(data) + 4);
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// The linker prefers these to libc's.
extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const long result = syscall(SYS_clock_gettime, clock, time);
  if (result == 0 && events != nullptr) time->tv_sec += events->paused_s;
  return static_cast<int>(result);
}
int connect(int fd, const sockaddr* address, socklen_t size) {
  if (events != nullptr && events->on_connect) events->on_connect();
  return next<int(int, const sockaddr*, socklen_t)>("connect")(fd, address, size);
}
ssize_t send(int fd, const void* data, size_t size, int flags) {
  if (events != nullptr) events->asked = op_of(data, size);
  if (events != nullptr && events->on_request) events->on_request(events->asked);
  return next<ssize_t(int, const void*, size_t, int)>("send")(fd, data, size, flags);
}
ssize_t recv(int fd, void* data, size_t size, int flags) {
  const ssize_t received = next<ssize_t(int, void*, size_t, int)>("recv")(fd, data, size, flags);
  if (events != nullptr && events->on_reply && received > 0) events->on_reply(events->asked);
  return received;
}

}  // extern "C"

namespace perseus {
namespace {

constexpr char kSecret[] = "secret";
constexpr char kOverTcp[] = "PERSEUS_TRANSPORT=tcp", kLoopback[] = "PERSEUS_GLOO_NETWORK_INTERFACE=lo";
constexpr char kWrongInterface[] = "PERSEUS_GLOO_NETWORK_INTERFACE=nope0";
constexpr char kLongStart[] = "HOROVOD_START_TIMEOUT=200";

struct Rank {
  int rank, size, port;
  std::vector<std::string> settings;
  std::function<bool()> interrupted = [] { return false; };
};

// The context is destroyed where there is one; what came of it is perseus_error_message().
perseus_code start(const Rank& rank) {
  std::vector<const char*> overrides;
  for (const std::string& text : rank.settings) overrides.push_back(text.c_str());
  overrides.push_back(nullptr);
  perseus_context_options o{};
  o.struct_size = sizeof o;
  o.rank = rank.rank;
  o.size = rank.size;
  o.store_host = "127.0.0.1";
  o.store_port = rank.port;
  o.secret = kSecret;
  o.secret_size = sizeof kSecret - 1;
  o.overrides = overrides.data();
  o.interrupted = [](void* ask) -> int { return (*static_cast<std::function<bool()>*>(ask))(); };
  std::function<bool()> interrupted = rank.interrupted;
  o.interrupted_arg = &interrupted;
  perseus_context* context = nullptr;
  const perseus_code code = perseus_context_create(&o, &context);
  perseus_context_destroy(context);
  return code;
}

// The same on a thread of its own with what happens to it.
perseus_code start(const Rank& rank, Events its, std::string* message) {
  perseus_code code = PERSEUS_OK;
  std::thread thread([&] {
    events = &its;
    code = start(rank);
    *message = perseus_error_message();
    events = nullptr;
  });
  thread.join();
  return code;
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// What is wrong there is right on other hosts.
class WrongOnOneRank : public testing::TestWithParam<const char*> {};

TEST_P(WrongOnOneRank, IsToldToTheOthersAtOnce) {
  const auto server = serve();
  std::string why;
  std::thread other([&] {
    EXPECT_EQ(start({1, 2, server->port(), {kOverTcp, GetParam()}}), PERSEUS_INVALID_ARGUMENT);
    why = perseus_error_message();
  });
  EXPECT_NE(start({0, 2, server->port(), {kOverTcp, kLoopback, kLongStart}}), PERSEUS_OK);
  const std::string told = perseus_error_message();
  other.join();
  EXPECT_NE(why, "");
  expect_part(told, "rank 1 has given up this start");
  expect_part(told, why);
}

INSTANTIATE_TEST_SUITE_P(Settings, WrongOnOneRank,
                         testing::Values(kWrongInterface, "PERSEUS_TUNER_REPLAY=/nonexistent/log"));

// Whoever reads later that another rank's setting is wrong still says of its own what is to be changed.
TEST(WrongOnAllRanks, IsSaidByEachOfItsOwn) {
  const auto server = serve();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      Events its;
      // Rank 0 reads the entries only when rank 1 has ended.
      its.on_request = [&, rank](uint32_t op) {
        if (rank == 0 && op == kGetAll)
          static_cast<void>(client_of(*server)->get("rank 1 has ended", in_ms(kPatienceMs)));
      };
      events = &its;
      EXPECT_EQ(start({rank, 2, server->port(), {kOverTcp, kWrongInterface}}), PERSEUS_INVALID_ARGUMENT)
          << perseus_error_message();
      expect_part(perseus_error_message(), "PERSEUS_GLOO_NETWORK_INTERFACE names 'nope0'");
      events = nullptr;
      if (rank == 1) client_of(*server)->set("rank 1 has ended", "", in_ms(kPatienceMs));
    });
  for (std::thread& rank : ranks) rank.join();
}

// As where its host hangs.
TEST(StoppedStore, EndsAStartLittleLaterThanItsDeadline) {
  const StoppableServer server;
  Events its;
  its.on_reply = [](uint32_t op) {
    if (op == kGetPresent) events->paused_s = 700;
  };
  bool stopped = false;
  its.on_request = [&](uint32_t op) {
    if (op == kSet && !std::exchange(stopped, true)) server.stop();
  };
  std::string message;
  const int64_t begin = now_ns();
  EXPECT_EQ(start({1, 2, server.port(), {"HOROVOD_START_TIMEOUT=600"}}, its, &message), PERSEUS_TIMEOUT) << message;
  EXPECT_LT(now_ns() - begin, 45 * kSecond);
  expect_part(message, "the store server at 127.0.0.1:" + std::to_string(server.port()) + " did not answer in time");
}

TEST(StoppedStore, DoesNotKeepAStartFromBeingInterrupted) {
  const StoppableServer server;
  Events its;
  bool stopped = false;
  its.on_request = [&](uint32_t op) {
    if (op == kSet && !std::exchange(stopped, true)) server.stop();
  };
  std::string message;
  const auto interrupted = [&] { return stopped; };
  EXPECT_EQ(start({1, 2, server.port(), {kLongStart}, interrupted}, its, &message), PERSEUS_ABORTED) << message;
}

TEST(LateRank, DoesNotSayThatOthersAreMissing) {
  const StoppableServer server;
  server.client()->set("world/0/rank/1", "of a rank that is there", in_ms(kPatienceMs));
  Events its;
  its.on_reply = [](uint32_t op) {
    if (op == kGetPresent) events->paused_s = 700;
  };
  its.on_request = [&](uint32_t op) {
    // The store is a little slower than a rank can wait that has no time left, and very slow where keys may be missing.
    if (op == kSet || op == kGetAll) server.stop();
    if (op == kGetAll) events->on_connect = [&] { server.go_on(); };
  };
  const auto slow = [&] { return server.go_on(), false; };
  std::string message;
  EXPECT_EQ(start({0, 2, server.port(), {"HOROVOD_START_TIMEOUT=600"}, slow}, its, &message), PERSEUS_TIMEOUT)
      << message;
  EXPECT_EQ(message.find("did not appear"), std::string::npos) << message;
  expect_part(message,
              "[rendezvous] all 2 ranks have appeared, but rank 0 learnt of it only after its 600 s "
              "(HOROVOD_START_TIMEOUT)");
}

TEST(LateRank, DoesNotCountItselfAmongThoseThatAreMissing) {
  const StoppableServer server;
  Events its;
  its.on_reply = [](uint32_t op) {
    if (op == kGetPresent) events->paused_s = 700;
  };
  its.on_request = [&](uint32_t op) {
    if (op == kGetAll) server.stop();
  };
  std::string message;
  EXPECT_EQ(start({0, 2, server.port(), {"HOROVOD_START_TIMEOUT=600"}}, its, &message), PERSEUS_TIMEOUT) << message;
  expect_part(message, "[rendezvous] rank 1 of 2 did not appear within 600 s (HOROVOD_START_TIMEOUT); [rendezvous] ");
  expect_part(message, "127.0.0.1:" + std::to_string(server.port()));
}

TEST(OutOfMemory, IsToldToTheOthers) {
  const auto server = serve();
  // While it waits for the others, which is its third request.
  const auto fails = [&] { return server->requests() < 3 ? false : throw std::bad_alloc(); };
  EXPECT_EQ(start({1, 2, server->port(), {}, fails}), PERSEUS_INTERNAL);
  EXPECT_STREQ(perseus_error_message(), "[api] out of memory");
  EXPECT_EQ(start({0, 2, server->port(), {kLongStart}}), PERSEUS_ABORTED);
  EXPECT_STREQ(perseus_error_message(),
               "[rendezvous] rank 1 has given up this start (world 0): [context] out of memory");
}

}  // namespace
}  // namespace perseus
