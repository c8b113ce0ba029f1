// Allreduces and broadcasts in stages: inside groups, across them, back.
#include "operation.h"
#include "reduce_order.h"
#include "topology/levels.h"

namespace {

using namespace perseus_test;
using perseus::divide;
using perseus::Levels;
using perseus::LevelSettings;

// ---- the topology ----

TEST(Levels, UnevenHostsHaveAsManyShardsAsTheSmallest) {
  const std::vector<int> hosts = {0, 0, 0, 3};
  for (int me = 0; me < 4; ++me) {
    const Levels levels = divide(hosts, me, LevelSettings());
    EXPECT_EQ(levels.shards, 1);
    EXPECT_EQ(levels.groups, 2);
    EXPECT_EQ(levels.inner, me < 3 ? (std::vector<int>{0, 1, 2}) : std::vector<int>{3});
    EXPECT_EQ(levels.across, me == 0 || me == 3 ? (std::vector<int>{0, 3}) : std::vector<int>{});
    EXPECT_EQ(levels.carries(), me == 0 || me == 3);
    EXPECT_EQ(levels.home, (std::vector<int>{0, 0, 0, 1}));
    EXPECT_TRUE(levels.divided());
  }
}

TEST(Levels, RanksOfAHostNeedNotBeNeighbours) {
  const std::vector<int> hosts = {0, 1, 0, 1};
  const Levels levels = divide(hosts, 3, LevelSettings());
  EXPECT_EQ(levels.inner, (std::vector<int>{1, 3}));
  EXPECT_EQ(levels.inner_me, 1);
  EXPECT_EQ(levels.across, (std::vector<int>{2, 3}));
  EXPECT_EQ(levels.across_me, 1);
  EXPECT_EQ(levels.home, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(levels.shards, 2);
}

TEST(Levels, InnerGroupsCanBeSmallerThanHosts) {
  LevelSettings settings;
  settings.most_inner = 2;
  const std::vector<int> hosts = {0, 0, 0, 0, 4, 4};
  EXPECT_EQ(divide(hosts, 3, settings).inner, (std::vector<int>{2, 3}));
  EXPECT_EQ(divide(hosts, 3, settings).across, (std::vector<int>{1, 3, 5}));
  settings.one_shard = true;
  EXPECT_EQ(divide(hosts, 2, settings).across, (std::vector<int>{0, 2, 4}));
  EXPECT_FALSE(divide(hosts, 3, settings).carries());
}

TEST(Levels, OneHostOrOneRankEachIsNoDivision) {
  EXPECT_FALSE(divide({0, 0, 0}, 1, LevelSettings()).divided());
  EXPECT_FALSE(divide({0, 1, 2}, 1, LevelSettings()).divided());
  EXPECT_EQ(divide({0, 1, 2}, 1, LevelSettings()).across, (std::vector<int>{0, 1, 2}));
}

// ---- exact reductions, over media that connect the ranks of a host ----

struct Shape2D {
  int size, inner;
  bool one_shard;
  int algorithm = 0;  // across

  int groups() const { return (size + inner - 1) / inner; }
  int shards() const { return one_shard ? 1 : size % inner == 0 ? inner : size % inner; }
};
constexpr Shape2D kShapes[] = {{4, 2, false}, {4, 2, true},     {3, 2, false},    {4, 3, false},  {7, 3, false},
                               {8, 4, true},  {8, 2, false, 1}, {8, 3, false, 2}, {7, 2, true, 3}};

class Hierarchical : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(std::get<0>(GetParam()))]; }
  Shape2D shape() const { return kShapes[std::get<1>(GetParam())]; }
  WorldOptions options() const {
    WorldOptions options;
    options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=" + std::to_string(shape().inner),
                         std::string("PERSEUS_ALLREDUCE_MODE=") + (shape().one_shard ? "1" : "auto"),
                         std::string("PERSEUS_ALLREDUCE_ALGORITHM=") + kAlgorithms[shape().algorithm]};
    return options;
  }
};

// Which part of a ring across holds element `i` of `count`.
size_t part_of(const Shape2D& shape, size_t count, size_t element_bytes, size_t i) {
  const size_t bytes = count * element_bytes, at = i * element_bytes;
  const size_t shard = part_bytes(bytes, static_cast<size_t>(shape.shards())), begin = at / shard * shard;
  return (at - begin) / part_bytes(std::min(shard, bytes - begin), static_cast<size_t>(shape.groups()));
}

// One element: inside every group in rank order, then across the groups.
template <typename Type>
typename Type::Stored staged(Type type, const Reduction& how, const std::vector<typename Type::Stored>& values,
                             const Shape2D& shape, size_t part) {
  using Acc = typename Type::Acc;
  const perseus_reduce_op op = how.op == PERSEUS_AVERAGE ? PERSEUS_SUM : how.op;
  const int size = static_cast<int>(values.size());
  std::vector<typename Type::Stored> groups;
  for (int begin = 0; begin < size; begin += shape.inner)
    groups.push_back(
        reduced(type, Reduction{op, how.prescale, 1.0}, &values[begin], std::min(shape.inner, size - begin)));
  const int count = static_cast<int>(groups.size());
  const int divisor = how.op == PERSEUS_AVERAGE ? size : 1;
  if (shape.algorithm != 0)
    return reduced_by(type, kAlgorithms[shape.algorithm], Reduction{op, 1.0, how.postscale}, part, groups, divisor);
  if constexpr (std::is_integral_v<Acc> && !std::is_same_v<Type, Truth> && !std::is_same_v<Type, Half>) {
    const Acc sum = reduced(type, Reduction{op, 1.0, 1.0}, groups.data(), count);
    if (how.postscale == 1.0) return static_cast<Acc>(sum / static_cast<Acc>(divisor));
    return truncated<Acc>(static_cast<double>(sum) * how.postscale / divisor);
  } else {
    return reduced(type, Reduction{op, 1.0, how.postscale / divisor}, groups.data(), count);
  }
}

// Of all elements; computed once, whichever rank comes first.
class Expected {
 public:
  const Bytes& get(perseus_dtype dtype, const Reduction& how, uint64_t seed, const Shape2D& shape, size_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    Bytes& bytes = bytes_[seed];
    if (!bytes.empty()) return bytes;
    bytes.resize(count * size_of(dtype));
    with_type(dtype, [&](auto type) {
      using Stored = typename decltype(type)::Stored;
      std::vector<std::vector<Stored>> inputs(static_cast<size_t>(shape.size), std::vector<Stored>(count));
      for (int r = 0; r < shape.size; ++r) fill(dtype, seed, r, 0, count, inputs[r].data());
      std::vector<Stored> values(static_cast<size_t>(shape.size));
      for (size_t i = 0; i < count; ++i) {
        for (int r = 0; r < shape.size; ++r) values[r] = inputs[r][i];
        const size_t part = shape.algorithm == 2 ? part_of(shape, count, sizeof(Stored), i) : 0;
        reinterpret_cast<Stored*>(bytes.data())[i] = staged(type, how, values, shape, part);
      }
    });
    return bytes;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, Bytes> bytes_;
};

TEST_P(Hierarchical, GivesTheBitsOfItsStagesForEveryDtypeAndReduction) {
  const Shape2D shape = this->shape();
  if (shape.algorithm != 0 && std::get<0>(GetParam()) != 0 && !full_grid())
    GTEST_SKIP() << "PERSEUS_TEST_FULL=1 runs this over every medium";
  if (thin_grid() && (std::get<0>(GetParam()) + std::get<1>(GetParam())) % 2 != 0)
    GTEST_SKIP() << "PERSEUS_TEST_FULL=1 runs this over every medium";
  Expected expected;
  constexpr size_t kCount = 35001;  // above the size up to which all ranks exchange alike, for every dtype
  run_world(
      medium(), shape.size,
      [&](int rank, perseus_context* context) {
        for (perseus_dtype dtype : kDTypes)
          for (perseus_reduce_op op : kReductions) {
            if (dtype == PERSEUS_BOOL && op == PERSEUS_AVERAGE) continue;
            // float32, int8, int64
            if ((thin_grid() || (shape.algorithm != 0 && !full_grid())) && dtype % 3 != 2) continue;
            if (left_out(dtype, op)) continue;
            const uint64_t seed = dtype * 10U + op;
            Reduction how{op, op == PERSEUS_SUM ? 0.5 : 1.0, op == PERSEUS_SUM ? 3.0 : 1.0};
            const bool in_place = (dtype + op) % 2 == 0;
            Bytes input(kCount * size_of(dtype)), output(input.size(), 0xa5);
            fill(dtype, seed, rank, 0, kCount, input.data());
            const int64_t count = kCount;
            const perseus_tensor tensor{input.data(), in_place ? input.data() : output.data(), &count, 1, dtype};
            perseus_request request = request_of(PERSEUS_ALLREDUCE, "t", &tensor, 1);
            request.op = op;
            request.prescale = how.prescale;
            request.postscale = how.postscale;
            request.transient = 1;
            const Outcome outcome = run(context, request);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            const Bytes& bits = expected.get(dtype, how, seed, shape, kCount);
            const auto* got = static_cast<const unsigned char*>(tensor.output);
            const size_t at = static_cast<size_t>(std::mismatch(bits.begin(), bits.end(), got).first - bits.begin());
            ASSERT_EQ(at, bits.size()) << name_of(dtype) << " " << name_of(op) << " rank " << rank
                                       << ": first wrong element " << at / size_of(dtype);
          }
      },
      options());
}

TEST_P(Hierarchical, FusedAndGroupedTensorsAndProcessSetsWork) {
  const Shape2D shape = this->shape();
  std::deque<Operation> operations;
  for (int i = 0; i < 12; ++i) {
    // Whole numbers below 256 in int64: whatever the order, the sum is the same.
    Operation& o = operations.emplace_back(
        PERSEUS_ALLREDUCE, "t" + std::to_string(i), ranks_up_to(shape.size),
        std::vector<Operation::Tensor>(static_cast<size_t>(1 + i % 3), {PERSEUS_INT64, {4000 + i * 1777}}));
    o.seed = static_cast<uint64_t>(i);
    o.in_place = i % 2 == 0;
  }
  run_world(
      medium(), shape.size,
      [&](int rank, perseus_context* context) {
        std::deque<Call> calls;
        for (size_t i = 0; i < operations.size(); ++i) {
          // Every rank in an order of its own.
          const size_t turned = (i + static_cast<size_t>(rank) * 5) % operations.size();
          ASSERT_EQ(calls.emplace_back(operations[turned], rank).submit(context).code, PERSEUS_OK);
        }
        for (Call& call : calls) call.finish(context);
      },
      options());
}

// Small tensors go among all ranks alike, and a large one goes in parts over several streams.
TEST_P(Hierarchical, BroadcastsReachEverybodyFromEveryRoot) {
  const Shape2D shape = this->shape();
  std::deque<Operation> operations;
  for (int root = 0; root < shape.size; ++root)
    for (const bool in_place : {false, true}) {
      Operation& o = operations.emplace_back(PERSEUS_BROADCAST, "b" + std::to_string(operations.size()),
                                             ranks_up_to(shape.size), std::vector<Operation::Tensor>());
      o.tensors = {{PERSEUS_FLOAT32, {11}}, {PERSEUS_UINT8, {40009}}, {PERSEUS_FLOAT64, {30011}}, {PERSEUS_BOOL, {0}}};
      if (root == 1) o.tensors.push_back({PERSEUS_FLOAT16, {5 * 1024 * 1024 + 3}});
      o.root = root;
      o.in_place = in_place;
      o.seed = operations.size();
    }
  run_world(
      medium(), shape.size,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 2; ++step) {
          std::deque<Call> calls;
          for (const Operation& operation : operations)
            ASSERT_EQ(calls.emplace_back(operation, rank).submit(context).code, PERSEUS_OK);
          for (Call& call : calls) call.finish(context);
        }
      },
      options());
}

INSTANTIATE_TEST_SUITE_P(Worlds, Hierarchical,
                         testing::Combine(testing::Range(0, 2),
                                          testing::Range(0, static_cast<int>(std::size(kShapes)))),
                         [](const auto& info) {
                           const Shape2D shape = kShapes[std::get<1>(info.param)];
                           return std::string(all_media()[static_cast<size_t>(std::get<0>(info.param))].name) +
                                  std::to_string(shape.size) + "by" + std::to_string(shape.inner) +
                                  (shape.one_shard ? "one" : "") +
                                  (shape.algorithm == 0 ? "" : kAlgorithms[shape.algorithm]);
                         });

}  // namespace
