// Messages over played links: the same bytes arrive in the same order, whether a link lends windows or carries a stream
// of bytes, and wherever it cuts that stream.
#include "transport/messages.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <string>

#include "base/error.h"
#include "kernels/crc32c.h"
#include "net/auth.h"
#include "values.h"

namespace {

using namespace perseus;
using perseus_test::Bytes;
using perseus_test::mix;

constexpr size_t kHeaderBytes = 13;
const Digest kKey = sha256("key", 3);

Byte byte_of(uint64_t seed, size_t index) { return static_cast<Byte>(mix(seed * 1000003 + index) >> 17); }

Bytes bytes_of(uint64_t seed, size_t count) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = byte_of(seed, i);
  return bytes;
}

// A link to itself that remembers all that was sent.
class PlayedLink : public Link {
 public:
  MessageCheck* outgoing_check() override { return outgoing.get(); }
  MessageCheck* incoming_check() override { return incoming.get(); }
  std::string peer_text() const override { return "rank 7 (10.0.0.7:4711)"; }
  // What these bytes, the next header or message, are on the wire.
  Bytes checked(Bytes bytes) {
    uint64_t behind = 0;
    if (kind == Kind::kChecksum) behind = perseus::kernels::crc32c(0, bytes.data(), bytes.size());
    if (kind == Kind::kCode) {
      const uint64_t head[2] = {number_++, bytes.size()};
      SipHash hash(kKey);
      hash.add(head, sizeof head);
      hash.add(bytes.data(), bytes.size());
      behind = hash.finish();
    }
    for (size_t i = 0; i < check_bytes(); ++i) bytes.push_back(static_cast<Byte>(behind >> 8 * i));
    return bytes;
  }
  size_t check_bytes() const { return kind == Kind::kNone ? 0 : kind == Kind::kChecksum ? 4 : 8; }

  enum class Kind { kNone, kChecksum, kCode };
  void add_checks(Kind of) {
    kind = of;
    const auto make = [of]() -> std::unique_ptr<MessageCheck> {
      if (of == Kind::kChecksum) return std::make_unique<Checksum>();
      return std::make_unique<AuthenticationCode>(kKey);
    };
    outgoing = make(), incoming = make();
  }

  Bytes wire;
  Kind kind = Kind::kNone;

 private:
  std::unique_ptr<MessageCheck> outgoing, incoming;
  uint64_t number_ = 0;
};

void append(Bytes* bytes, const Bytes& more) { bytes->insert(bytes->end(), more.begin(), more.end()); }

// Has room for so many messages at once.
class Windows final : public PlayedLink {
 public:
  explicit Windows(size_t room) : room_(room) {}

  bool has_windows() const override { return true; }
  Span send_window(size_t n) override {
    if (messages_.size() >= room_) return {};
    next_.resize(n);
    return {next_.data(), n};
  }
  void send_commit(size_t n) override {
    ASSERT_EQ(n, next_.size()) << "asked for another room than it fills";
    wire.insert(wire.end(), next_.begin(), next_.end());
    messages_.push_back(std::move(next_));
    next_ = {};
  }
  ConstSpan recv_window(size_t n) override {
    if (messages_.empty()) return {};
    EXPECT_EQ(n, messages_.front().size()) << "asked for another message than was sent";
    return {messages_.front().data(), n};
  }
  void recv_release(size_t n) override {
    ASSERT_FALSE(messages_.empty());
    EXPECT_EQ(n, messages_.front().size());
    messages_.pop_front();
  }
  size_t try_send(const iovec*, int) override { return ADD_FAILURE() << "not for links with windows", 0; }
  size_t try_recv(const iovec*, int) override { return ADD_FAILURE() << "not for links with windows", 0; }

 private:
  const size_t room_;
  Bytes next_;
  std::deque<Bytes> messages_;
};

// Takes and gives at most as many bytes a call as `cut` says.
class Stream final : public PlayedLink {
 public:
  explicit Stream(std::function<size_t()> cut) : cut_(std::move(cut)) {}

  bool has_windows() const override { return false; }
  size_t try_send(const iovec* pieces, int count) override {
    return move(pieces, count, cut_(), [&](Byte* data, size_t n) { wire.insert(wire.end(), data, data + n); });
  }
  size_t try_recv(const iovec* pieces, int count) override {
    return move(pieces, count, std::min(cut_(), wire.size() - taken_), [&](Byte* data, size_t n) {
      std::copy_n(wire.begin() + static_cast<ptrdiff_t>(taken_), n, data);
      taken_ += n;
    });
  }
  ConstSpan recv_window(size_t n) override {
    return wire.size() - taken_ < n ? ConstSpan{} : ConstSpan{wire.data() + taken_, n};
  }
  void recv_release(size_t n) override { taken_ += n; }
  Span send_window(size_t) override { return ADD_FAILURE() << "not for streams", Span{}; }
  void send_commit(size_t) override { ADD_FAILURE() << "not for streams"; }

 private:
  template <class Part>
  static size_t move(const iovec* pieces, int count, size_t most, const Part& part) {
    size_t moved = 0;
    for (int i = 0; i < count && moved < most; ++i) {
      const size_t n = std::min(pieces[i].iov_len, most - moved);
      part(static_cast<Byte*>(pieces[i].iov_base), n);
      moved += n;
    }
    return moved;
  }

  const std::function<size_t()> cut_;
  size_t taken_ = 0;
};

// Pieces whose sizes come from `sizes` again and again, all of them together `total` bytes. The in side holds the bytes
// of `seed`, the out side those of seed + 1.
class Scattered {
 public:
  Scattered(uint64_t seed, size_t total, const std::vector<size_t>& sizes)
      : in_(bytes_of(seed, total)), out_(bytes_of(seed + 1, total)) {
    for (size_t i = 0, at = 0; at < total; ++i) {
      const size_t n = std::min(sizes[i % sizes.size()], total - at);
      pieces_.push_back({in_.data() + at, out_.data() + at, n});
      at += n;
    }
  }
  Cursor begin() const { return Cursor(pieces_, 0); }
  const Bytes& in() const { return in_; }
  const Bytes& out() const { return out_; }

 private:
  Bytes in_, out_;
  std::vector<Piece> pieces_;
};

struct Path {
  std::string name;
  std::function<std::unique_ptr<PlayedLink>()> make;
};

Path windows(size_t room) {
  return {"windows_" + std::to_string(room), [room] { return std::make_unique<Windows>(room); }};
}
Path stream(size_t cut) {
  return {"stream_" + std::to_string(cut), [cut] { return std::make_unique<Stream>([cut] { return cut; }); }};
}
// Cuts of any size, none among them.
Path uneven_stream(unsigned seed) {
  return {"uneven_stream_" + std::to_string(seed), [seed] {
            auto random = std::make_shared<std::mt19937>(seed);
            return std::make_unique<Stream>([random]() -> size_t {
              const unsigned kind = (*random)() % 4;
              return kind == 0 ? 0 : (*random)() % (kind == 1 ? 3 : kind == 2 ? 200 : 100'000);
            });
          }};
}

Path checked(const Path& path, PlayedLink::Kind kind) {
  const char* what = kind == PlayedLink::Kind::kChecksum ? "_with_checksums" : "_with_codes";
  return {path.name + what, [make = path.make, kind] {
            auto link = make();
            link->add_checks(kind);
            return link;
          }};
}
Path summed(const Path& path) { return checked(path, PlayedLink::Kind::kChecksum); }
Path coded(const Path& path) { return checked(path, PlayedLink::Kind::kCode); }

const std::vector<Path> kPaths = {windows(1),
                                  windows(3),
                                  stream(1),
                                  stream(7),
                                  stream(13),
                                  stream(64),
                                  stream(4099),
                                  stream(1'000'000),
                                  uneven_stream(1),
                                  uneven_stream(2),
                                  summed(stream(1)),
                                  summed(stream(7)),
                                  summed(stream(4099)),
                                  summed(stream(1'000'000)),
                                  summed(uneven_stream(1)),
                                  summed(uneven_stream(2)),
                                  coded(stream(1)),
                                  coded(stream(11)),
                                  coded(stream(4099)),
                                  coded(stream(1'000'000)),
                                  coded(uneven_stream(1)),
                                  coded(uneven_stream(2))};

class Messages : public testing::TestWithParam<size_t> {
 protected:
  std::unique_ptr<PlayedLink> link() const { return kPaths[GetParam()].make(); }
};

// Odd sizes, of messages and of the pieces that they are read from and written to. The many small pieces are more than
// one call gathers.
const std::vector<size_t> kMessages = {1, 7, 4096, 65, kChunkBytes, 2, 999, 63};
const std::vector<size_t> kFrom = {5, 1, 0, 300, 2, 17, 1, 1, 40'000, 3}, kTo = {11, 2, 2, 0, 777, 1, 30'001};

size_t total_of(const std::vector<size_t>& sizes) {
  size_t total = 0;
  for (const size_t size : sizes) total += size;
  return total;
}

// Both ends make one call each in turns, so that neither is far ahead.
TEST_P(Messages, ArriveWholeAndInOrderBehindTheirHeader) {
  const size_t total = total_of(kMessages);
  for (const bool from_in : {true, false}) {
    const auto link = this->link();
    const Bytes header = bytes_of(3, kHeaderBytes);
    const Scattered source(5, total, kFrom), target(8, total, kTo);
    MessageSender sender(link.get());
    MessageReceiver receiver(link.get());
    Cursor from = source.begin(), to = target.begin();
    sender.start(header.data(), header.size());
    receiver.start();
    Bytes taken(kHeaderBytes);
    bool headed = false;
    size_t sent = 0, received = 0;
    for (int call = 0; received < kMessages.size(); ++call) {
      ASSERT_LT(call, 1'000'000) << sent << " messages sent, " << received << " received";
      if (sent < kMessages.size()) {
        const size_t before = link->wire.size();
        const Moved moved = sender.send(kMessages[sent], &from, from_in);
        ASSERT_EQ(moved == Moved::kNothing, link->wire.size() == before) << "message " << sent;
        if (moved == Moved::kAll) ++sent;
        EXPECT_TRUE(sent == 0 || sender.header_gone());
      }
      if (!headed) {
        headed = receiver.take_header(taken.data(), kHeaderBytes);
        EXPECT_TRUE(headed || link->wire.size() < header.size() + link->check_bytes());
      } else if (receiver.receive(kMessages[received], &to, false) == Moved::kAll) {
        ++received;
      }
      ASSERT_LE(received, sent);
    }
    EXPECT_EQ(taken, header);
    EXPECT_TRUE(target.out() == (from_in ? source.in() : source.out()));
    EXPECT_TRUE(target.in() == bytes_of(8, total)) << "the in side of the target is only read";
    Bytes expected = link->checked(header);
    for (size_t i = 0, at = 0; i < kMessages.size(); at += kMessages[i++]) {
      const auto message = target.out().begin() + static_cast<ptrdiff_t>(at);
      append(&expected, link->checked(Bytes(message, message + static_cast<ptrdiff_t>(kMessages[i]))));
    }
    EXPECT_TRUE(link->wire == expected) << "the wire does not depend on the cuts";
  }
}

TEST_P(Messages, AreReadWhereTheLinkHoldsThem) {
  const auto link = this->link();
  const Scattered source(21, total_of(kMessages), kFrom);
  MessageSender sender(link.get());
  MessageReceiver receiver(link.get());
  Cursor from = source.begin();
  sender.start(nullptr, 0);
  size_t at = 0;
  for (const size_t n : kMessages) {
    for (int call = 0; sender.send(n, &from, true) != Moved::kAll; ++call) {
      EXPECT_FALSE(receiver.whole(n)) << "before all of it is there";
      ASSERT_LT(call, 1'000'000);
    }
    const ConstSpan whole = receiver.whole(n);
    ASSERT_TRUE(whole);
    EXPECT_TRUE(std::equal(whole.data, whole.data + n, source.in().begin() + static_cast<ptrdiff_t>(at)));
    EXPECT_EQ(receiver.whole(n).data, whole.data) << "until it is released";
    receiver.release(n);
    EXPECT_FALSE(receiver.whole(1));
    at += n;
  }
}

TEST_P(Messages, AHeaderTravelsAlone) {
  const auto link = this->link();
  MessageSender sender(link.get());
  MessageReceiver receiver(link.get());
  Cursor nothing;
  for (uint64_t turn = 0; turn < 3; ++turn) {
    const Bytes header = bytes_of(turn, kHeaderBytes);
    Bytes taken(kHeaderBytes);
    sender.start(header.data(), header.size());
    for (int call = 0; !sender.header_gone(); ++call) {
      EXPECT_FALSE(receiver.take_header(taken.data(), kHeaderBytes)) << "before all of it is there";
      const Moved moved = sender.send(0, &nothing, true);
      EXPECT_EQ(moved == Moved::kAll, sender.header_gone());
      ASSERT_LT(call, 1000);
    }
    EXPECT_EQ(sender.send(0, &nothing, true), Moved::kNothing);
    ASSERT_TRUE(receiver.take_header(taken.data(), kHeaderBytes));
    EXPECT_EQ(taken, header);
    EXPECT_FALSE(receiver.take_header(taken.data(), kHeaderBytes)) << "it is taken once";
  }
  EXPECT_EQ(link->wire.size(), 3 * (kHeaderBytes + link->check_bytes()));
}

TEST_P(Messages, ADroppedHeaderDoesNotGo) {
  const auto link = this->link();
  if (link->kind == PlayedLink::Kind::kCode) return;  // its receiver would miss one
  const Scattered source(31, 100, {3, 41}), target(33, 100, {7});
  MessageSender sender(link.get());
  MessageReceiver receiver(link.get());
  const Bytes header = bytes_of(3, kHeaderBytes);
  sender.start(header.data(), header.size());
  EXPECT_FALSE(sender.header_gone());
  sender.drop_header();
  EXPECT_TRUE(sender.header_gone());
  Cursor from = source.begin(), to = target.begin();
  EXPECT_EQ(sender.send(0, &from, true), Moved::kNothing);
  for (int call = 0; sender.send(100, &from, true) != Moved::kAll; ++call) ASSERT_LT(call, 1000);
  for (int call = 0; receiver.receive(100, &to, true) != Moved::kAll; ++call) ASSERT_LT(call, 1000);
  EXPECT_TRUE(link->wire == link->checked(source.in()));
  EXPECT_TRUE(target.out() == source.in());
}

// A sender and a receiver that start again, as the next exchange over the same link does.
TEST_P(Messages, OfTheNextExchangeFollowThoseOfTheLast) {
  const auto link = this->link();
  MessageSender sender(link.get());
  MessageReceiver receiver(link.get());
  Bytes expected;
  for (uint64_t turn = 0; turn < 4; ++turn) {
    const size_t n = 50 + 77 * turn;
    const Scattered source(40 + 2 * turn, n, {turn + 1, 19}), target(60 + 2 * turn, n, {23, turn + 2});
    const Bytes header = bytes_of(turn, turn + 1);
    Bytes taken(header.size());
    Cursor from = source.begin(), to = target.begin();
    sender.start(header.data(), header.size());
    receiver.start();
    bool headed = false;
    Moved sent = Moved::kNothing, received = Moved::kNothing;
    for (int call = 0; received != Moved::kAll; ++call) {
      ASSERT_LT(call, 10'000);
      if (sent != Moved::kAll) sent = sender.send(n, &from, false);
      if (!headed) headed = receiver.take_header(taken.data(), taken.size());
      else received = receiver.receive(n, &to, false);
    }
    EXPECT_EQ(taken, header);
    EXPECT_TRUE(target.out() == source.out()) << "exchange " << turn;
    append(&expected, link->checked(header));
    append(&expected, link->checked(source.out()));
  }
  EXPECT_TRUE(link->wire == expected);
}

TEST(MessagesInWindows, WaitForRoomAndMoveNothingMeanwhile) {
  Windows link(1);
  const Scattered source(71, 20, {3}), target(73, 20, {6});
  const Bytes header = bytes_of(9, kHeaderBytes);
  MessageSender sender(&link);
  MessageReceiver receiver(&link);
  Cursor from = source.begin(), to = target.begin();
  sender.start(header.data(), header.size());
  EXPECT_EQ(sender.send(20, &from, true), Moved::kSome) << "the header, for which there is room";
  EXPECT_TRUE(sender.header_gone());
  EXPECT_EQ(sender.send(20, &from, true), Moved::kNothing);
  EXPECT_EQ(from.in(), source.in().data());
  Bytes taken(kHeaderBytes);
  ASSERT_TRUE(receiver.take_header(taken.data(), kHeaderBytes));
  EXPECT_EQ(receiver.receive(20, &to, false), Moved::kNothing);
  EXPECT_EQ(sender.send(20, &from, true), Moved::kAll);
  EXPECT_EQ(receiver.receive(20, &to, false), Moved::kAll);
  EXPECT_TRUE(target.out() == source.in());
}

TEST(MessagesInWindows, AreComposedInPlace) {
  Windows link(2);
  MessageSender sender(&link);
  MessageReceiver receiver(&link);
  ASSERT_TRUE(sender.composes_in_place());
  for (uint64_t i = 0; i < 2; ++i) {
    const Span room = sender.room(10 + i);
    ASSERT_TRUE(room);
    for (size_t k = 0; k < 10 + i; ++k) room.data[k] = byte_of(i, k);
    sender.commit(10 + i);
  }
  EXPECT_FALSE(sender.room(1));
  for (uint64_t i = 0; i < 2; ++i) {
    const ConstSpan whole = receiver.whole(10 + i);
    ASSERT_TRUE(whole);
    EXPECT_EQ(Bytes(whole.data, whole.data + 10 + i), bytes_of(i, 10 + i));
    receiver.release(10 + i);
  }
  EXPECT_TRUE(sender.room(1));
}

TEST(MessagesInAStream, LeaveWithTheirHeaderInOneCall) {
  Stream link([] { return size_t{1} << 20; });
  const Scattered source(81, 100, {60, 40});
  const Bytes header = bytes_of(9, kHeaderBytes);
  MessageSender sender(&link);
  EXPECT_FALSE(sender.composes_in_place());
  Cursor from = source.begin();
  sender.start(header.data(), header.size());
  EXPECT_EQ(sender.send(100, &from, true), Moved::kAll);
  EXPECT_EQ(link.wire.size(), kHeaderBytes + 100);
}

TEST(MessagesInAStream, AreFewerOnTheWayToEachPeerTheMorePeersThereAre) {
  Windows windows(1);
  Stream stream([] { return size_t{1}; });
  for (const size_t peers : {0, 1, 2, 3, 4, 100}) {
    const uint64_t together = MessageSender(&stream).depth(peers) * peers;
    EXPECT_LE(together, std::max<uint64_t>(8, 2 * peers)) << "one queue takes what all peers send to one rank";
    EXPECT_GE(MessageSender(&stream).depth(peers), 2u) << "one in flight and one to follow";
    EXPECT_EQ(MessageSender(&windows).depth(peers), 2u);
  }
}

// Whatever bit of a header, of a message or of what follows them changes on the way.
void expect_error_for_every_change(PlayedLink::Kind kind, const std::function<bool(const std::string&, size_t)>& says) {
  constexpr size_t kBytes = 300;
  const Bytes header = bytes_of(9, kHeaderBytes);
  const size_t behind = kind == PlayedLink::Kind::kChecksum ? 4 : 8;
  const size_t head = kHeaderBytes + behind, all = head + kBytes + behind;
  for (size_t place = 0; place < all; ++place) {
    for (const bool at_once : {false, true}) {
      size_t cut = at_once ? all : 11;
      Stream link([&] { return cut; });
      link.add_checks(kind);
      const Scattered source(91, kBytes, {60, 41}), target(93, kBytes, {17, 100});
      MessageSender sender(&link);
      MessageReceiver receiver(&link);
      Cursor from = source.begin(), to = target.begin();
      sender.start(header.data(), header.size());
      receiver.start();
      while (sender.send(kBytes, &from, true) != Moved::kAll) {
      }
      ASSERT_EQ(link.wire.size(), all);
      link.wire[place] ^= static_cast<Byte>(1 << place % 8);
      Bytes taken(kHeaderBytes);
      try {
        ASSERT_TRUE(receiver.take_header(taken.data(), kHeaderBytes));
        EXPECT_GE(place, head) << "the header has changed";
        if (place % 2 == 0) receiver.whole(kBytes);
        else
          while (receiver.receive(kBytes, &to, false) != Moved::kAll) {
          }
        ADD_FAILURE() << "byte " << place << " has changed";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kIo);
        EXPECT_TRUE(says(error.what(), place < head ? kHeaderBytes : kBytes)) << error.what();
      }
    }
  }
}

TEST(MessagesWithChecksums, AreAnErrorWhereTheWireHasChangedThem) {
  expect_error_for_every_change(PlayedLink::Kind::kChecksum, [](const std::string& text, size_t size) {
    const std::string all =
        "[tcp] " + std::to_string(size) + " bytes of rank 7 (10.0.0.7:4711) have changed on their way";
    return text.rfind(all, 0) == 0;
  });
}

TEST(MessagesWithCodes, AreAnErrorWhereTheWireHasChangedThem) {
  expect_error_for_every_change(PlayedLink::Kind::kCode, [](const std::string& text, size_t size) {
    const std::string all = "[tcp] from rank 7 (10.0.0.7:4711) came a message of " + std::to_string(size) +
                            " bytes with a wrong authentication code";
    return text.rfind(all, 0) == 0;
  });
}

// A stranger can do so without changing a byte of any message.
TEST(MessagesWithCodes, AreAnErrorWhereTheyAreRepeatedLeftOutSwappedOrCutDifferently) {
  constexpr size_t kBytes = 40, kAll = kBytes + 8;
  const std::vector<std::vector<size_t>> orders = {{0, 0}, {1}, {1, 0}};
  for (size_t i = 0; i <= orders.size(); ++i) {
    Stream link([] { return size_t{1} << 20; });
    link.add_checks(PlayedLink::Kind::kCode);
    const Scattered source(97, 2 * kBytes, {13}), target(99, 2 * kBytes, {13});
    MessageSender sender(&link);
    MessageReceiver receiver(&link);
    Cursor from = source.begin(), to = target.begin();
    sender.start(nullptr, 0);
    receiver.start();
    for (int sent = 0; sent < 2; ++sent) ASSERT_EQ(sender.send(kBytes, &from, true), Moved::kAll);
    const Bytes all = link.wire;
    const auto receive_all = [&](size_t size, size_t times) {
      for (size_t k = 0; k < times; ++k) receiver.receive(size, &to, false);
    };
    if (i == orders.size()) {
      EXPECT_THROW(receive_all(kBytes - 1, 1), Error) << "the size counts";
      continue;
    }
    link.wire.clear();
    for (const size_t message : orders[i])
      link.wire.insert(link.wire.end(), all.begin() + static_cast<ptrdiff_t>(message * kAll),
                       all.begin() + static_cast<ptrdiff_t>((message + 1) * kAll));
    EXPECT_THROW(receive_all(kBytes, orders[i].size()), Error) << "order " << i;
  }
}

TEST(MessagesWithChecksums, ThatNobodyLooksAtAreSkipped) {
  Stream link([] { return size_t{1} << 20; });
  link.add_checks(PlayedLink::Kind::kChecksum);
  const Scattered source(95, 150, {60});
  MessageSender sender(&link);
  MessageReceiver receiver(&link);
  Cursor from = source.begin();
  sender.start(nullptr, 0);
  ASSERT_EQ(sender.send(100, &from, true), Moved::kAll);
  link.wire[3] ^= 1;
  EXPECT_EQ(receiver.unverified(100).size, 100U);
  EXPECT_THROW(receiver.whole(100), Error);
  EXPECT_TRUE(receiver.skip(100));
  EXPECT_FALSE(receiver.skip(50));
  ASSERT_EQ(sender.send(50, &from, true), Moved::kAll);
  EXPECT_TRUE(receiver.whole(50));
}

INSTANTIATE_TEST_SUITE_P(Links, Messages, testing::Range(size_t{0}, kPaths.size()),
                         [](const auto& info) { return kPaths[info.param].name; });

}  // namespace
