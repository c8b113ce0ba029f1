// What a rank's TCP port endures from people who do not belong to the job.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "net/socket.h"
#include "tcp_ranks.h"
#include "transport/tcp_endpoint.h"
#include "transport/tcp_protocol.h"

namespace perseus {
namespace {

// Says whatever the test wants to a rank's port.
class Intruder {
 public:
  explicit Intruder(Store& store, int rank = 0) {
    const TcpEndpoint endpoint =
        TcpEndpoint::decode(store.get("job/7/tcp/" + std::to_string(rank), now_ns() + kLimit), 0);
    socket_ = start_connect(endpoint.addresses[0].address);
    pollfd entry{socket_.fd(), POLLOUT, 0};
    ::poll(&entry, 1, static_cast<int>(kLimit / kMillisecond));
  }
  void say(const std::string& bytes) { send_some(socket_.fd(), bytes.data(), bytes.size()); }
  // Up to n bytes; "" and closed() when the other side hangs up.
  std::string receive(size_t n) {
    std::string received;
    const int64_t deadline = now_ns() + kLimit;
    while (received.size() < n && now_ns() < deadline && !closed_) {
      char buffer[256];
      const ssize_t got = recv_some(socket_.fd(), buffer, std::min(sizeof buffer, n - received.size()));
      closed_ = got < 0;
      if (got > 0) received.append(buffer, static_cast<size_t>(got));
      pollfd entry{socket_.fd(), POLLIN, 0};
      if (got == 0) ::poll(&entry, 1, 50);
    }
    return received;
  }
  bool closed() const { return closed_; }

 private:
  Socket socket_;
  bool closed_ = false;
};

// What this rank would say on such a connection, with a nonce that proves nothing.
Opening opening_by(int rank, uint32_t epoch, uint32_t magic = tcp_protocol::kMagic) {
  World world;
  world.rank = rank;
  world.epoch = epoch;
  Opening opening = tcp_protocol::opening_of(world, magic);
  opening.nonce = std::string(kNonceSize, 'n');
  return opening;
}

// While rank 1 has not come yet, intruders try to be rank 1; afterwards they try to own its channels.
TEST(Tcp, PendingConnectionsAreClosedAndDisturbNobody) {
  const auto store = make_memory_store();
  std::atomic<bool> connected{false}, tried{false}, finished{false};
  std::thread zero([&] {
    Rank self(world_of(0, 2), *store);
    connected = true;
    Conversation talk(0, *self.transport, 1, {0, 0}, 5'000'003);
    self.drive([&] { return talk.step(), talk.done() && finished; });
    EXPECT_TRUE(talk.exact());
  });
  {
    Intruder garbage(*store), old_epoch(*store), wrong_secret(*store), wrong_rank(*store), early_data(*store);
    Intruder wrong_version(*store);
    garbage.say(std::string(5000, 'x'));
    EXPECT_EQ(garbage.receive(1), "");
    EXPECT_TRUE(garbage.closed());
    old_epoch.say(opening_by(1, 6).encode());
    EXPECT_EQ(old_epoch.receive(1), "");
    EXPECT_TRUE(old_epoch.closed());
    for (const int rank : {0, 2, 0x7fffffff}) {
      Intruder impossible(*store);
      impossible.say(opening_by(rank, 7).encode());
      EXPECT_EQ(impossible.receive(1), "") << rank;
      EXPECT_TRUE(impossible.closed());
    }
    std::string other_version = opening_by(1, 7).encode();
    other_version[8] = 2;
    wrong_version.say(other_version);
    EXPECT_EQ(wrong_version.receive(1), "");
    EXPECT_TRUE(wrong_version.closed());
    // A perfect opening and the wrong secret.
    Handshake liar(Handshake::Side::kConnector, "another", "job", opening_by(1, 7));
    wrong_secret.say(liar.open());
    const std::string challenge = wrong_secret.receive(kOpeningSize);
    ASSERT_EQ(challenge.size(), kOpeningSize);
    wrong_secret.say(liar.feed(challenge.data(), challenge.size()));
    EXPECT_EQ(wrong_secret.receive(kProofSize + 1), std::string(kProofSize, '\0'));
    EXPECT_TRUE(wrong_secret.closed());
    early_data.say(opening_by(1, 7, tcp_protocol::kDataMagic).encode());
    EXPECT_EQ(early_data.receive(1), "");
    EXPECT_TRUE(early_data.closed());
  }
  // These stay, silent or slow, while the real rank 1 joins and works.
  std::vector<Intruder> silent;
  for (int i = 0; i < 20; ++i) silent.emplace_back(*store);
  for (Intruder& loris : silent) loris.say("P");
  std::thread one([&] {
    Rank self(world_of(1, 2), *store);
    Conversation talk(1, *self.transport, 0, {0, 0}, 5'000'003);
    self.drive([&] {
      talk.step();
      return talk.done() && tried;
    });
    EXPECT_TRUE(talk.exact());
    finished = true;
    PeerEvent event;
    self.drive([&] { return self.transport->next_event(&event); });
    EXPECT_EQ(event.kind, PeerEvent::Kind::kGone);
  });
  while (!connected) std::this_thread::yield();
  Intruder second(*store), thief(*store);
  second.say(opening_by(1, 7).encode());
  EXPECT_EQ(second.receive(1), "");
  EXPECT_TRUE(second.closed());
  Opening data = opening_by(1, 7, tcp_protocol::kDataMagic);
  data.channel = Channel{3, 3}.key();
  thief.say(data.encode());
  EXPECT_EQ(thief.receive(1), "");
  EXPECT_TRUE(thief.closed());
  for (Intruder& loris : silent) {
    loris.receive(1);
    EXPECT_TRUE(loris.closed()) << "slow connection " << &loris - silent.data() << " was kept";
  }
  tried = true;
  zero.join();
  one.join();
}

}  // namespace
}  // namespace perseus
