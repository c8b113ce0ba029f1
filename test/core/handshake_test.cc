// The handshake over bytes: who is let in, and the reason for which everybody else is not.
#include "net/handshake.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "net/auth.h"

namespace perseus {
namespace {

using Side = Handshake::Side;
using Kind = Refusal::Kind;

constexpr uint32_t kPurpose = 0x01020304, kOtherPurpose = 0x01020305;

Opening opening_of(int rank) { return Opening{kPurpose, 5, "1.2.3+0123456789ab", 7, rank, 0, ""}; }

struct Options {
  std::string secret = "the job's secret", job = "job";
  Opening ours;
  Versions versions = Versions::kSame;
  Handshake::Admit admit;
};

Options rank(int number) {
  Options options;
  options.ours = opening_of(number);
  return options;
}

std::unique_ptr<Handshake> make(Side side, const Options& o) {
  return std::make_unique<Handshake>(side, o.secret, o.job, o.ours, o.versions, o.admit);
}

std::string feed(Handshake& handshake, const std::string& bytes) { return handshake.feed(bytes.data(), bytes.size()); }

struct Pair {
  std::unique_ptr<Handshake> connector, listener;
};

// Rank 3 connects to rank 1; whatever both say reaches the other, until neither says anything more.
Pair shake(const Options& connects, const Options& listens, bool listener_opens = false) {
  Pair pair{make(Side::kConnector, connects), make(Side::kListener, listens)};
  std::string to_listener = listener_opens ? "" : pair.connector->open();
  std::string to_connector = listener_opens ? pair.listener->open() : "";
  while (!to_listener.empty() || !to_connector.empty()) {
    const std::string from_listener = std::move(to_connector), from_connector = std::move(to_listener);
    to_connector = from_connector.empty() ? "" : feed(*pair.listener, from_connector);
    to_listener = from_listener.empty() ? "" : feed(*pair.connector, from_listener);
  }
  return pair;
}

TEST(Handshake, ProvesBothSidesWhicheverOpens) {
  for (const bool listener_opens : {false, true}) {
    const Pair pair = shake(rank(3), rank(1), listener_opens);
    ASSERT_TRUE(pair.connector->proven()) << pair.connector->refusal().why;
    ASSERT_TRUE(pair.listener->proven()) << pair.listener->refusal().why;
    EXPECT_EQ(pair.connector->theirs().rank, 1);
    EXPECT_EQ(pair.listener->theirs().rank, 3);
    EXPECT_EQ(pair.connector->session(), pair.listener->session());
    EXPECT_EQ(pair.connector->wanted() + pair.listener->wanted(), 0u) << "what follows belongs to somebody else";
    EXPECT_NE(shake(rank(3), rank(1)).listener->session(), pair.listener->session());
  }
}

TEST(Handshake, EndsAlikeWhenEveryByteComesAlone) {
  const auto connector = make(Side::kConnector, rank(3)), listener = make(Side::kListener, rank(1));
  const auto one_by_one = [](Handshake& to, const std::string& bytes) {
    std::string reply;
    for (size_t i = 0; i < bytes.size(); ++i) {
      EXPECT_EQ(reply, "") << "a reply after byte " << i;
      EXPECT_EQ(to.wanted(), bytes.size() - i);
      reply += feed(to, bytes.substr(i, 1));
    }
    return reply;
  };
  const std::string challenge = one_by_one(*listener, connector->open());
  ASSERT_EQ(challenge.size(), kOpeningSize);
  const std::string answer = one_by_one(*connector, challenge);
  ASSERT_EQ(answer.size(), kProofSize);
  const std::string verdict = one_by_one(*listener, answer);
  EXPECT_TRUE(listener->proven());
  EXPECT_EQ(one_by_one(*connector, verdict), "");
  EXPECT_TRUE(connector->proven());
}

TEST(Handshake, AnotherSecretIsRefusedAndSaidSo) {
  Options outsider = rank(3);
  outsider.secret += "!";
  for (const bool listener_opens : {false, true}) {
    const Pair pair = shake(outsider, rank(1), listener_opens);
    EXPECT_EQ(pair.listener->refusal().kind, Kind::kSecret);
    EXPECT_EQ(pair.connector->refusal().kind, Kind::kSecret);
    EXPECT_NE(pair.listener->refusal().why.find("PERSEUS_SECRET_FILE"), std::string::npos);
  }
}

TEST(Handshake, AnotherJobIsRefusedThoughItsSecretIsTheSame) {
  Options outsider = rank(3);
  outsider.job = "another job";
  EXPECT_EQ(shake(outsider, rank(1)).listener->refusal().kind, Kind::kSecret);
}

struct Difference {
  const char* name;
  void (*make)(Opening*);
  Kind kind;
  const char* why;
};

class Differs : public testing::TestWithParam<Difference> {};

// Said by the one who hears it first, before anything is proven.
TEST_P(Differs, IsRefusedByTheSideThatHearsOfIt) {
  Options other = rank(3);
  GetParam().make(&other.ours);
  const Pair listened = shake(other, rank(1));
  EXPECT_EQ(listened.listener->refusal().kind, GetParam().kind);
  EXPECT_EQ(listened.listener->refusal().why, GetParam().why);
  EXPECT_FALSE(listened.connector->proven());
  const Pair connected = shake(rank(1), other, true);
  EXPECT_EQ(connected.connector->refusal().kind, GetParam().kind);
  EXPECT_EQ(connected.connector->refusal().why, GetParam().why);
  EXPECT_FALSE(connected.listener->proven());
}

INSTANTIATE_TEST_SUITE_P(
    Handshake, Differs,
    testing::Values(
        Difference{"purpose", [](Opening* o) { o->magic = kOtherPurpose; }, Kind::kForeign,
                   "it did not send the hello of a rank"},
        Difference{"version", [](Opening* o) { o->version = "1.2.4+ba9876543210"; }, Kind::kVersion,
                   "it runs Perseus 1.2.4+ba9876543210, expected 1.2.3+0123456789ab: install the same Perseus on every "
                   "host"},
        Difference{"build", [](Opening* o) { o->version = "1.2.3+0123456789ac"; }, Kind::kVersion,
                   "it runs Perseus 1.2.3+0123456789ac, expected 1.2.3+0123456789ab: install the same Perseus on every "
                   "host"},
        Difference{"unreadable_version", [](Opening* o) { o->version = "1\n2"; }, Kind::kVersion,
                   "it runs Perseus of an unknown version, expected 1.2.3+0123456789ab: install the same Perseus on "
                   "every host"},
        Difference{
            "format", [](Opening* o) { o->format = 6; }, Kind::kFormat,
            "it runs Perseus 1.2.3+0123456789ab, this process Perseus 1.2.3+0123456789ab: they do not understand "
            "each other (format 6, not 5); install the same Perseus on every host"},
        Difference{"epoch", [](Opening* o) { o->epoch = 6; }, Kind::kEpoch,
                   "it belongs to epoch 6 of the job, expected 7"},
        Difference{"rank", [](Opening* o) { o->rank = -1; }, Kind::kRank, "its hello names no rank"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Handshake, VersionsMayDifferWhereOnlyTheFormatCounts) {
  Options older = rank(0), newer = rank(0);
  older.versions = newer.versions = Versions::kAny;
  older.ours.version = "1.2.2+000000000000";
  Pair pair = shake(older, newer, true);
  EXPECT_TRUE(pair.connector->proven() && pair.listener->proven());
  EXPECT_EQ(pair.listener->theirs().version, "1.2.2+000000000000");
  newer.ours.format = 6;
  pair = shake(older, newer, true);
  EXPECT_EQ(pair.connector->refusal().kind, Kind::kFormat);
  EXPECT_EQ(pair.connector->theirs().version, "1.2.3+0123456789ab");
  EXPECT_EQ(pair.connector->theirs().format, 6u);
}

// A grammar of another number may end after the head: nobody waits for more of it.
TEST(Handshake, IsRefusedAsSoonAsTheBytesTellIt) {
  Options other = rank(3);
  other.ours.format = 6;
  const std::string bytes = make(Side::kConnector, other)->open();
  const auto listener = make(Side::kListener, rank(1));
  feed(*listener, bytes.substr(0, kOpeningHead - 1));
  EXPECT_FALSE(listener->refusal());
  feed(*listener, bytes.substr(kOpeningHead - 1, 1));
  EXPECT_EQ(listener->refusal().kind, Kind::kFormat);
  const auto web = make(Side::kConnector, rank(3));
  feed(*web, "HTTP");
  EXPECT_EQ(web->refusal().kind, Kind::kForeign);
}

// Whoever knows no secret can only send back what it hears.
TEST(Handshake, ReflectedMessagesProveNothing) {
  const auto connector = make(Side::kConnector, rank(3));
  const std::string answer = feed(*connector, connector->open());
  ASSERT_EQ(answer.size(), kProofSize);
  EXPECT_EQ(feed(*connector, answer), "");
  EXPECT_EQ(connector->refusal().kind, Kind::kImpostor);
  EXPECT_EQ(connector->refusal().why, "could not prove that it knows the job's secret");

  const auto listener = make(Side::kListener, rank(1));
  const std::string opening = listener->open();
  EXPECT_EQ(feed(*listener, opening), "");
  EXPECT_EQ(feed(*listener, opening.substr(kOpeningSize - kProofSize)), std::string(kProofSize, '\0'));
  EXPECT_EQ(listener->refusal().kind, Kind::kSecret);
}

// Two members, each of which believes that it talks to the other, and a relay that turns their sides around.
TEST(Handshake, AnAnswerIsNoVerdict) {
  const auto first = make(Side::kConnector, rank(3)), second = make(Side::kConnector, rank(3));
  const std::string from_first = feed(*first, second->open()), from_second = feed(*second, first->open());
  feed(*first, from_second.substr(from_second.size() - kProofSize));
  feed(*second, from_first.substr(from_first.size() - kProofSize));
  EXPECT_EQ(first->refusal().kind, Kind::kImpostor);
  EXPECT_EQ(second->refusal().kind, Kind::kImpostor);
}

// A proof received on one connection proves nothing on the next.
TEST(Handshake, AReplayIsRefused) {
  const auto connector = make(Side::kConnector, rank(3)), listener = make(Side::kListener, rank(1));
  const std::string opening = connector->open();
  const std::string answer = feed(*connector, feed(*listener, opening));
  feed(*listener, answer);
  ASSERT_TRUE(listener->proven());
  const auto later = make(Side::kListener, rank(1));
  feed(*later, opening);
  feed(*later, answer);
  EXPECT_EQ(later->refusal().kind, Kind::kSecret);
}

// Both sides must have seen the same openings, to the last bit.
TEST(Handshake, EveryBitOfTheOpeningsIsProven) {
  Options any = rank(3), listens = rank(1);
  any.versions = listens.versions = Versions::kAny;
  for (size_t bit = 0; bit < 8 * kOpeningSize; ++bit) {
    const auto connector = make(Side::kConnector, any), listener = make(Side::kListener, listens);
    std::string opening = connector->open();
    opening[bit / 8] = static_cast<char>(opening[bit / 8] ^ 1 << bit % 8);
    const std::string challenge = feed(*listener, opening);
    if (!listener->refusal()) feed(*listener, feed(*connector, challenge));
    EXPECT_TRUE(listener->refusal()) << bit;
  }
}

TEST(Handshake, MoreThanItWantsIsRefusedUnread) {
  const auto listener = make(Side::kListener, rank(1));
  EXPECT_EQ(feed(*listener, make(Side::kConnector, rank(3))->open() + "x"), "");
  EXPECT_EQ(listener->refusal().kind, Kind::kForeign);
  EXPECT_EQ(listener->refusal().why, "it sent more than a handshake");
  Pair pair = shake(rank(3), rank(1));
  feed(*pair.listener, "x");
  EXPECT_FALSE(pair.listener->proven());
}

TEST(Handshake, GarbageIsRefusedAndNeverAnswered) {
  std::mt19937 chance(14);
  for (int i = 0; i < 300; ++i) {
    std::string bytes(1 + chance() % kOpeningSize, '\0');
    for (char& byte : bytes) byte = static_cast<char>(chance());
    for (const Side side : {Side::kConnector, Side::kListener}) {
      const auto victim = make(side, rank(1));
      EXPECT_EQ(feed(*victim, bytes), "");
      EXPECT_EQ(static_cast<bool>(victim->refusal()), bytes.size() >= 4) << bytes.size();
      EXPECT_EQ(feed(*victim, std::string(kOpeningSize - bytes.size(), 'g')), "");
      EXPECT_EQ(victim->refusal().kind, Kind::kForeign);
      EXPECT_EQ(feed(*victim, "after the end"), "");
    }
  }
}

// The owner of the handshake knows whom it expects; it may change its mind until the proof.
TEST(Handshake, WhomTheOwnerDoesNotAdmitIsRefusedWithItsReason) {
  Options listens = rank(1);
  int asked = 0, refuse_at = 1;
  listens.admit = [&](const Opening& theirs) {
    EXPECT_EQ(theirs.rank, 3);
    return ++asked == refuse_at ? "it is too late" : "";
  };
  Pair pair = shake(rank(3), listens);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(pair.listener->refusal().kind, Kind::kRank);
  EXPECT_EQ(pair.listener->refusal().why, "it is too late");
  asked = 0, refuse_at = 2;
  pair = shake(rank(3), listens);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(pair.listener->refusal().why, "it is too late");
  EXPECT_FALSE(pair.connector->proven());
}

TEST(Ticket, HoldsForItsSessionAndForWhatItSays) {
  const std::string session = shake(rank(3), rank(1)).listener->session();
  Opening ours = opening_of(3);
  ours.magic = kOtherPurpose;
  ours.channel = 0x0000000900000002;
  const std::string ticket = make_ticket(session, ours);
  ASSERT_EQ(ticket.size(), kOpeningSize);
  Opening expected = opening_of(1), theirs;
  expected.magic = kOtherPurpose;
  ASSERT_FALSE(read_opening(ticket, expected, Versions::kSame, &theirs));
  EXPECT_EQ(theirs.rank, 3);
  EXPECT_EQ(theirs.channel, 0x0000000900000002u);
  EXPECT_TRUE(ticket_holds(session, ticket));
  EXPECT_FALSE(ticket_holds(shake(rank(3), rank(1)).listener->session(), ticket));
  EXPECT_FALSE(ticket_holds(session, ticket.substr(1)));
  for (size_t bit = 0; bit < 8 * kOpeningSize; ++bit) {
    std::string forged = ticket;
    forged[bit / 8] = static_cast<char>(forged[bit / 8] ^ 1 << bit % 8);
    EXPECT_FALSE(ticket_holds(session, forged)) << bit;
  }
}

}  // namespace
}  // namespace perseus
