// What auto goes by: when choices change, and that nothing held back is left behind.
#include "execution/auto_codecs.h"

#include <gtest/gtest.h>

#include "base/clock.h"

namespace {

using perseus::AutoCodecs;
using perseus::CodecKind;
using perseus::kAutoCodecs;
using perseus::kSecond;
using perseus::Speeds;

enum { kExact, kHalf, kInt8, kInt4, kInt2 };  // places in kAutoKinds
constexpr uint64_t kLarge = 8 << 20;

std::array<perseus::CodecSpec, kAutoCodecs> specs() {
  std::array<perseus::CodecSpec, kAutoCodecs> specs;
  for (size_t i = 0; i < specs.size(); ++i) specs[i].kind = perseus::kAutoKinds[i];
  return specs;
}

Speeds speeds(int number, double gbit) {
  Speeds s;
  s.link = {number, 30e-6, 8e-9 / gbit};
  s.codecs[kHalf] = {0.05e-9, 0.05e-9, 0.5};
  s.codecs[kInt8] = {0.12e-9, 0.05e-9, 0.254};
  s.codecs[kInt4] = {0.16e-9, 0.08e-9, 0.129};
  s.codecs[kInt2] = {0.25e-9, 0.12e-9, 0.078};
  s.groups = 2;
  s.shards = 2;
  return s;
}

class AutoCodecsTest : public testing::Test {
 protected:
  int choose(const std::string& name, uint64_t bytes, bool flushes = false, size_t tensor = 0) {
    const AutoCodecs::Choice choice = codecs.choose(name, tensor, bytes, least, true, flushes);
    yields = choice.yields;
    return choice.codec;
  }

  AutoCodecs codecs{specs(), kSecond};
  int least = kInt2;
  bool yields = false;
};

TEST_F(AutoCodecsTest, WhatHoldsSomethingBackBecomesExactAfterAFlush) {
  EXPECT_TRUE(codecs.adopt(speeds(1, 14), 0));
  EXPECT_EQ(choose("g", kLarge), kInt8);
  EXPECT_EQ(choose("several", kLarge, false, 2), kInt8);
  EXPECT_TRUE(codecs.adopt(speeds(2, 1000), 0));
  EXPECT_EQ(choose("g", kLarge), kInt8);
  EXPECT_TRUE(yields) << "something is held back";
  EXPECT_EQ(choose("new", kLarge), kExact);
  EXPECT_FALSE(yields);
  EXPECT_EQ(choose("several", kLarge, false, 1), kExact) << "another tensor of the request";
  EXPECT_EQ(choose("several", kLarge, false, 2), kInt8);
  choose("g", kLarge, true);
  EXPECT_FALSE(yields);
  EXPECT_EQ(choose("g", kLarge), kExact);
  // As fast as at first: what has not been flushed meanwhile goes on.
  EXPECT_TRUE(codecs.adopt(speeds(3, 14), 0));
  EXPECT_EQ(choose("g", kLarge), kInt8);
  EXPECT_EQ(choose("several", kLarge, false, 2), kInt8);
  EXPECT_FALSE(yields);
}

TEST_F(AutoCodecsTest, FewerBitsGoOnWithWhatMoreHaveHeldBack) {
  codecs.adopt(speeds(1, 14), 0);
  EXPECT_EQ(choose("g", kLarge), kInt8);
  codecs.adopt(speeds(2, 0.1), 0);
  EXPECT_EQ(choose("g", kLarge), kInt2);
  EXPECT_FALSE(yields);
}

TEST_F(AutoCodecsTest, MoreBitsGoOnWithWhatFewerHaveHeldBack) {
  codecs.adopt(speeds(1, 0.1), 0);
  EXPECT_EQ(choose("g", kLarge), kInt2);
  least = kInt8;
  EXPECT_EQ(choose("g", kLarge), kInt8);
  EXPECT_FALSE(yields);
}

TEST_F(AutoCodecsTest, OtherSizesAreChosenForAnew) {
  codecs.adopt(speeds(1, 1), 0);
  EXPECT_EQ(choose("g", kLarge), kInt2);
  EXPECT_EQ(choose("g", 4), kExact);
  EXPECT_FALSE(yields) << "what was held back of other sizes is gone, or another owner's";
}

TEST_F(AutoCodecsTest, ALinkThatIsNearlyAsFastCountsAsUnchanged) {
  codecs.adopt(speeds(1, 10), 0);
  for (double gbit : {14.0, 7.0}) {
    EXPECT_FALSE(codecs.adopt(speeds(2, gbit), 0)) << gbit;
    EXPECT_EQ(codecs.speeds().link.number, 2);
    EXPECT_DOUBLE_EQ(codecs.speeds().link.seconds_per_byte, 0.8e-9);
  }
  EXPECT_TRUE(codecs.adopt(speeds(3, 16), 0));
  EXPECT_DOUBLE_EQ(codecs.speeds().link.seconds_per_byte, 0.5e-9);
  EXPECT_TRUE(codecs.adopt(speeds(4, 10), 0));
}

TEST_F(AutoCodecsTest, AMeasurementIsOutdatedAfterTheInterval) {
  EXPECT_EQ(codecs.outdated(100 * kSecond), 0) << "none has been made";
  codecs.adopt(speeds(1, 1), 100 * kSecond);
  EXPECT_EQ(codecs.outdated(101 * kSecond), 0);
  EXPECT_EQ(codecs.outdated(101 * kSecond + 1), 1);
  codecs.adopt(speeds(2, 1), 102 * kSecond);
  EXPECT_EQ(codecs.outdated(102 * kSecond), 0);
  AutoCodecs never(specs(), 0);
  never.adopt(speeds(1, 1), 0);
  EXPECT_EQ(never.outdated(1000 * kSecond), 0);
}

}  // namespace
