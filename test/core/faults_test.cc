// Refused, short and delayed system calls of one rank, and bytes that change on their way to it: at the start and
// during an allreduce, over shared memory and TCP. A fault is survived with the same bits, or ends every rank in time
// with an error that names the cause; nothing is left open or mapped.
#include "faults.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

namespace perseus_test {
namespace {

constexpr int kRanks = 3, kSteps = 3, kLimitSeconds = 60;
constexpr int64_t kElements = 50'001;

// kIsTold: fails, and every other rank learns the cause and whose it is.
enum class Expected { kSurvives, kFails, kIsTold };

struct Case {
  const char* name;
  const char* transport;
  Fault fault;
  Expected expected;
  int timeout_s = 5;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Faults : public testing::TestWithParam<Case> {};

TEST_P(Faults, AreSurvivedOrEndEveryRankWithTheCause) {
  const Case& c = GetParam();
  // Only who waits in vain may lose patience soon.
  const int patience_s = c.expected == Expected::kSurvives ? 30 : 5;
  const std::vector<Ending> endings = run_faulty_world(c.transport, kRanks, kSteps, kElements, {c.fault}, kLimitSeconds,
                                                       c.timeout_s, std::vector<int>(kRanks, patience_s));
  ASSERT_EQ(endings.size(), static_cast<size_t>(kRanks));
  for (int rank = 0; rank < kRanks; ++rank) {
    const Ending& ending = endings[static_cast<size_t>(rank)];
    SCOPED_TRACE("rank " + std::to_string(rank) + ": " + ending.message);
    ASSERT_TRUE(ending.ended) << "hangs or crashed";
    EXPECT_EQ(ending.descriptors, 0) << "left open";
    EXPECT_EQ(ending.mappings, 0) << "left mapped";
    EXPECT_TRUE(rank != c.fault.rank || ending.injected > 0) << "the call was not made";
    if (c.expected == Expected::kSurvives) {
      EXPECT_EQ(ending.steps, kSteps);
      EXPECT_EQ(ending.message, "");
      continue;
    }
    EXPECT_LT(ending.steps, kSteps);
    EXPECT_NE(ending.message, "");
    // Another rank learns the cause or names the rank that has ended; at the start it can only name a rank that it
    // misses, which may be a third one that gave up a moment before.
    const std::string missed = c.fault.step == kStartUp ? "rank " : "rank 1";
    const char* cause = c.fault.effect == Effect::kDamage  ? "changed on their way"
                        : c.fault.effect == Effect::kForge ? "wrong authentication code"
                                                           : std::strerror(c.fault.error);
    const bool told = ending.message.find(cause) != std::string::npos;
    if (c.expected == Expected::kIsTold && rank != c.fault.rank) {
      EXPECT_TRUE(told && ending.message.find("rank 1: ") != std::string::npos);
    }
    EXPECT_TRUE(told || (rank != c.fault.rank && ending.message.find(missed) != std::string::npos));
  }
}

Fault refused(Call call, int error, int step = kStartUp, int times = 1, int nth = 0) {
  return Fault{1, step, call, nth, times, Effect::kError, error};
}
Fault shortened(Call call, int step, int times = kAlways) { return Fault{1, step, call, 0, times, Effect::kShort, 0}; }
Fault delayed(Call call, int step, int times) { return Fault{1, step, call, 0, times, Effect::kDelay, 0}; }
Fault damaged(Call call) { return Fault{1, 1, call, 0, kAlways, Effect::kDamage, 0}; }
Fault forged(Call call) { return Fault{1, 1, call, 0, kAlways, Effect::kForge, 0}; }

const Case kShm[] = {
    {"no_socket", "shm", refused(Call::kSocket, EMFILE, kStartUp, kAlways), Expected::kFails},
    {"no_memfd", "shm", refused(Call::kMemfd, EMFILE), Expected::kFails},
    {"no_shared_memory", "shm", refused(Call::kFallocate, ENOMEM), Expected::kFails},
    {"interrupted_reservation", "shm", refused(Call::kFallocate, EINTR, kStartUp, 3), Expected::kSurvives},
    {"no_mapping", "shm", refused(Call::kMmap, ENOMEM), Expected::kFails},
    {"no_epoll", "shm", refused(Call::kEpollCreate, EMFILE), Expected::kFails},
    {"no_eventfd", "shm", refused(Call::kEventfd, EMFILE), Expected::kFails},
    {"no_timer", "shm", refused(Call::kTimerfd, EMFILE), Expected::kFails},
    {"no_memory_for_epoll", "shm", refused(Call::kEpollCtl, ENOMEM), Expected::kFails},
    {"ring_without_memory", "shm", refused(Call::kFallocate, ENOMEM, 0), Expected::kFails},
    {"ring_without_mapping", "shm", refused(Call::kMmap, ENOMEM, 0), Expected::kIsTold},
    {"ring_without_descriptor", "shm", refused(Call::kMemfd, EMFILE, 0), Expected::kIsTold},
    {"socket_full_for_a_while", "shm", refused(Call::kSendmsg, EAGAIN, 0, 5), Expected::kSurvives},
    {"no_buffers_for_a_while", "shm", refused(Call::kSendmsg, ENOBUFS, 0, 5), Expected::kSurvives},
    {"no_room_for_descriptors_for_a_while", "shm", refused(Call::kSendmsg, ETOOMANYREFS, kStartUp, 5),
     Expected::kSurvives},
    {"no_room_for_descriptors", "shm", refused(Call::kSendmsg, ETOOMANYREFS, kStartUp, kAlways), Expected::kFails},
    // The first message is for rank 0, which is connected to all long before ranks 1 and 2 are to each other.
    {"slow_pair", "shm", refused(Call::kSendmsg, ETOOMANYREFS, kStartUp, 800, 1), Expected::kSurvives, 2},
    {"slow_handshake", "shm", delayed(Call::kRecvmsg, kStartUp, 20), Expected::kSurvives},
    {"slow_messages", "shm", delayed(Call::kSendmsg, 0, 20), Expected::kSurvives},
};
const Case kTcp[] = {
    {"no_socket", "tcp", refused(Call::kSocket, EMFILE, kStartUp, kAlways), Expected::kFails},
    {"no_epoll", "tcp", refused(Call::kEpollCreate, EMFILE, kStartUp, kAlways), Expected::kFails},
    {"short_handshake", "tcp", shortened(Call::kRecv, kStartUp), Expected::kSurvives},
    {"refused_for_a_while", "tcp", refused(Call::kConnect, ECONNREFUSED, kStartUp, 3), Expected::kSurvives},
    // The first one is for the store. Rank 2 is connected to both long before ranks 0 and 1 are to each other.
    {"slow_pair", "tcp", refused(Call::kConnect, ECONNREFUSED, kStartUp, 30, 1), Expected::kSurvives, 2},
    {"no_descriptor_to_accept_for_a_while", "tcp", refused(Call::kAccept, EMFILE), Expected::kSurvives},
    {"no_descriptor_to_accept", "tcp", refused(Call::kAccept, EMFILE, kStartUp, kAlways), Expected::kFails},
    {"slow_handshake", "tcp", delayed(Call::kRecv, kStartUp, 20), Expected::kSurvives},
    {"data_refused", "tcp", refused(Call::kConnect, ECONNREFUSED, 0, kAlways), Expected::kFails},
    {"data_without_socket", "tcp", refused(Call::kSocket, EMFILE, 0, kAlways), Expected::kFails},
    {"short_writes", "tcp", shortened(Call::kSendmsg, 1, 500), Expected::kSurvives},
    {"short_reads", "tcp", shortened(Call::kRecvmsg, 1, 500), Expected::kSurvives},
    {"short_headers", "tcp", shortened(Call::kRecv, 1, 200), Expected::kSurvives},
    {"interrupted_writes", "tcp", refused(Call::kSendmsg, EINTR, 1, 20), Expected::kSurvives},
    {"interrupted_reads", "tcp", refused(Call::kRecv, EINTR, 1, 20), Expected::kSurvives},
    {"slow_writes", "tcp", delayed(Call::kSendmsg, 1, 20), Expected::kSurvives},
    {"broken_write", "tcp", refused(Call::kSendmsg, ECONNRESET, 1), Expected::kFails},
    {"broken_read", "tcp", refused(Call::kRecv, ECONNRESET, 1), Expected::kFails},
    {"changed_contributions", "tcp", damaged(Call::kRecv), Expected::kFails},
    {"changed_results", "tcp", damaged(Call::kRecvmsg), Expected::kFails},
    {"changed_announcements", "tcp", forged(Call::kRecv), Expected::kFails},
};
const auto name_of = [](const testing::TestParamInfo<Case>& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Shm, Faults, testing::ValuesIn(kShm), name_of);
INSTANTIATE_TEST_SUITE_P(Tcp, Faults, testing::ValuesIn(kTcp), name_of);

bool says(const Ending& ending, const std::string& part) { return ending.message.find(part) != std::string::npos; }

// The endings of a start that fails and leaves nothing behind, where ranks have these many seconds of patience: so much
// more than another that the order in which they lose it is sure.
std::vector<Ending> failed_start(const std::string& transport, const Fault& fault, const std::vector<int>& patience_s) {
  const std::vector<Ending> endings = run_faulty_world(transport, static_cast<int>(patience_s.size()), kSteps,
                                                       kElements, {fault}, kLimitSeconds, 5, patience_s);
  for (const Ending& ending : endings) {
    EXPECT_TRUE(ending.ended);
    EXPECT_EQ(ending.steps, 0);
    EXPECT_EQ(ending.descriptors, 0);
    EXPECT_EQ(ending.mappings, 0);
  }
  return endings;
}

// One rank gave up as it missed another one, which says what was in its way, and why the start has ended.
void expect_explained(const Ending& gave_up, const char* missed, const Ending& missing, int error) {
  EXPECT_TRUE(says(gave_up, missed)) << gave_up.message;
  EXPECT_TRUE(says(missing, std::strerror(error))) << missing.message;
  EXPECT_TRUE(says(missing, " has given up this start: ")) << missing.message;
}

// A rank that others wait for in vain says why, though they give up before it does.
TEST(FailedStart, OfARankThatOthersGaveUpIsExplainedByIt) {
  const std::vector<Ending> endings =
      failed_start("shm", refused(Call::kSendmsg, ETOOMANYREFS, kStartUp, kAlways), {5, 30, 30});
  expect_explained(endings[0], "no connection with rank 1 of this host in time", endings[1], ETOOMANYREFS);
}

TEST(FailedStart, WithARankThatCannotWelcomeOthersIsExplainedByIt) {
  Fault fault = refused(Call::kSendmsg, ETOOMANYREFS, kStartUp, kAlways);
  fault.rank = 0;
  const std::vector<Ending> endings = failed_start("shm", fault, {30, 5, 30});
  expect_explained(endings[1], "no connection with rank 0 of this host in time", endings[0], ETOOMANYREFS);
}

// Its caller's wish stays one, and the message still says why the start took so long.
TEST(FailedStart, OfTheCallerOfARankThatWaitsForRoomEndsAsAnInterruption) {
  Fault fault = refused(Call::kSendmsg, ETOOMANYREFS, kStartUp, kAlways);
  fault.interrupted_after = 20;
  const std::vector<Ending> endings = failed_start("shm", fault, {30, 30});
  EXPECT_EQ(endings[1].code, PERSEUS_ABORTED);
  const std::string told = std::string("[shm] interrupted while connecting; descriptors cannot be passed to rank 0: ") +
                           std::strerror(ETOOMANYREFS);
  EXPECT_EQ(endings[1].message.find(told), 0u) << endings[1].message;
  EXPECT_TRUE(says(endings[0], "rank 1 has given up this start: " + told)) << endings[0].message;
}

// Of two ranks, it hears of the other one's end from the store; of three, it may see the third one end before that.
TEST(FailedStart, WithARankThatReachesNobodyIsExplainedByIt) {
  for (const std::vector<int>& patience_s : std::vector<std::vector<int>>{{5, 30}, {5, 30, 30}}) {
    const std::vector<Ending> endings =
        failed_start("tcp", refused(Call::kConnectToRank, EHOSTUNREACH, kStartUp, kAlways), patience_s);
    expect_explained(endings[0], "no connection with rank 1 in time", endings[1], EHOSTUNREACH);
    EXPECT_TRUE(says(endings[1], "; rank 0 at ")) << endings[1].message;
  }
}

TEST(FailedStart, WithARankThatCannotAcceptIsExplainedToWhoeverWaitsForIt) {
  Fault fault = refused(Call::kAccept, EMFILE, kStartUp, kAlways);
  fault.rank = 0;
  for (const Ending& ending : failed_start("tcp", fault, {5, 30}))
    EXPECT_TRUE(says(ending, std::string("rank 0 cannot accept connections: ") + std::strerror(EMFILE)))
        << ending.message;
}

// What the faults are compared with.
TEST(NoFaults, LeaveNothingBehind) {
  for (const char* transport : {"shm", "tcp"})
    for (const Ending& ending : run_faulty_world(transport, kRanks, kSteps, kElements, {}, kLimitSeconds)) {
      EXPECT_EQ(ending.message, "") << transport;
      EXPECT_EQ(ending.steps, kSteps) << transport;
      EXPECT_EQ(ending.descriptors, 0) << transport;
      EXPECT_EQ(ending.mappings, 0) << transport;
    }
}

}  // namespace
}  // namespace perseus_test
