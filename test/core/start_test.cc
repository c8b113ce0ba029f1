// How many requests the start of a world makes of the store: a number for each rank, not for each pair.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "bootstrap/store.h"
#include "perseus/perseus.h"

namespace perseus {
namespace {

// Starts `size` ranks as threads over one server, and returns how many requests they have made of it.
uint64_t requests_of_start(int size, const char* transport) {
  const std::string secret = "secret of a test", choice = std::string("PERSEUS_TRANSPORT=") + transport;
  const auto server = StoreServer::listen("127.0.0.1", 0, false, secret);
  const char* overrides[] = {choice.c_str(), "PERSEUS_GLOO_NETWORK_INTERFACE=lo", nullptr};
  std::vector<perseus_context*> contexts(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      perseus_context_options o{};
      o.struct_size = sizeof o;
      o.rank = rank;
      o.size = size;
      o.store_host = "127.0.0.1";
      o.store_port = server->port();
      o.secret = secret.data();
      o.secret_size = secret.size();
      o.overrides = overrides;
      EXPECT_EQ(perseus_context_create(&o, &contexts[static_cast<size_t>(rank)]), PERSEUS_OK)
          << "rank " << rank << ": " << perseus_error_message();
    });
  for (std::thread& thread : threads) thread.join();
  const uint64_t requests = server->requests();
  for (size_t rank = 0; rank < contexts.size(); ++rank) {
    const char* peer = perseus_context_transport(contexts[rank], rank == 0 ? 1 : 0);
    EXPECT_STREQ(peer, transport) << "rank " << rank;
  }
  threads.clear();
  for (perseus_context* context : contexts) threads.emplace_back([context] { perseus_context_destroy(context); });
  for (std::thread& thread : threads) thread.join();
  return requests;
}

class Start : public testing::TestWithParam<int> {};

// Every rank says and asks: who it is, where it listens, that it is ready. Rank 0 asks nobody where to connect to, and
// alone asks who has left, which all others say.
TEST_P(Start, OverTcpMakesSevenRequestsForEachRank) {
  EXPECT_EQ(requests_of_start(GetParam(), "tcp"), 7u * GetParam() - 1);
}

// In addition, who has connected; the highest rank waits for nobody there.
TEST_P(Start, InSharedMemoryMakesNineRequestsForEachRank) {
  EXPECT_EQ(requests_of_start(GetParam(), "shm"), 9u * GetParam() - 1);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Start, testing::Values(2, 5, 16), testing::PrintToStringParamName());

}  // namespace
}  // namespace perseus
