// Which connections a listener keeps before they have proved anything, told with invented times.
#include "net/pending_connections.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <vector>

namespace perseus {
namespace {

using Numbers = PendingConnections<int>;
using Room = Numbers::Room;

std::vector<int> contents(Numbers& pending) {
  std::vector<int> all;
  pending.keep_if([&](int number) { return all.push_back(number), true; });
  return all;
}

TEST(PendingConnections, OldestMakesWayWhenThereIsNoRoom) {
  Numbers pending({2});
  EXPECT_EQ(pending.room(0), Room::kFree);
  pending.add(1, 0);
  pending.add(2, 0);
  EXPECT_EQ(pending.room(0), Room::kOldestMakesWay);
  EXPECT_EQ(pending.take_oldest(), 1);
  EXPECT_EQ(pending.room(0), Room::kFree);
  pending.add(3, 0);
  EXPECT_EQ(contents(pending), (std::vector<int>{2, 3}));
  pending.set_most(3);
  EXPECT_EQ(pending.room(0), Room::kFree);
}

TEST(PendingConnections, OldestKeepsItsPlaceDuringItsGrace) {
  Numbers pending({1, 50, 10});
  pending.add(1, 100);
  EXPECT_EQ(pending.room(109), Room::kNone);
  EXPECT_EQ(pending.room(110), Room::kOldestMakesWay);
}

TEST(PendingConnections, NoRoomAtAllIsNotGivenByPushingOutNobody) { EXPECT_EQ(Numbers({0}).room(0), Room::kNone); }

TEST(PendingConnections, IsLateOnceItsPatienceHasPassed) {
  Numbers pending({4, 50});
  EXPECT_FALSE(pending.oldest_is_late(1000));
  EXPECT_EQ(pending.next_event_ns(), 0);
  pending.add(1, 100);
  pending.add(2, 120);
  EXPECT_EQ(pending.next_event_ns(), 150);
  EXPECT_FALSE(pending.oldest_is_late(149));
  EXPECT_TRUE(pending.oldest_is_late(150));
  EXPECT_EQ(pending.take_oldest(), 1);
  EXPECT_FALSE(pending.oldest_is_late(150));
  EXPECT_EQ(pending.next_event_ns(), 170);
}

TEST(PendingConnections, WithoutPatienceNobodyIsEverLate) {
  Numbers pending({4});
  pending.add(1, 0);
  EXPECT_FALSE(pending.oldest_is_late(int64_t{1} << 62));
  EXPECT_EQ(pending.next_event_ns(), 0);
}

TEST(PendingConnections, ProvenOnesLeaveFromAnywhere) {
  PendingConnections<std::unique_ptr<int>> pending({4});
  for (const int number : {1, 2, 3}) pending.add(std::make_unique<int>(number), 0);
  const auto taken = pending.take([](const auto& entry) { return *entry == 2; });
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(**taken, 2);
  EXPECT_FALSE(pending.take([](const auto& entry) { return *entry == 2; }).has_value());
  EXPECT_EQ(pending.size(), 2U);
  pending.keep_if([](const auto& entry) { return *entry != 1; });
  EXPECT_EQ(**pending.take_oldest(), 3);
  EXPECT_FALSE(pending.take_oldest().has_value());
}

TEST(PendingConnections, PauseEndsOnce) {
  Numbers pending({4, Numbers::kPause * 2});
  EXPECT_FALSE(pending.may_resume(1));
  pending.add(1, 1);
  pending.pause(1);
  EXPECT_EQ(pending.next_event_ns(), 1 + Numbers::kPause);
  EXPECT_FALSE(pending.may_resume(Numbers::kPause));
  EXPECT_TRUE(pending.may_resume(1 + Numbers::kPause));
  EXPECT_FALSE(pending.may_resume(1 + Numbers::kPause));
  EXPECT_EQ(pending.next_event_ns(), 1 + 2 * Numbers::kPause);
}

TEST(PendingConnections, ShareOfTheDescriptorsHasBounds) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  for (const auto& [limit, expected] : {std::pair<rlim_t, size_t>{64, 16}, {256, 32}, {before.rlim_max, 40}}) {
    const rlimit changed{std::min(limit, before.rlim_max), before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &changed), 0);
    EXPECT_EQ(descriptors_for_pending(8, 16, 40), expected) << "limit " << changed.rlim_cur;
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace perseus
