// The records of residuals alone, without a world: who may use them when, and what they are worth.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "compression/residuals.h"

namespace perseus {
namespace {

CompressionTerms int8_terms() {
  CompressionTerms terms;
  terms.codec.kind = CodecKind::kInt8;
  return terms;
}

TEST(ResidualRecord, CannotBeReadWhileItIsInUse) {
  Residuals residuals;
  const std::string name = "g";
  const Residuals::Key key{1, 0, name};
  const CompressionTerms terms = int8_terms();
  const Residuals::Tensors tensors{{3, 4}};
  Residuals::Place place;
  EXPECT_EQ(residuals.read(key, nullptr, 0, &place), 0U);
  auto record = residuals.take(key, tensors, terms, 17, Flush::kNone, 0);
  const auto refusal = [&](const auto& action) -> std::string {
    try {
      action();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  std::vector<float> data(14, 1.0F);
  EXPECT_NE(refusal([&] { residuals.read(key, nullptr, 0, &place); }).find("under way"), std::string::npos);
  EXPECT_NE(refusal([&] { residuals.write(key, data.data(), 14, {17, 0}); }).find("under way"), std::string::npos);
  record.reset();
  EXPECT_EQ(residuals.read(key, nullptr, 0, &place), 7U);
  EXPECT_EQ(place.layout, 17U);
  EXPECT_NE(refusal([&] { residuals.read(key, data.data(), 13, &place); }).find("14"), std::string::npos);
  EXPECT_NE(refusal([&] { residuals.write(key, data.data(), 13, {17, 0}); }).find("two for each"), std::string::npos);
  record = residuals.take(key, tensors, terms, 17, Flush::kNone, 0);
  Residuals::Lease copy = record;
  record.reset();
  EXPECT_NE(refusal([&] { residuals.read(key, nullptr, 0, &place); }).find("under way"), std::string::npos);
  copy.reset();
  EXPECT_EQ(residuals.read(key, nullptr, 0, &place), 7U);
  EXPECT_GT(residuals.bytes(), 0U);
  residuals.forget(1);
  EXPECT_EQ(residuals.bytes(), 0U);
}

// What reductions of seven numbers take, one after the other.
struct Taken {
  Residuals residuals;
  const std::string name = "g";

  Residuals::Lease take(double learning_rate) {
    const CompressionTerms terms = int8_terms();
    return residuals.take({1, 0, name}, {{3, 4}}, terms, 17, Flush::kNone, learning_rate);
  }
};

// Its own step's learning rate decides how much a gradient moves, whenever it arrives.
TEST(ResidualRecord, IsCarriedByTheRatioOfLearningRates) {
  Taken taken;
  const auto carry = [&](double learning_rate) { return taken.take(learning_rate)->carry; };
  EXPECT_EQ(carry(0.5), 1.0F) << "nothing is held";
  EXPECT_EQ(carry(0.5), 1.0F);
  EXPECT_EQ(carry(0.125), 4.0F);
  EXPECT_EQ(carry(0), 1.0F) << "not known";
  EXPECT_EQ(carry(0.25), 0.5F) << "the last that was known";
  EXPECT_EQ(carry(std::nan("")), 1.0F);
  EXPECT_EQ(carry(0.25), 1.0F);
  EXPECT_EQ(carry(-0.0625), 1.0F) << "no rate, but what gradients are multiplied by";
  EXPECT_EQ(carry(-0.125), 0.5F);
  EXPECT_EQ(carry(0.25), 1.0F) << "a rate again";
  EXPECT_EQ(carry(0.125), 2.0F);
  const std::vector<float> data(14, 1.0F);
  taken.residuals.write({1, 0, taken.name}, data.data(), 14, {17, 0});
  EXPECT_EQ(carry(0.5), 1.0F) << "a loaded one has no rate";
  EXPECT_EQ(carry(0.25), 2.0F);
}

// Else momentum would keep what is multiplied without a bound until the rate rises again. A rate that has been the
// highest for long is forgotten, so schedules may fall for ever.
TEST(ResidualRecord, IsCarriedByNoMoreThanTenSoonAfterAHigherRate) {
  Taken taken;
  const auto carry = [&](double learning_rate) { return taken.take(learning_rate)->carry; };
  constexpr double kForgets = Residuals::kForgets;
  EXPECT_EQ(carry(0.0625), 1.0F);
  EXPECT_EQ(carry(1), 0.0625F) << "as small as it was when it was the highest";
  EXPECT_EQ(carry(0.5), 2.0F);
  EXPECT_FLOAT_EQ(carry(1e-6), static_cast<float>(5 / kForgets / kForgets));
  EXPECT_EQ(carry(INFINITY), 1.0F) << "not known";
  EXPECT_FLOAT_EQ(carry(1e-30), static_cast<float>(1 / kForgets));
  EXPECT_FLOAT_EQ(carry(1), static_cast<float>(kForgets * kForgets * kForgets / 10));
  double product = 1;
  for (int step = 0; step < 2400; ++step) product *= static_cast<double>(carry(0.01));
  EXPECT_NEAR(product, 100, 0.01);
  EXPECT_EQ(carry(0.001), 10.0F);
}

// So that auto may choose for a name and tensor, whoever's gradient has held something back.
TEST(ResidualRecord, IsKnownByOwnerAndTensorUntilAFlush) {
  Residuals residuals;
  CompressionTerms terms = int8_terms();
  terms.automatic = true;
  const std::string name = "g";
  const Residuals::Key first{1, 0, name}, second{2, 0, name};
  const auto take = [&](const Residuals::Key& key, Flush flush) {
    return residuals.take(key, {{3, 4}, 5, 6}, terms, 17, flush, 0);
  };
  EXPECT_FALSE(residuals.holds(first, 1));
  take(first, Flush::kNone)->held[1] = true;
  take(second, Flush::kNone);
  EXPECT_TRUE(residuals.holds(first, 1));
  EXPECT_FALSE(residuals.holds(first, 0));
  EXPECT_FALSE(residuals.holds(second, 1));
  take(first, Flush::kNone);
  EXPECT_TRUE(residuals.holds(first, 1));
  take(first, Flush::kAsDivided);
  EXPECT_FALSE(residuals.holds(first, 1));
}

TEST(ResidualRecord, IsForgottenWithItsGroup) {
  Residuals residuals;
  const CompressionTerms terms = int8_terms();
  const std::string name = "g";
  for (const uint32_t group : {3, 4}) residuals.take({0, group, name}, {{5}}, terms, 17, Flush::kNone, 0);
  const size_t both = residuals.bytes();
  residuals.forget_group(3);
  EXPECT_EQ(residuals.bytes(), both / 2);
  Residuals::Place place;
  EXPECT_EQ(residuals.read({0, 3, name}, nullptr, 0, &place), 0U);
  EXPECT_EQ(residuals.read({0, 4, name}, nullptr, 0, &place), 5U);
}

TEST(ResidualRecord, OfAReductionThatDidNotBeginIsCarriedAsBefore) {
  Taken taken;
  EXPECT_EQ(taken.take(0.5)->steps, 1U);
  const Residuals::Lease lease = taken.take(0.125);
  EXPECT_EQ(lease->carry, 4.0F);
  taken.residuals.give_back(lease);
  EXPECT_EQ(lease->steps, 1U);
  EXPECT_EQ(taken.take(0.125)->carry, 4.0F);
  EXPECT_EQ(taken.take(0.125)->carry, 1.0F);
}

// One that has flushed before holds nothing, but the step after it must not hold anything back either.
TEST(ResidualRecord, IsFlushedOnDemandWhereTheTypesChangeToo) {
  Residuals residuals;
  const CompressionTerms terms = int8_terms();
  const std::string name = "g";
  const Residuals::Key key{1, 0, name};
  const Residuals::Tensors singles{{3, 4}, 5, 11}, halves{{3, 4}, 5, 12};
  const auto due = [&](const Residuals::Tensors& tensors) {
    bool dropped = false;
    return residuals.due(key, tensors, terms, [] { return uint64_t{17}; }, &dropped);
  };
  residuals.take(key, singles, terms, 17, Flush::kAsDivided, 0);
  EXPECT_EQ(due(halves), Flush::kNone);
  residuals.flush();
  EXPECT_EQ(due(halves), Flush::kAmongAll);
  EXPECT_EQ(due(singles), Flush::kAsDivided);
}

TEST(ResidualRecord, OfACheckpointIsOfItsTypesAndWorthWhatItWasWorth) {
  Residuals saved, loaded;
  const CompressionTerms terms = int8_terms();
  const std::string name = "g";
  const Residuals::Key key{1, 0, name};
  const Residuals::Tensors singles{{3, 4}, 5, 11}, doubles{{3, 4}, 5, 13};
  {
    const auto lease = saved.take(key, singles, terms, 17, Flush::kNone, 0, 1 / 4.0F);
    for (size_t i = 0; i < 4; ++i) lease->sent(1)[i] = lease->result(1)[i] = static_cast<float>(i + 1);
  }
  std::vector<float> data(14);
  Residuals::Place place;
  ASSERT_EQ(saved.read(key, data.data(), data.size(), &place), 7U);
  EXPECT_EQ(place.factor, 0.25F);
  loaded.write(key, data.data(), data.size(), place);
  bool dropped = false;
  const auto layout = [] { return uint64_t{17}; };
  EXPECT_EQ(loaded.due(key, singles, terms, layout, &dropped), Flush::kNone);
  EXPECT_EQ(loaded.due(key, doubles, terms, layout, &dropped), Flush::kAmongAll) << "no codec may serve them";
  const auto lease = loaded.take(key, singles, terms, 17, Flush::kNone, 0, 1 / 2.0F);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(lease->sent(1)[i], static_cast<float>(i + 1) / 2) << "of a sum over twice as many ranks";
    EXPECT_EQ(lease->result(1)[i], static_cast<float>(i + 1));
  }
}

// ThreadSanitizer sees the order: what an operation has written happened before it is read.
TEST(ResidualRecord, AReaderSeesAllThatAnOperationHasLeft) {
  Residuals residuals;
  const std::string name = "g";
  const Residuals::Key key{1, 0, name};
  const CompressionTerms terms = int8_terms();
  constexpr size_t kElements = 4000;
  std::atomic<bool> done{false};
  std::thread operations([&] {
    for (int step = 1; step <= 300; ++step) {
      auto lease = residuals.take(key, {{kElements}}, terms, 17, Flush::kNone, 0);
      for (size_t i = 0; i < 2 * kElements; ++i) lease->sent(0)[i] = static_cast<float>(step);
    }
    done = true;
  });
  std::vector<float> data(2 * kElements);
  Residuals::Place place;
  float last = 0;
  for (bool more = true; more;) {
    more = !done;
    try {
      if (residuals.read(key, data.data(), data.size(), &place) == 0) continue;
    } catch (const Error&) {
      continue;  // under way
    }
    EXPECT_EQ(std::count(data.begin(), data.end(), data[0]), static_cast<std::ptrdiff_t>(data.size()));
    EXPECT_GE(data[0], last);
    last = data[0];
  }
  operations.join();
  EXPECT_EQ(last, 300.0F);
}

}  // namespace
}  // namespace perseus
