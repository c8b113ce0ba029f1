// Adasum against the formula in long double, for any number of ranks; the same bits on all.
#include <cmath>
#include <mutex>
#include <random>

#include "base/half.h"
#include "operation.h"

namespace {

using namespace perseus_test;
using Numbers = std::vector<long double>;

class AdasumOf : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

float number(int rank, size_t tensor, size_t i) {
  return static_cast<float>(static_cast<int>((i * 7 + static_cast<size_t>(rank) * 13 + tensor * 5) % 23) - 11) / 8.0F;
}

Numbers pair(const Numbers& a, const Numbers& b) {
  long double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  Numbers sum(a.size());
  for (size_t i = 0; i < a.size(); ++i)
    sum[i] = (aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] + (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i];
  return sum;
}

Numbers expected(int ranks, size_t tensor, size_t n, double prescale, double postscale) {
  std::vector<Numbers> left;
  for (int rank = 0; rank < ranks; ++rank) {
    left.emplace_back();
    for (size_t i = 0; i < n; ++i) left.back().push_back(prescale * static_cast<long double>(number(rank, tensor, i)));
  }
  while (left.size() > 1) {
    std::vector<Numbers> next;
    for (size_t i = 0; i + 1 < left.size(); i += 2) next.push_back(pair(left[i], left[i + 1]));
    if (left.size() % 2 == 1) next.push_back(left.back());
    left = next;
  }
  for (long double& value : left[0]) value *= postscale;
  return left[0];
}

struct Case {
  perseus_dtype dtype;
  long double tolerance;
};
constexpr Case kCases[] = {
    {PERSEUS_FLOAT16, 4e-3L}, {PERSEUS_BFLOAT16, 3e-2L}, {PERSEUS_FLOAT32, 1e-5L}, {PERSEUS_FLOAT64, 1e-12L}};

size_t size_of(perseus_dtype dtype) { return dtype == PERSEUS_FLOAT64 ? 8 : dtype == PERSEUS_FLOAT32 ? 4 : 2; }

void put(perseus_dtype dtype, Bytes* bytes, size_t i, float value) {
  unsigned char* to = bytes->data() + i * size_of(dtype);
  const double wide = value;
  const uint16_t half = dtype == PERSEUS_FLOAT16 ? perseus::float_to_half(value) : perseus::float_to_bfloat16(value);
  if (dtype == PERSEUS_FLOAT64) std::memcpy(to, &wide, 8);
  else if (dtype == PERSEUS_FLOAT32) std::memcpy(to, &value, 4);
  else std::memcpy(to, &half, 2);
}

long double get(perseus_dtype dtype, const Bytes& bytes, size_t i) {
  const unsigned char* from = bytes.data() + i * size_of(dtype);
  double wide;
  float single;
  uint16_t half;
  if (dtype == PERSEUS_FLOAT64) return std::memcpy(&wide, from, 8), wide;
  if (dtype == PERSEUS_FLOAT32) return std::memcpy(&single, from, 4), single;
  std::memcpy(&half, from, 2);
  return dtype == PERSEUS_FLOAT16 ? perseus::half_to_float(half) : perseus::bfloat16_to_float(half);
}

TEST_P(AdasumOf, TensorsOfEverySizeAreCombinedAsTheFormulaSays) {
  const std::vector<size_t> counts{1, 0, 3, 1000, 20001, 17};
  for (int ranks : {1, 2, 3, 4, 5, 7}) {
    std::mutex mutex;
    std::map<std::pair<size_t, size_t>, Bytes> first;       // by case and tensor
    std::map<std::pair<bool, size_t>, Numbers> references;  // scaled or not, by tensor
    for (bool scaled : {false, true})
      for (size_t t = 0; t < counts.size(); ++t)
        references[{scaled, t}] = expected(ranks, t, counts[t], scaled ? 0.5 : 1.0, scaled ? 4.0 : 1.0);
    run_world(medium(), ranks, [&](int rank, perseus_context* context) {
      for (size_t c = 0; c < std::size(kCases); ++c) {
        const Case& kind = kCases[c];
        const bool scaled = c == 2;
        std::vector<Bytes> in, out;
        std::vector<int64_t> shapes(counts.begin(), counts.end());
        for (size_t t = 0; t < counts.size(); ++t) {
          in.emplace_back(counts[t] * size_of(kind.dtype));
          for (size_t i = 0; i < counts[t]; ++i) put(kind.dtype, &in[t], i, number(rank, t, i));
          out.push_back(in[t]);
        }
        // Half of them fused because they are ready together, half as one grouped operation; one in place.
        std::vector<perseus_tensor> tensors;
        for (size_t t = 0; t < counts.size(); ++t)
          tensors.push_back({t == 3 ? out[t].data() : in[t].data(), out[t].data(), &shapes[t], 1, kind.dtype});
        std::vector<perseus_handle> handles(4);
        for (size_t h = 0; h < 4; ++h) {
          const std::string name = "t" + std::to_string(h) + "." + std::to_string(c);
          perseus_request r = h < 3 ? request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensors[h], 1)
                                    : request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensors[3], 3);
          r.op = PERSEUS_ADASUM;
          r.prescale = scaled ? 0.5 : 1.0;
          r.postscale = scaled ? 4.0 : 1.0;
          const Outcome outcome = submit(context, r, &handles[h]);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        }
        for (perseus_handle handle : handles) {
          const Outcome outcome = wait(context, handle);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          perseus_handle_release(context, handle);
        }
        for (size_t t = 0; t < counts.size(); ++t) {
          const Numbers& reference = references.at({scaled, t});
          for (size_t i = 0; i < counts[t]; ++i)
            ASSERT_NEAR(get(kind.dtype, out[t], i), reference[i], kind.tolerance * (1 + std::abs(reference[i])))
                << "rank " << rank << " of " << ranks << ", case " << c << ", tensor " << t << ", element " << i;
          std::lock_guard<std::mutex> lock(mutex);
          const auto [found, is_new] = first.emplace(std::make_pair(c, t), out[t]);
          EXPECT_EQ(found->second, out[t]) << "the same bits on all ranks";
        }
      }
    });
  }
}

TEST_P(AdasumOf, ParallelVectorsAreAveragedAndOrthogonalOnesAdded) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    for (bool orthogonal : {false, true}) {
      std::vector<double> x{rank == 0 || !orthogonal ? 3.0 : 0.0, rank == 1 && orthogonal ? 5.0 : 0.0, 0.0};
      const int64_t shape[1] = {3};
      const perseus_tensor tensor{x.data(), x.data(), shape, 1, PERSEUS_FLOAT64};
      perseus_request r = request_of(PERSEUS_ALLREDUCE, "x", &tensor, 1);
      r.op = PERSEUS_ADASUM;
      ASSERT_EQ(run(context, r).code, PERSEUS_OK);
      EXPECT_EQ(x, orthogonal ? (std::vector<double>{3.0, 5.0, 0.0}) : (std::vector<double>{3.0, 0.0, 0.0}));
    }
  });
}

TEST_P(AdasumOf, BitsDependOnNoNeighbours) {
  constexpr int64_t kCounts[] = {1000, 777, 3, 2500};
  constexpr size_t kTensors = std::size(kCounts);
  const auto reduce = [&](const char* threshold) {
    std::vector<std::vector<double>> results(kTensors);
    WorldOptions options;
    options.overrides = {std::string("HOROVOD_FUSION_THRESHOLD=") + threshold};
    run_world(
        medium(), 3,
        [&](int rank, perseus_context* context) {
          std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
          std::uniform_real_distribution<double> noise(-1, 1);
          std::vector<std::vector<double>> x;
          std::vector<perseus_tensor> tensors;
          for (const int64_t& count : kCounts) {
            x.emplace_back(static_cast<size_t>(count));
            for (double& value : x.back()) value = noise(random);
            tensors.push_back({x.back().data(), x.back().data(), &count, 1, PERSEUS_FLOAT64});
          }
          perseus_request r = request_of(PERSEUS_ALLREDUCE, "x", tensors.data(), kTensors);
          r.op = PERSEUS_ADASUM;
          const Outcome outcome = run(context, r);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          if (rank == 0) results = x;
        },
        options);
    return results;
  };
  const auto fused = reduce("134217728"), single = reduce("0");
  for (size_t t = 0; t < kTensors; ++t) EXPECT_EQ(fused[t], single[t]) << "tensor " << t;
}

TEST_P(AdasumOf, WhatItCannotDoIsRefused) {
  run_world(medium(), 1, [&](int, perseus_context* context) {
    std::vector<int32_t> x{1, 2};
    const int64_t shape[1] = {2};
    const perseus_tensor tensor{x.data(), x.data(), shape, 1, PERSEUS_INT32};
    perseus_request r = request_of(PERSEUS_ALLREDUCE, "x", &tensor, 1);
    r.op = PERSEUS_ADASUM;
    Outcome outcome = run(context, r);
    EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
    EXPECT_EQ(outcome.message, "Adasum needs floating point tensors, got int32: use op=Sum.");
    r.kind = PERSEUS_REDUCESCATTER;
    EXPECT_EQ(run(context, r).code, PERSEUS_INVALID_ARGUMENT);
  });
}

INSTANTIATE_TEST_SUITE_P(Media, AdasumOf, each_medium(), medium_name);

}  // namespace
