// A store's server that finds no memory for a client loses that client and nothing else.
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "base/clock.h"
#include "bootstrap/store.h"
#include "bootstrap/store_protocol.h"
#include "net/socket.h"

namespace {

// Of threads other than the test's own: how many allocations until one fails; 0 = none fails.
std::atomic<int> until_failure{0};
thread_local bool is_test = false;

}  // namespace

// Not inlined: the compiler would see malloc's memory deleted.
[[gnu::noinline]] void* operator new(size_t size) {
  if (until_failure > 0 && !is_test && until_failure.fetch_sub(1) == 1) throw std::bad_alloc();
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace perseus {
namespace {

constexpr int kPatienceMs = 30'000;

// Until `fd` has something to read, or has been closed by the other end.
void await(int fd) {
  pollfd entry{fd, POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, kPatienceMs), 1);
}

TEST(StoreServer, ThatRunsOutOfMemoryServesOn) {
  is_test = true;
  const auto server = StoreServer::listen("127.0.0.1", 0, false, "secret");
  SocketAddress address;
  parse_address("127.0.0.1", server->port(), &address);
  std::vector<Socket> peers;
  int failures = 0;
  // One allocation after the other fails, until accepting a client takes no more of them.
  for (int nth = 1; failures == nth - 1; ++nth) {
    until_failure = nth;
    peers.push_back(start_connect(address));
    await(peers.back().fd());  // a greeting, or the end
    char byte;
    // The end of a peer that could not be accepted comes with or without a failure inside the greeting.
    if (until_failure == 0) ++failures;
    until_failure = 0;
    recv_some(peers.back().fd(), &byte, 1);
  }
  EXPECT_GE(failures, 5) << "an allocation for the client, its texts, and in each of the two tables";
  // When all that were accepted are late, the server looks through what the failures have left.
  for (const Socket& peer : peers) {
    char rest[256];
    ssize_t n = 0;
    while ((n = recv_some(peer.fd(), rest, sizeof rest)) >= 0)
      if (n == 0) await(peer.fd());
  }
  const auto store = connect_store("127.0.0.1", server->port(), "secret", now_ns() + kPatienceMs * kMillisecond);
  store->set("k", "v", now_ns() + kPatienceMs * kMillisecond);
  EXPECT_EQ(store->get("k", now_ns() + kPatienceMs * kMillisecond), "v");
}

}  // namespace
}  // namespace perseus
