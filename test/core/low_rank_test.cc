// Gradients that travel as products of narrow matrices: the kernels on every variant this machine runs, what a sum has
// of its gradients, what is kept of the rest, and what is not finite.
#include "kernels/low_rank.h"

#include <cmath>
#include <limits>

#include "base/error.h"
#include "codec/low_rank.h"
#include "operation.h"
#include "variants.h"

namespace {

using namespace perseus_test;
using namespace perseus::kernels;
using Floats = std::vector<float>;

// Between -1 and 1.
Floats noise(uint64_t seed, size_t count) {
  Floats x(count);
  for (size_t i = 0; i < count; ++i) x[i] = static_cast<float>(mix(mix(seed) + i) >> 40) * 0x1p-23F - 1.0F;
  return x;
}

double norm(const Floats& x) {
  double sum = 0;
  for (float each : x) sum += static_cast<double>(each) * static_cast<double>(each);
  return std::sqrt(sum);
}

// ---- kernels ----------------------------------------------------------------------------------------------------

struct Products {
  Floats p, q, product, rest;
};

Products products(MatrixShape shape, size_t rank) {
  const Floats w = noise(1, shape.rows * shape.cols), p = noise(2, shape.rows * rank), q = noise(3, rank * shape.cols);
  Products found{Floats(p.size()), Floats(q.size()), Floats(), w};
  project(w.data(), shape, q.data(), rank, found.p.data());
  project_back(w.data(), shape, p.data(), rank, found.q.data());
  Floats room(w.size() + 16);
  float* const aligned = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) / sizeof(float) % 16;
  expand(p.data(), q.data(), shape, rank, aligned);  // stored around the cache where it is large
  found.product.assign(aligned, aligned + w.size());
  subtract({shape, rank, p, q}, found.rest.data());
  return found;
}

TEST(LowRankKernels, AreTheProductsWithTheSameBitsOnEveryVariant) {
  for (const MatrixShape shape : {MatrixShape{1, 1}, {3, 5}, {4, 16}, {7, 33}, {70, 129}, {129, 8}, {520, 512}}) {
    for (size_t rank : {1, 2, 4, 5, 9}) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.cols << ", rank " << rank);
      const Floats w = noise(1, shape.rows * shape.cols), p = noise(2, shape.rows * rank),
                   q = noise(3, rank * shape.cols);
      select_variant("portable");
      const Products found = products(shape, rank);
      for (size_t k = 0; k < rank; ++k) {
        for (size_t i = 0; i < shape.rows; ++i) {
          double sum = 0;
          for (size_t j = 0; j < shape.cols; ++j)
            sum += static_cast<double>(w[i * shape.cols + j]) * q[k * shape.cols + j];
          ASSERT_NEAR(found.p[i * rank + k], sum, 1e-5);
        }
        for (size_t j = 0; j < shape.cols; ++j) {
          double sum = 0;
          for (size_t i = 0; i < shape.rows; ++i) sum += static_cast<double>(w[i * shape.cols + j]) * p[i * rank + k];
          ASSERT_NEAR(found.q[k * shape.cols + j], sum, 3e-5);
        }
      }
      for (size_t i = 0; i < shape.rows; ++i)
        for (size_t j = 0; j < shape.cols; ++j) {
          double sum = 0;
          for (size_t k = 0; k < rank; ++k) sum += static_cast<double>(p[i * rank + k]) * q[k * shape.cols + j];
          ASSERT_NEAR(found.product[i * shape.cols + j], sum, 1e-5);
          ASSERT_NEAR(found.rest[i * shape.cols + j], w[i * shape.cols + j] - sum, 1e-5);
        }
      for (const std::string& variant : variants_here()) {
        select_variant(variant.c_str());
        const Products other = products(shape, rank);
        EXPECT_EQ(other.p, found.p) << variant;
        EXPECT_EQ(other.q, found.q) << variant;
        EXPECT_EQ(other.product, found.product) << variant;
        EXPECT_EQ(other.rest, found.rest) << variant;
      }
      select_variant("auto");
    }
  }
}

TEST(LowRankKernels, RefuseAProductOfAnotherShape) {
  constexpr MatrixShape kShape{64, 48};
  Floats w = noise(1, 64 * 48), p(64 * 2);
  const Floats x = noise(2, w.size()), q = noise(3, 2 * 48);
  const Product product{{48, 64}, 2, noise(4, 48 * 2), noise(5, 2 * 64)};
  EXPECT_THROW(add_and_project(x.data(), 1, product, w.data(), kShape, q.data(), 2, p.data()), perseus::Error);
}

TEST(LowRankKernels, AddingOnTheWayGivesTheSameBits) {
  for (const MatrixShape shape : {MatrixShape{1, 1}, {300, 400}, {3, 40000}, {40000, 3}}) {
    const Floats x = noise(1, shape.rows * shape.cols), q = noise(2, 4 * shape.cols);
    for (const size_t sent : {0, 2}) {
      Floats w = noise(3, x.size()), sum = w, p(4 * shape.rows), expected(p.size());
      Product product{shape, sent, noise(4, shape.rows * sent), noise(5, sent * shape.cols)};
      if (sent > 0) subtract(product, sum.data());
      for (size_t i = 0; i < x.size(); ++i) sum[i] = 0.5F * sum[i] + x[i];
      project(sum.data(), shape, q.data(), 4, expected.data());
      add_and_project(x.data(), 0.5F, product, w.data(), shape, q.data(), 4, p.data());
      EXPECT_EQ(w, sum);
      EXPECT_EQ(p, expected);
    }
  }
}

TEST(Orthogonalize, GivesColumnsOfLengthOneAndZeroForThoseThatDepend) {
  constexpr size_t kRows = 50, kRank = 4;
  Floats p = noise(7, kRows * kRank);
  for (size_t row = 0; row < kRows; ++row) p[row * kRank + 2] = 3 * p[row * kRank] - p[row * kRank + 1];
  orthogonalize(p.data(), kRows, kRank);
  for (size_t a = 0; a < kRank; ++a)
    for (size_t b = 0; b < kRank; ++b) {
      double sum = 0;
      for (size_t row = 0; row < kRows; ++row) sum += static_cast<double>(p[row * kRank + a]) * p[row * kRank + b];
      EXPECT_NEAR(sum, a == b && a != 2 ? 1 : 0, 1e-6) << a << " " << b;
    }
}

TEST(Orthogonalize, ColumnsThatNearlyDependAreAsOrthogonalAsOthers) {
  constexpr size_t kRows = 400, kRank = 3;
  for (const float rest : {1e-3F, 1e-4F, 1e-5F}) {
    Floats p = noise(7, kRows * kRank);
    for (size_t row = 0; row < kRows; ++row) {
      float* const of_row = p.data() + row * kRank;
      of_row[1] = of_row[0] + rest * of_row[1];
      of_row[2] = of_row[0] - of_row[1] + rest * rest * of_row[2];
    }
    orthogonalize(p.data(), kRows, kRank);
    for (size_t a = 0; a < kRank; ++a)
      for (size_t b = 0; b < a; ++b) {
        double sum = 0;
        for (size_t row = 0; row < kRows; ++row) sum += static_cast<double>(p[row * kRank + a]) * p[row * kRank + b];
        EXPECT_NEAR(sum, 0, 1e-6) << a << " " << b << " " << rest;
      }
  }
}

TEST(MatrixOf, HasTheFewestRowsAndColumns) {
  const auto is = [](const std::vector<int64_t>& shape, size_t rows, size_t cols) {
    const MatrixShape found = perseus::matrix_of(shape);
    EXPECT_EQ(found.rows, rows);
    EXPECT_EQ(found.cols, cols);
  };
  is({64, 32, 3, 3}, 64, 288);  // torch
  is({3, 3, 32, 64}, 288, 64);  // TensorFlow
  is({10, 20}, 10, 20);
  is({20}, 1, 20);
  is({}, 1, 1);
  is({0, 5}, 1, 0);
  EXPECT_EQ(perseus::narrow_bytes({64, 32, 3, 3}, 4), 4U * 4 * (64 + 288));
  EXPECT_EQ(perseus::narrow_bytes({16, 16}, 4), 4U * 4 * 32) << "half";
  EXPECT_EQ(perseus::narrow_bytes({16, 16}, 5), 0U);
  EXPECT_EQ(perseus::narrow_bytes({1, 1000}, 1), 0U);
}

// ---- sums -------------------------------------------------------------------------------------------------------

constexpr int64_t kShape[] = {64, 8, 6};  // as a matrix: 64 x 48
constexpr size_t kCount = 64 * 48;

WorldOptions groups_of(int ranks, const std::string& more = "PERSEUS_ALLREDUCE_DTYPE=1") {
  WorldOptions options;
  options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=" + std::to_string(ranks),
                       "PERSEUS_POWERSGD_WARMUP_STEPS=0", more};
  return options;
}

perseus_request request_for(const perseus_tensor* tensors, int count, perseus_codec codec, double rank) {
  perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", tensors, count);
  request.op = PERSEUS_AVERAGE;
  request.gradient_of = 1;
  request.codec = codec;
  request.codec_argument = rank;
  return request;
}

Floats reduce(perseus_context* context, Floats x, double rank, perseus_codec codec = PERSEUS_CODEC_POWERSGD) {
  const perseus_tensor tensor{x.data(), x.data(), kShape, 3, PERSEUS_FLOAT32};
  const Outcome outcome = run(context, request_for(&tensor, 1, codec, rank));
  EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  return x;
}

// Of rank 2, as all of them together are, too: different ones on every rank, of the same rows.
Floats narrow(int rank) {
  const Floats p = noise(11, 64 * 2), q = noise(12 + static_cast<uint64_t>(rank), 2 * 48);
  Floats x(kCount);
  expand(p.data(), q.data(), {64, 48}, 2, x.data());
  return x;
}

struct Division {
  int ranks, inside;
};

class LowRank : public testing::TestWithParam<Division> {};

// What the rank allows arrives whole, in the first step and with what later ones begin with.
TEST_P(LowRank, ASumOfThatRankIsExactOnAllRanks) {
  std::vector<std::vector<Floats>> results(static_cast<size_t>(GetParam().ranks));
  run_world(
      all_media()[0], GetParam().ranks,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 3; ++step)
          results[static_cast<size_t>(rank)].push_back(reduce(context, narrow(rank), 2));
      },
      groups_of(GetParam().inside));
  for (size_t step = 0; step < 3; ++step) {
    for (size_t i = 0; i < kCount; ++i) {
      double mean = 0;
      for (int rank = 0; rank < GetParam().ranks; ++rank) mean += narrow(rank)[i] / GetParam().ranks;
      ASSERT_NEAR(results[0][step][i], mean, 1e-5) << "step " << step << ", element " << i;
    }
    for (const auto& mine : results) EXPECT_EQ(mine[step], results[0][step]);
  }
}

// What is left out of one step comes with later ones: over all steps and a last one without a codec nothing is missing.
TEST_P(LowRank, WhatIsLeftOutIsKept) {
  constexpr int kSteps = 5;
  const auto gradient = [](int step, int rank) { return noise(static_cast<uint64_t>(100 * step + rank), kCount); };
  Floats missing(kCount);
  double before_last = 0, all = 0;
  run_world(
      all_media()[0], GetParam().ranks,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step <= kSteps; ++step) {
          const perseus_codec codec = step < kSteps ? PERSEUS_CODEC_POWERSGD : PERSEUS_CODEC_EXACT;
          const Floats result = reduce(context, gradient(step, rank), codec == PERSEUS_CODEC_EXACT ? 0 : 3, codec);
          if (rank != 0) continue;
          for (size_t i = 0; i < kCount; ++i) missing[i] -= result[i];
          for (int r = 0; r < GetParam().ranks; ++r) {
            const Floats given = gradient(step, r);
            for (size_t i = 0; i < kCount; ++i) missing[i] += given[i] / static_cast<float>(GetParam().ranks);
          }
          if (step == kSteps - 1) before_last = norm(missing);
          all += norm(gradient(step, 0));
        }
      },
      groups_of(GetParam().inside));
  EXPECT_GT(before_last, 0.05 * all) << "the codec left nothing out";
  EXPECT_LT(norm(missing), 1e-5 * all);
}

INSTANTIATE_TEST_SUITE_P(Worlds, LowRank,
                         testing::Values(Division{2, 1}, Division{3, 1}, Division{4, 2}, Division{6, 2}),
                         [](const auto& param) {
                           return std::to_string(param.param.ranks) + "in" + std::to_string(param.param.inside);
                         });

TEST(LowRankSum, WhatIsNotFiniteIsNanEverywhereAndForgottenAfterwards) {
  run_world(
      all_media()[0], 2,
      [](int rank, perseus_context* context) {
        reduce(context, noise(static_cast<uint64_t>(rank), kCount), 2);
        for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
          Floats x = narrow(rank);
          if (rank == 1) x[77] = bad;
          for (float each : reduce(context, x, 2)) ASSERT_TRUE(std::isnan(each));
          const Floats after = reduce(context, narrow(rank), 2);
          for (size_t i = 0; i < kCount; ++i)
            ASSERT_NEAR(after[i], (static_cast<double>(narrow(0)[i]) + narrow(1)[i]) / 2, 1e-5);
        }
      },
      groups_of(1));
}

// A gradient that is zero for a step does not stay zero.
TEST(LowRankSum, BeginsAnewWhereASumWasZero) {
  run_world(
      all_media()[0], 2,
      [](int rank, perseus_context* context) {
        for (float each : reduce(context, Floats(kCount), 2)) ASSERT_EQ(each, 0.0F);
        const Floats after = reduce(context, narrow(rank), 2);
        for (size_t i = 0; i < kCount; ++i)
          ASSERT_NEAR(after[i], (static_cast<double>(narrow(0)[i]) + narrow(1)[i]) / 2, 1e-5);
      },
      groups_of(1));
}

TEST(LowRankSum, FactorsTypesAndWhatDoesNotPay) {
  run_world(
      all_media()[0], 2,
      [](int rank, perseus_context* context) {
        // A vector, float64, and two tensors in one request; the setting's rank.
        const int64_t shape[] = {64, 48}, length = 3000;
        std::vector<double> wide(kCount);
        for (size_t i = 0; i < kCount; ++i) wide[i] = static_cast<double>(narrow(rank)[i]);
        Floats vector(3000, static_cast<float>(rank));
        perseus_tensor tensors[] = {{wide.data(), wide.data(), shape, 2, PERSEUS_FLOAT64},
                                    {vector.data(), vector.data(), &length, 1, PERSEUS_FLOAT32}};
        perseus_request request = request_for(tensors, 2, PERSEUS_CODEC_POWERSGD, 0);
        request.op = PERSEUS_SUM;
        request.prescale = 0.5;
        request.postscale = 8.0;
        const Outcome outcome = run(context, request);
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        for (size_t i = 0; i < kCount; ++i)
          ASSERT_NEAR(wide[i], 4.0 * (static_cast<double>(narrow(0)[i]) + narrow(1)[i]), 1e-4);
        for (float each : vector) ASSERT_EQ(each, 4.0F);
      },
      groups_of(1, "PERSEUS_POWERSGD_RANK=2"));
}

TEST(LowRankSum, OnlyTheNarrowMatricesTravel) {
  uint64_t bytes = 0;
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 2; ++step) {
          perseus_stats before{}, after{};
          before.struct_size = after.struct_size = sizeof before;
          perseus_context_stats(context, &before);
          reduce(context, noise(static_cast<uint64_t>(rank), kCount), 4);
          perseus_context_stats(context, &after);
          if (rank == 0) bytes = after.shm_bytes_sent - before.shm_bytes_sent;
        }
      },
      groups_of(1));
  EXPECT_GT(bytes, 4U * 4 * (64 + 48));
  EXPECT_LT(bytes, 4U * 4 * (64 + 48) + 1000);
}

// A mean, a sum, and a step that sends the rest: with what earlier ones have left out, as they would have counted it.
TEST(LowRankSum, WhatIsHeldKeepsItsWeightWhenTheFactorChanges) {
  const auto gradient = [](int step, int rank) { return noise(static_cast<uint64_t>(100 * step + rank), kCount); };
  Floats missing(kCount);
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 5; ++step) {
          Floats x = gradient(step, rank);
          const perseus_tensor tensor{x.data(), x.data(), kShape, 3, PERSEUS_FLOAT32};
          const bool last = step == 4;
          perseus_request request =
              request_for(&tensor, 1, last ? PERSEUS_CODEC_EXACT : PERSEUS_CODEC_POWERSGD, last ? 0 : 2);
          request.op = step < 2 ? PERSEUS_AVERAGE : PERSEUS_SUM;
          request.postscale = step < 3 ? 1 : 8;
          const Outcome outcome = run(context, request);
          EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          const float factor = step < 2 ? 0.5F : static_cast<float>(request.postscale);
          for (size_t i = 0; rank == 0 && i < kCount; ++i)
            missing[i] += factor * (gradient(step, 0)[i] + gradient(step, 1)[i]) - x[i];
        }
      },
      groups_of(1));
  EXPECT_LT(norm(missing), 1e-4 * norm(gradient(0, 0)));
}

// As many elements, but neither what is held nor the vectors of the step before are theirs.
TEST(LowRankSum, OfAnotherShapeBeginsAnew) {
  constexpr int64_t kOther[] = {48, 64};
  std::vector<Floats> results[2];  // without and with a step of the first shape
  for (const bool changes : {false, true})
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          if (changes) reduce(context, noise(static_cast<uint64_t>(rank), kCount), 2);
          for (int step = 1; step < 3; ++step) {
            Floats x = noise(static_cast<uint64_t>(100 * step + rank), kCount);
            const perseus_tensor tensor{x.data(), x.data(), kOther, 2, PERSEUS_FLOAT32};
            const Outcome outcome = run(context, request_for(&tensor, 1, PERSEUS_CODEC_POWERSGD, 2));
            EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            if (rank == 0) results[changes].push_back(x);
          }
        },
        groups_of(1));
  EXPECT_EQ(results[0], results[1]);
}

// What a rank has loaded has no vectors that others could go on with: a step without the codec makes all alike.
TEST(LowRankSum, ARankThatLoadsAResidualDoesNotSpoilTheOthers) {
  const auto gradient = [](int step, int rank) { return noise(static_cast<uint64_t>(100 * step + rank), kCount); };
  Floats missing(kCount);
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 6; ++step) {
          const bool last = step == 5;
          if (step == 3 && rank == 1) {
            perseus_residual residual{};
            residual.struct_size = sizeof residual;
            residual.gradient_of = 1;
            residual.name = "g";
            ASSERT_EQ(perseus_residual_read(context, &residual), PERSEUS_OK);
            ASSERT_EQ(residual.count, 2 * kCount);
            Floats held(residual.count);
            residual.data = held.data();
            ASSERT_EQ(perseus_residual_read(context, &residual), PERSEUS_OK);
            ASSERT_EQ(perseus_residual_write(context, &residual), PERSEUS_OK);
          }
          const Floats result =
              reduce(context, gradient(step, rank), last ? 0 : 3, last ? PERSEUS_CODEC_EXACT : PERSEUS_CODEC_POWERSGD);
          if (rank != 0) continue;
          for (size_t i = 0; i < kCount; ++i)
            missing[i] += (gradient(step, 0)[i] + gradient(step, 1)[i]) / 2 - result[i];
        }
      },
      groups_of(1));
  EXPECT_LT(norm(missing), 1e-4 * norm(gradient(0, 0)));
}

}  // namespace
