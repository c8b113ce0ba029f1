// What a link for sends and receives does with what no Perseus says: an error that names the rank and the message, and
// nothing written where it does not belong.
#include "point_to_point/peer_link.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/clock.h"
#include "base/error.h"
#include "net/waker.h"
#include "point_to_point/point_to_point.h"
#include "world.h"

namespace {

using namespace perseus;

World world_of(int rank) {
  World world;
  world.rank = rank;
  world.size = 2;
  world.epoch = 7;
  return world;
}

// Rank 0's link to rank 1, of which the test writes what it says byte by byte.
class Played : private PeerLink::Listener {
 public:
  Played() : link_(1, &ours_->link(1, kPointToPointChannel), 7, listener()) {}

  Entry* send(size_t bytes) {
    entries_.push_back(std::make_unique<Entry>());
    Entry& entry = *entries_.back();
    entry.bytes = bytes;
    memory_.push_back(std::vector<Byte>(bytes + 1, 0xa5));  // the last byte is a guard
    entry.buffers.push_back({memory_.back().data(), memory_.back().data()});
    link_.announce(&entry);
    return &entry;
  }
  void receive_next(size_t bytes) { room_ = bytes; }
  // As the other rank does, and this one hears of it. False where the ring is full.
  bool say(const PointToPointHeader& header, const std::vector<Byte>& bytes = {}) {
    Link& link = theirs_->link(0, kPointToPointChannel);
    const Span window = link.send_window(sizeof header);
    if (!window) return false;
    std::memcpy(window.data, &header, sizeof header);
    link.send_commit(sizeof header);
    if (!bytes.empty()) {
      const Span behind = link.send_window(bytes.size());
      if (!behind) return false;
      std::memcpy(behind.data, bytes.data(), bytes.size());
      link.send_commit(bytes.size());
    }
    link_.step(now_ns(), true);
    return true;
  }
  PeerLink& link() { return link_; }
  int announced = 0, moved = 0, refused = 0, byes = 0;
  bool guards_are_whole() const {
    for (const auto& memory : memory_)
      if (memory.back() != 0xa5) return false;
    return true;
  }

 private:
  PeerLink::Listener* listener() { return this; }
  void on_announced(PeerLink& from, const Announcement& message) override {
    ++announced;
    if (message.whole && message.data) from.hold(message.data.size);
    if (message.whole || room_ != message.bytes) return;
    entries_.push_back(std::make_unique<Entry>());
    entries_.back()->bytes = room_;
    memory_.push_back(std::vector<Byte>(room_ + 1, 0xa5));
    entries_.back()->buffers.push_back({nullptr, memory_.back().data()});
    from.receive(message.id, entries_.back().get());
  }
  void on_accepted(Entry*) override {}
  void on_refused(PeerLink&, Entry*, uint64_t) override { ++refused; }
  void on_moved(Entry*) override { ++moved; }
  void on_bye(PeerLink&, const std::vector<Entry*>&) override { ++byes; }

  std::shared_ptr<MemFabric> fabric_ = make_mem_fabric(2);
  Waker waker_, other_waker_;
  std::unique_ptr<Transport> ours_ = connect_mem(world_of(0), fabric_, waker_);
  std::unique_ptr<Transport> theirs_ = connect_mem(world_of(1), fabric_, other_waker_);
  std::vector<std::unique_ptr<Entry>> entries_;
  std::deque<std::vector<Byte>> memory_;
  size_t room_ = SIZE_MAX;
  PeerLink link_;
};

PointToPointHeader header(PointToPointType type, uint64_t id, uint64_t bytes = 0, uint32_t length = 0) {
  PointToPointHeader header;
  header.magic = 0x50503250;
  header.epoch = 7;
  header.type = type;
  header.id = id;
  header.bytes = bytes;
  header.length = length;
  return header;
}

void expect_nonsense(Played& played, const PointToPointHeader& said, const std::string& why,
                     const std::vector<Byte>& bytes = {}) {
  try {
    played.say(said, bytes);
    ADD_FAILURE() << "no error: " << why;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_EQ(std::string(error.what()).find("[p2p] rank 1 sent " + why + " (type "), 0u) << error.what();
  }
}

TEST(PeerLink, CountsNoTimeBeforeItWasMade) {
  Played played;
  played.send(100);
  played.link().check_progress(now_ns(), 0, 300 * kSecond);
}

TEST(PointToPoint, ASendToARankThatHasLeftFailsAtOnce) {
  const auto fabric = make_mem_fabric(2);
  Waker waker;
  const auto transport = connect_mem(world_of(0), fabric, waker);
  const World world = world_of(0);
  int links = 0;
  PointToPoint messages(
      world, [&](int peer) -> Link& { return ++links, transport->link(peer, kPointToPointChannel); }, [](int) {},
      [](int peer) { return "rank " + std::to_string(peer) + " has left"; });
  Entry before, after;
  for (Entry* send : {&before, &after}) {
    send->description.kind = Kind::kSend;
    send->description.root = 1;
  }
  ASSERT_TRUE(messages.submit(&before));
  messages.on_left(1);
  messages.step(now_ns(), true);
  ASSERT_EQ(messages.ended().size(), 1u);
  EXPECT_EQ(messages.ended()[0].first, &before);
  EXPECT_EQ(messages.ended()[0].second.message, "rank 1 has left");
  EXPECT_EQ(links, 0);
  // As the last pass of this rank takes over what was submitted meanwhile.
  ASSERT_TRUE(messages.submit(&after));
  messages.close("this rank ends");
  ASSERT_EQ(messages.ended().size(), 2u);
  EXPECT_EQ(messages.ended()[1].second.message, "rank 1 has left");
  EXPECT_FALSE(messages.moving());
}

TEST(PeerLink, TakesNoAnswerToWhatItDidNotAsk) {
  for (const PointToPointType type : {PointToPointType::kGo, PointToPointType::kRefuse}) {
    Played played;
    expect_nonsense(played, header(type, 1), "an answer to a message that does not wait for one");
    Played twice;
    twice.send(100);
    twice.say(header(type, 1));
    EXPECT_EQ(twice.moved + twice.refused, 1);
    expect_nonsense(twice, header(type, 1), "an answer to a message that does not wait for one");
  }
}

TEST(PeerLink, TakesNoPieceThatWasNotToCome) {
  Played unasked;
  expect_nonsense(unasked, header(PointToPointType::kPiece, 1, 0, 8), "a piece of a message that was not to go");
  for (const uint32_t length : {0u, 100'001u, static_cast<uint32_t>(kMaxMessage) + 1, UINT32_MAX}) {
    Played played;
    played.receive_next(100'000);
    played.say(header(PointToPointType::kAnnounce, 1, 100'000));
    expect_nonsense(played, header(PointToPointType::kPiece, 1, 0, length), "a piece larger than what is left");
    EXPECT_TRUE(played.guards_are_whole());
  }
}

TEST(PeerLink, TakesNoAnnouncementThatItCannotKeep) {
  Played skipped;
  expect_nonsense(skipped, header(PointToPointType::kAnnounce, 2, 10), "an announcement out of order");
  Played large, partly, negative;
  expect_nonsense(large, header(PointToPointType::kAnnounce, 1, kMostEager + 1, kMostEager + 1),
                  "an announcement with a part of its message");
  expect_nonsense(partly, header(PointToPointType::kAnnounce, 1, 10, 9), "an announcement with a part of its message");
  PointToPointHeader tagged = header(PointToPointType::kAnnounce, 1);
  tagged.tag = -1;
  expect_nonsense(negative, tagged, "an announcement out of order");
  Played many;
  constexpr uint64_t kFit = kMostHeld / kMostEager;
  for (uint64_t id = 1; id <= kFit; ++id)
    many.say(header(PointToPointType::kAnnounce, id, kMostEager, kMostEager), std::vector<Byte>(kMostEager));
  EXPECT_EQ(many.link().held(), kMostHeld);
  expect_nonsense(many, header(PointToPointType::kAnnounce, kFit + 1, 1, 1),
                  "more than may come along with announcements", {1});
}

TEST(PeerLink, TakesNoHeaderOfAnotherKind) {
  PointToPointHeader foreign = header(PointToPointType::kBye, 0), older = foreign, unknown = foreign, longer = foreign;
  foreign.magic ^= 1;
  older.epoch = 6;
  unknown.type = static_cast<PointToPointType>(6);
  longer.length = 1;
  Played a, b, c, d;
  expect_nonsense(a, foreign, "not the header of a message");
  expect_nonsense(b, older, "not the header of a message");
  expect_nonsense(c, unknown, "a message of an unknown type");
  expect_nonsense(d, longer, "a header with bytes behind it");
}

TEST(PeerLink, SurvivesWhateverComes) {
  std::mt19937_64 random(3);
  for (int turn = 0; turn < (perseus_test::thin_grid() ? 500 : 2000); ++turn) {
    Played played;
    played.receive_next(5000);
    for (const size_t bytes : {10, 5000, 300'000}) played.send(bytes);
    uint64_t announced = 0;
    try {
      for (int i = 0; i < 12; ++i) {
        const auto type = static_cast<PointToPointType>(1 + random() % 5);
        const bool announces = type == PointToPointType::kAnnounce;
        const uint32_t length =
            announces || type != PointToPointType::kPiece ? 0 : static_cast<uint32_t>(random() % 6000);
        const uint64_t bytes = announces && random() % 2 == 0 ? 5000 : random() % 9000;
        const uint64_t id = announces ? ++announced : random() % 5;
        if (!played.say(header(type, id, bytes, length), std::vector<Byte>(length, 1))) break;
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kIo) << error.what();
    }
    EXPECT_TRUE(played.guards_are_whole());
  }
}

}  // namespace
