// How many requests the start of a world makes of the store: a number for each rank, not for each pair.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/store.h"
#include "perseus/perseus.h"

namespace perseus {
namespace {

const std::string kSecret = "secret of a test";

// Fails the test where the rank cannot start.
perseus_context* create(const StoreServer& server, int rank, int size, uint32_t epoch, const char* transport) {
  const std::string choice = std::string("PERSEUS_TRANSPORT=") + transport;
  const char* overrides[] = {choice.c_str(), "PERSEUS_GLOO_NETWORK_INTERFACE=lo", nullptr};
  perseus_context_options o{};
  o.struct_size = sizeof o;
  o.rank = rank;
  o.size = size;
  o.epoch = epoch;
  o.store_host = "127.0.0.1";
  o.store_port = server.port();
  o.secret = kSecret.data();
  o.secret_size = kSecret.size();
  o.overrides = overrides;
  perseus_context* context = nullptr;
  EXPECT_EQ(perseus_context_create(&o, &context), PERSEUS_OK) << "rank " << rank << ": " << perseus_error_message();
  return context;
}

void on_ranks(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Starts `size` ranks as threads over one server, and returns how many requests they have made of it.
uint64_t requests_of_start(int size, const char* transport) {
  const auto server = StoreServer::listen("127.0.0.1", 0, false, kSecret);
  std::vector<perseus_context*> contexts(static_cast<size_t>(size));
  on_ranks(size, [&](int rank) { contexts[static_cast<size_t>(rank)] = create(*server, rank, size, 0, transport); });
  const uint64_t requests = server->requests();
  on_ranks(size, [&](int rank) {
    perseus_context* context = contexts[static_cast<size_t>(rank)];
    if (context == nullptr) return;
    EXPECT_STREQ(perseus_context_transport(context, rank == 0 ? 1 : 0), transport) << "rank " << rank;
  });
  on_ranks(size, [&](int rank) { perseus_context_destroy(contexts[static_cast<size_t>(rank)]); });
  return requests;
}

class Start : public testing::TestWithParam<int> {};

// Every rank asks whether an earlier program has begun this world, and says and asks: who it is, where it listens, that
// it is ready. Rank 0 asks nobody where to connect to, and alone asks who has left, which all others say.
TEST_P(Start, OverTcpMakesEightRequestsForEachRank) {
  EXPECT_EQ(requests_of_start(GetParam(), "tcp"), 8u * GetParam() - 1);
}

// In addition, who has connected; the highest rank waits for nobody there.
TEST_P(Start, InSharedMemoryMakesTenRequestsForEachRank) {
  EXPECT_EQ(requests_of_start(GetParam(), "shm"), 10u * GetParam() - 1);
}

// A rank is free to end when it knows that all others are connected; rank 0 still waits for some of them then.
TEST(Ends, RanksThatEndAtOnceDoNotFailTheOthers) {
  constexpr int kRanks = 32;
  const auto server = StoreServer::listen("127.0.0.1", 0, false, kSecret);
  for (uint32_t epoch = 0; epoch < 5; ++epoch)
    on_ranks(kRanks, [&](int rank) { perseus_context_destroy(create(*server, rank, kRanks, epoch, "shm")); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Start, testing::Values(2, 5, 16), testing::PrintToStringParamName());

}  // namespace
}  // namespace perseus
