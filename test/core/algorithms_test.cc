// Allreduces by halving-doubling, ring and recursive doubling: bits, steps, cost, failure.
#include "collective/steps.h"
#include "operation.h"
#include "reduce_order.h"
#include "topology/allreduce_cost.h"

namespace {

using namespace perseus_test;
using perseus::Algorithm;
using perseus::AlgorithmChoice;
using perseus::allreduce_cost;
using perseus::LinkCost;
using perseus::Step;

std::vector<std::string> setting(const std::string& algorithm) { return {"PERSEUS_ALLREDUCE_ALGORITHM=" + algorithm}; }

// ---- steps ----

std::vector<Step> steps_of(Algorithm algorithm, size_t bytes, int members, int me) {
  std::vector<Step> steps;
  if (algorithm == Algorithm::kHalvingDoubling) perseus::halving_doubling_steps(bytes, members, me, &steps);
  if (algorithm == Algorithm::kRecursiveDoubling) perseus::recursive_doubling_steps(bytes, members, me, &steps);
  if (algorithm == Algorithm::kRing) {
    std::vector<size_t> parts(static_cast<size_t>(members));
    perseus::even_parts(bytes, &parts);
    perseus::ring_steps(parts, me, &steps);
  }
  return steps;
}

TEST(Steps, AMemberSendsAsManyBytesInAsManyStepsAsTheArithmeticSays) {
  constexpr size_t kBytes = 64 * 840;
  for (int n : {2, 3, 4, 5, 7, 8, 12, 16, 33}) {
    int rounds = 0;
    while (2 << rounds <= n) ++rounds;
    const size_t power = size_t{1} << rounds, extra = 1u << rounds == static_cast<unsigned>(n) ? 0 : 1;
    for (Algorithm algorithm : {Algorithm::kHalvingDoubling, Algorithm::kRing, Algorithm::kRecursiveDoubling}) {
      size_t most_steps = 0, most_sent = 0;
      for (int me = 0; me < n; ++me) {
        size_t sent = 0;
        const std::vector<Step> steps = steps_of(algorithm, kBytes, n, me);
        for (const Step& step : steps) sent += step.to >= 0 ? step.send.bytes : 0;
        most_steps = std::max(most_steps, steps.size());
        most_sent = std::max(most_sent, sent);
      }
      const size_t others = static_cast<size_t>(n) - 1, slack = 64 * 2 * others;
      size_t want_steps = 0, want_sent = 0;
      if (algorithm == Algorithm::kRing) {
        want_steps = 2 * others;
        want_sent = 2 * others * kBytes / static_cast<size_t>(n);
      } else if (algorithm == Algorithm::kHalvingDoubling) {
        want_steps = 2 * static_cast<size_t>(rounds) + 2 * extra;
        want_sent = 2 * (power - 1) * kBytes / power + extra * kBytes;
      } else {
        want_steps = static_cast<size_t>(rounds) + 2 * extra;
        want_sent = (static_cast<size_t>(rounds) + extra) * kBytes;
      }
      EXPECT_EQ(most_steps, want_steps) << n << " members, algorithm " << static_cast<int>(algorithm);
      EXPECT_NEAR(static_cast<double>(most_sent), static_cast<double>(want_sent), static_cast<double>(slack)) << n;
    }
  }
}

// ---- cost ----

TEST(AllreduceCost, ChoosesBySizeAndMembers) {
  const AlgorithmChoice choice;
  const auto chosen = [&](int members, size_t bytes) {
    const Algorithm of_tensor = choice.of_tensor(members, bytes, perseus::kTcpCost);
    return choice.of_bucket(of_tensor, members, bytes, perseus::kTcpCost);
  };
  for (size_t bytes : {size_t{4}, size_t{4096}, size_t{65536}, size_t{1} << 24})
    for (int members : {2, 3, 4, 8, 12})
      EXPECT_EQ(chosen(members, bytes), Algorithm::kPairwise) << members << " " << bytes;
  EXPECT_EQ(chosen(256, 4), Algorithm::kRecursiveDoubling);
  EXPECT_EQ(chosen(256, 1 << 20), Algorithm::kHalvingDoubling);
  EXPECT_EQ(chosen(256, size_t{1} << 32), Algorithm::kPairwise) << "the wire is all that counts";
  // More latency, fewer steps; none at all, fewest bytes.
  EXPECT_EQ(choice.of_tensor(64, 1 << 16, LinkCost{0, 1e-6, 1e-9, 0}), Algorithm::kHalvingDoubling);
  EXPECT_EQ(choice.of_tensor(64, 1 << 16, LinkCost{1e-3, 1e-6, 1e-9, 0}), Algorithm::kPairwise);
}

TEST(AllreduceCost, WhatIsWantedIsUsed) {
  for (Algorithm algorithm :
       {Algorithm::kPairwise, Algorithm::kHalvingDoubling, Algorithm::kRing, Algorithm::kRecursiveDoubling}) {
    const AlgorithmChoice choice(algorithm);
    EXPECT_EQ(choice.of_tensor(300, 4, perseus::kTcpCost), algorithm);
    EXPECT_EQ(choice.of_bucket(algorithm, 300, 4, perseus::kTcpCost), algorithm);
  }
}

// ---- bits ----

// Nothing, one, odd, less than a part each, more than a message, many messages.
constexpr int64_t kCounts[] = {0, 1, 13, 257, 4099, 30011, 100003};

class Algorithms : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(std::get<0>(GetParam()))]; }
  int size() const { return std::get<1>(GetParam()); }
  // Every medium meets every algorithm and every size, and every size every algorithm.
  std::vector<std::string> algorithms() const {
    if (full_grid()) return {"halving_doubling", "ring", "recursive_doubling"};
    return {kAlgorithms[1 + static_cast<size_t>(std::get<0>(GetParam()) + size()) % 3]};
  }
};

struct Case {
  perseus_dtype dtype;
  Reduction how;
  bool in_place;
  std::vector<int64_t> counts;  // of tensors in one request
};

Bytes expected(const Case& c, const std::string& algorithm, size_t tensor, uint64_t seed, int size) {
  const size_t count = static_cast<size_t>(c.counts[tensor]), bytes = count * size_of(c.dtype);
  Bytes result(bytes);
  with_type(c.dtype, [&](auto type) {
    using Stored = typename decltype(type)::Stored;
    std::vector<std::vector<Stored>> inputs(static_cast<size_t>(size), std::vector<Stored>(count));
    for (int r = 0; r < size; ++r) fill(c.dtype, seed + tensor, r, 0, count, inputs[static_cast<size_t>(r)].data());
    std::vector<Stored> values(static_cast<size_t>(size));
    for (size_t i = 0; i < count; ++i) {
      for (size_t r = 0; r < values.size(); ++r) values[r] = inputs[r][i];
      reinterpret_cast<Stored*>(result.data())[i] =
          reduced_by(type, algorithm, c.how, i * sizeof(Stored) / part_bytes(bytes, values.size()), values,
                     c.how.op == PERSEUS_AVERAGE ? size : 1);
    }
  });
  return result;
}

// All requests of `cases` at once, every rank in an order of its own: what shares a bucket is chance.
void run_cases(const Medium& medium, int size, const std::vector<Case>& cases, const std::string& algorithm) {
  std::vector<std::vector<Bytes>> results;
  for (size_t i = 0; i < cases.size(); ++i) {
    results.emplace_back();
    for (size_t t = 0; t < cases[i].counts.size(); ++t)
      results.back().push_back(expected(cases[i], algorithm, t, 64 * (i + 1), size));
  }
  WorldOptions options;
  options.overrides = setting(algorithm);
  run_world(
      medium, size,
      [&](int rank, perseus_context* context) {
        std::vector<std::vector<Bytes>> inputs(cases.size()), outputs(cases.size());
        std::vector<perseus_handle> handles(cases.size());
        for (size_t turn = 0; turn < cases.size(); ++turn) {
          const size_t i = (turn + static_cast<size_t>(rank) * 5) % cases.size();
          const Case& c = cases[i];
          std::vector<perseus_tensor> tensors;
          for (size_t t = 0; t < c.counts.size(); ++t) {
            inputs[i].emplace_back(static_cast<size_t>(c.counts[t]) * size_of(c.dtype));
            fill(c.dtype, 64 * (i + 1) + t, rank, 0, static_cast<size_t>(c.counts[t]), inputs[i][t].data());
            outputs[i].emplace_back(inputs[i][t].size());
          }
          for (size_t t = 0; t < c.counts.size(); ++t)
            tensors.push_back({inputs[i][t].data(), c.in_place ? inputs[i][t].data() : outputs[i][t].data(),
                               &c.counts[t], 1, c.dtype});
          const std::string name = "t" + std::to_string(i);
          perseus_request request =
              request_of(PERSEUS_ALLREDUCE, name.c_str(), tensors.data(), static_cast<int>(tensors.size()));
          request.op = c.how.op;
          request.prescale = c.how.prescale;
          request.postscale = c.how.postscale;
          const Outcome outcome = submit(context, request, &handles[i]);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        }
        for (size_t i = 0; i < cases.size(); ++i) {
          const Outcome outcome = wait(context, handles[i]);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          for (size_t t = 0; t < cases[i].counts.size(); ++t) {
            const Bytes& got = cases[i].in_place ? inputs[i][t] : outputs[i][t];
            const size_t at =
                static_cast<size_t>(std::mismatch(got.begin(), got.end(), results[i][t].begin()).first - got.begin());
            EXPECT_EQ(at, got.size()) << algorithm << " " << name_of(cases[i].dtype) << " " << name_of(cases[i].how.op)
                                      << " of " << cases[i].counts[t] << ", rank " << rank << ": first wrong element "
                                      << at / size_of(cases[i].dtype);
          }
          perseus_handle_release(context, handles[i]);
        }
      },
      options);
}

TEST_P(Algorithms, GiveTheBitsOfTheirOrderForEveryDtypeReductionAndSize) {
  if (kThreadSanitizer && thin_grid() && (size() == 2 || size() == 7))
    GTEST_SKIP() << "PERSEUS_TEST_FULL=1 runs this at every number of ranks";
  constexpr double kScales[][2] = {{1, 1}, {0.5, 1}, {1, 1.0 / 3}, {1.25, 3}};
  for (const std::string& algorithm : algorithms()) {
    std::vector<Case> cases;
    for (perseus_dtype dtype : kDTypes)
      for (perseus_reduce_op op : kReductions) {
        if (dtype == PERSEUS_BOOL && op == PERSEUS_AVERAGE) continue;
        if (thin_grid() && dtype % 3 != 2) continue;  // float32, int8, int64
        if (left_out(dtype, op)) continue;
        for (size_t k = 0; k < (full_grid() ? std::size(kCounts) : 1); ++k) {
          const size_t i = dtype + 7 * op + k + static_cast<size_t>(std::get<0>(GetParam()) + size());
          const double* scale = kScales[i / 3 % 4];
          Case c{dtype, {op, scale[0], scale[1]}, i % 2 == 0, {kCounts[i % 7]}};
          if (i % 3 == 0) c.counts.push_back(kCounts[(i + 3) % 6]);  // shares a bucket
          cases.push_back(c);
        }
      }
    run_cases(medium(), size(), cases, algorithm);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Algorithms, testing::Combine(testing::Range(0, 3), testing::Values(2, 3, 4, 7, 8)),
                         [](const auto& info) {
                           return std::string(all_media()[static_cast<size_t>(std::get<0>(info.param))].name) +
                                  std::to_string(std::get<1>(info.param));
                         });

// ---- the rest ----

// Whole numbers whose sums are exact: every algorithm must agree with float64 to the last bit, on one rank, too.
TEST(AlgorithmSettings, AllGiveWhatFloat64GivesWhereNothingIsRounded) {
  for (const char* algorithm : {"auto", "pairwise", "halving_doubling", "ring", "recursive_doubling"})
    for (int size : {1, 3}) {
      WorldOptions options;
      options.overrides = setting(algorithm);
      run_world(
          all_media()[0], size,
          [&](int rank, perseus_context* context) {
            constexpr int64_t kCount = 70001;
            std::vector<float> values(kCount);
            for (size_t i = 0; i < values.size(); ++i)
              values[i] = static_cast<float>(static_cast<int>(i % 1000) * (rank + 1) - 500);
            const perseus_tensor tensor{values.data(), values.data(), &kCount, 1, PERSEUS_FLOAT32};
            const Outcome outcome = run(context, request_of(PERSEUS_ALLREDUCE, "t", &tensor, 1));
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            for (size_t i = 0; i < values.size(); ++i) {
              double sum = 0;
              for (int r = 0; r < size; ++r) sum += static_cast<int>(i % 1000) * (r + 1) - 500;
              ASSERT_EQ(static_cast<double>(values[i]), sum) << algorithm << " of " << size << " ranks, element " << i;
            }
          },
          options);
    }
}

// A large tensor may be cut into parts for several streams, but not so that it changes the bits.
TEST(AlgorithmSettings, BitsDoNotDependOnTheNumberOfStreams) {
  const Medium tcp = all_media()[2];
  constexpr int64_t kCount = 9 * 1024 * 1024 / 4 + 5;
  for (const char* algorithm : {"pairwise", "halving_doubling", "ring"}) {
    Bytes results[2];
    for (const bool several : {false, true}) {
      WorldOptions options;
      options.overrides = setting(algorithm);
      options.overrides.push_back(several ? "PERSEUS_ALLREDUCE_STREAMS=4" : "PERSEUS_ALLREDUCE_STREAMS=1");
      run_world(
          tcp, 3,
          [&](int rank, perseus_context* context) {
            Bytes values(kCount * 4);
            fill(PERSEUS_FLOAT32, 5, rank, 0, kCount, values.data());
            const perseus_tensor tensor{values.data(), values.data(), &kCount, 1, PERSEUS_FLOAT32};
            const Outcome outcome = run(context, request_of(PERSEUS_ALLREDUCE, "t", &tensor, 1));
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            if (rank == 1) results[several] = values;
          },
          options);
    }
    EXPECT_TRUE(results[0] == results[1]) << algorithm;
  }
}

TEST(AlgorithmSettings, WhatIsNoneIsRefused) {
  perseus_context* context = nullptr;
  EXPECT_EQ(create_context(all_media()[0], unique_name(), 0, 1, 0, setting("tree"), &context),
            PERSEUS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(perseus_error_message()).find("PERSEUS_ALLREDUCE_ALGORITHM='tree'"), std::string::npos)
      << perseus_error_message();
}

// A rank that leaves while the others are in the middle of steps that lead to it ends them all.
TEST(AlgorithmSettings, ARankThatEndsEndsTheOperationForAll) {
  for (const char* algorithm : {"halving_doubling", "ring", "recursive_doubling"})
    for (const Medium& medium : all_media()) {
      WorldOptions options;
      options.overrides = setting(algorithm);
      run_world(
          medium, 4,
          [&](int rank, perseus_context* context) {
            std::vector<float> values(1 << 19, 1.0F);
            const int64_t count = static_cast<int64_t>(values.size());
            const perseus_tensor tensor{values.data(), values.data(), &count, 1, PERSEUS_FLOAT32};
            perseus_handle handle = 0;
            for (int i = 0;; ++i) {
              const std::string name = "t" + std::to_string(i);
              Outcome outcome = submit(context, request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1), &handle);
              if (outcome.code == PERSEUS_OK && rank == 2 && i == 1) {
                perseus_context_shutdown(context);  // after which nobody reads the buffers
                return;
              }
              if (outcome.code == PERSEUS_OK) outcome = wait(context, handle);
              if (outcome.code == PERSEUS_OK) continue;
              EXPECT_NE(outcome.code, PERSEUS_IN_PROGRESS) << algorithm << " over " << medium.name << " hangs";
              return;
            }
          },
          options);
    }
}

}  // namespace
