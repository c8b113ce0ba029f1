// Ranks of different versions of Perseus: one clear error on every rank, at once.
#include "base/version.h"

#include <poll.h>

#include <cctype>
#include <set>

#include "api/context.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/little_endian.h"
#include "bootstrap/store.h"
#include "bootstrap/store_protocol.h"
#include "net/socket.h"
#include "world.h"

namespace perseus {
namespace {

using perseus_test::Barrier;

struct Told {
  ErrorKind kind = ErrorKind::kInternal;
  std::string text;
  int64_t after_ns = 0;
};

// One rank for each of these settings and versions; what each is told instead of coming into a world. In memory, or
// through a server that ends with rank 0.
std::vector<Told> start(bool in_memory, const std::vector<std::pair<std::string, std::string>>& ranks) {
  const std::string name = perseus_test::unique_name();
  auto server = StoreServer::listen("127.0.0.1", 0, false, "secret");
  const int port = server->port();
  std::vector<Told> told(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      ContextOptions options;
      options.world.rank = static_cast<int>(i);
      options.world.size = static_cast<int>(ranks.size());
      options.world.secret = "secret";
      options.world.version = ranks[i].first;
      options.overrides = {"HOROVOD_START_TIMEOUT=600", ranks[i].second};
      if (in_memory) options.memory_world = name;
      options.store_host = "127.0.0.1";
      options.store_port = port;
      const int64_t begin = now_ns();
      try {
        Context context(options);
      } catch (const Error& error) {
        told[i] = {error.kind(), error.what(), now_ns() - begin};
      }
      if (i == 0) server.reset();
    });
  for (std::thread& thread : threads) thread.join();
  return told;
}

class Mismatch : public testing::TestWithParam<bool> {};

TEST_P(Mismatch, OfVersionsIsToldToEveryRankWithBothVersionsAndRanks) {
  const std::string mine = this_version(), theirs = "0.0.9+0123456789ab", same = "PERSEUS_LOG_LEVEL=error";
  const std::vector<Told> told = start(GetParam(), {{mine, same}, {mine, same}, {theirs, same}, {mine, same}});
  const auto text = [](int a, const std::string& version, int b, const std::string& other) {
    return "[context] rank " + std::to_string(a) + " runs Perseus " + version + ", rank " + std::to_string(b) +
           " runs Perseus " + other + ": install the same Perseus on every host";
  };
  for (const int rank : {0, 1, 3}) EXPECT_EQ(told[rank].text, text(rank, mine, 2, theirs));
  // Rank 2 compares entries as they come, and names the first one.
  const std::set<std::string> possible = {text(2, theirs, 0, mine), text(2, theirs, 1, mine), text(2, theirs, 3, mine)};
  EXPECT_EQ(possible.count(told[2].text), 1u) << told[2].text;
  for (const Told& each : told) {
    EXPECT_EQ(each.kind, ErrorKind::kInvalidArgument);
    EXPECT_LT(each.after_ns, 60 * kSecond) << "it waited for the start timeout";
  }
}

TEST_P(Mismatch, OfReleasesWithTheSameSourcesIsOneToo) {
  const std::vector<Told> told = start(GetParam(), {{"0.1.0+0123456789ab", ""}, {"0.2.0+0123456789ab", ""}});
  for (const Told& each : told) {
    EXPECT_NE(each.text.find("0.1.0+0123456789ab"), std::string::npos) << each.text;
    EXPECT_NE(each.text.find("0.2.0+0123456789ab"), std::string::npos) << each.text;
  }
}

TEST_P(Mismatch, OfSettingsIsToldToEveryRankAlthoughTheStoreEndsWithRankZero) {
  const std::string version = this_version();
  const std::vector<Told> told = start(GetParam(), {{version, "PERSEUS_ALLREDUCE_DTYPE=1"},
                                                    {version, "PERSEUS_ALLREDUCE_DTYPE=1"},
                                                    {version, "PERSEUS_ALLREDUCE_DTYPE=2"}});
  for (size_t rank = 0; rank < told.size(); ++rank)
    EXPECT_NE(told[rank].text.find("are configured differently: PERSEUS_ALLREDUCE_DTYPE="), std::string::npos)
        << rank << ": " << told[rank].text;
}

INSTANTIATE_TEST_SUITE_P(Stores, Mismatch, testing::Bool(),
                         [](const auto& info) { return info.param ? "memory" : "tcp"; });

TEST(Version, IsTheReleaseAndAHash) {
  const std::string release = perseus_version(), version = this_version();
  ASSERT_EQ(version.size(), release.size() + 1 + 12) << version;
  EXPECT_EQ(version.substr(0, release.size() + 1), release + "+");
  for (const char digit : version.substr(release.size() + 1)) EXPECT_TRUE(std::isxdigit(digit)) << version;
}

// What a client says to a server that greets like this.
std::string error_at(const std::string& greeting) {
  SocketAddress any;
  parse_address("127.0.0.1", 0, &any);
  const Socket listener = listen_on(any);
  std::thread server([&] {
    pollfd entry{listener.fd(), POLLIN, 0};
    ::poll(&entry, 1, -1);
    const Socket client = accept_one(listener.fd());
    send_some(client.fd(), greeting.data(), greeting.size());
    pollfd talk{client.fd(), POLLIN, 0};
    ::poll(&talk, 1, -1);  // until the client has gone
  });
  std::string text = "no error";
  try {
    connect_store("127.0.0.1", local_address(listener.fd()).port(), "secret", now_ns() + 300 * kSecond);
  } catch (const Error& error) {
    text = error.what();
  }
  server.join();
  return text;
}

TEST(Version, OfAStoreThatIsNotUnderstoodIsNamed) {
  std::string newer, oldest;
  for (std::string* greeting : {&newer, &oldest}) put_u32(greeting, store_protocol::kMagic);
  put_u32(&newer, store_protocol::kFormat + 1);
  newer += version_field("7.0.0+0123456789ab");  // and anything behind it
  const std::string text = error_at(newer);
  EXPECT_NE(text.find("runs Perseus 7.0.0+0123456789ab, this rank Perseus " + this_version()), std::string::npos)
      << text;
  // Format 1 had no version there.
  put_u32(&oldest, 1);
  oldest += std::string(32, '\x81');
  const std::string other = error_at(oldest);
  EXPECT_NE(other.find("runs Perseus of an unknown version, this rank Perseus " + this_version()), std::string::npos)
      << other;
}

// Whoever changes one of these numbers gives the store's grammar another number: store_protocol.h says why.
TEST(Version, TheStoresFormatHasItsNumber) {
  using namespace store_protocol;
  EXPECT_EQ(kFormat, 5u);
  EXPECT_EQ(kMagic, 0x54535350u);
  EXPECT_EQ(kOpeningHead, 40u);
  EXPECT_EQ(kOpeningSize, 88u);
  EXPECT_EQ(kProofSize, 32u);
  EXPECT_EQ(kRequestHeader, 8u);
  EXPECT_EQ(kCode, 8u);
  EXPECT_EQ(kSet, 1u);
  EXPECT_EQ(kGet, 2u);
}

}  // namespace
}  // namespace perseus
