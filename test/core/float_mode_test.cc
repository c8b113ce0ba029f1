// Loops outside of the kernels, on a thread that flushes denormals, as frameworks let scripts ask for: the same bits
// as on any other thread.
#include <cmath>
#include <vector>

#include "collective/float_staging.h"
#include "compression/residuals.h"
#include "operation.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

using namespace perseus_test;
using Floats = std::vector<float>;

constexpr float kTiny = 1e-40F;  // a denormal

class FlushesDenormals {
 public:
  FlushesDenormals() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | 0x8040); }
  ~FlushesDenormals() { _mm_setcsr(mode_); }
  FlushesDenormals(const FlushesDenormals&) = delete;
  FlushesDenormals& operator=(const FlushesDenormals&) = delete;

 private:
  const unsigned int mode_;
};

// Different everywhere.
Floats tiny(size_t count, int rank) {
  Floats x(count);
  for (size_t i = 0; i < count; ++i)
    x[i] = static_cast<float>(1 + (7 * i + 3 * static_cast<size_t>(rank)) % 97) * kTiny;
  return x;
}

TEST(FloatMode, DoesNotReachConversions) {
  const Floats expected = tiny(100, 1);
  std::vector<double> x(expected.begin(), expected.end()), back(x.size());
  perseus::FloatStaging staging;
  Floats memory;
  staging.start(perseus::DType::kFloat64);
  staging.add({reinterpret_cast<perseus::Byte*>(x.data()), reinterpret_cast<perseus::Byte*>(back.data()),
               x.size() * sizeof(double)});
  {
    const FlushesDenormals mode;
    staging.load(&memory);
    staging.store();
  }
  EXPECT_EQ(memory, expected);
  EXPECT_EQ(back, x);
}

TEST(FloatMode, DoesNotReachResiduals) {
  perseus::Residuals residuals;
  perseus::CompressionTerms terms;
  terms.codec.kind = perseus::CodecKind::kInt8;
  const std::string name = "g";
  const Floats sent = tiny(50, 0), owned = tiny(50, 1);
  Floats data = sent, expected(50);
  data.insert(data.end(), owned.begin(), owned.end());
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = sent[i] + owned[i] / 0.5F;
  residuals.write({1, 0, name}, data.data(), data.size(), {17, 0});
  const auto lease = residuals.take({1, 0, name}, {{50}}, terms, 17, perseus::Flush::kAmongAll, 0);
  {
    const FlushesDenormals mode;
    lease->join_parts(0.5F);
  }
  EXPECT_EQ(Floats(lease->sent(0), lease->sent(0) + 50), expected);
}

TEST(FloatMode, DoesNotReachLowRankSums) {
  constexpr int64_t kShape[] = {64, 48};
  WorldOptions options;
  options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1", "PERSEUS_POWERSGD_WARMUP_STEPS=0"};
  std::vector<Floats> results[2];
  for (const bool flushes : {false, true}) {
    results[flushes].resize(2);
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          Floats x = tiny(64 * 48, rank);
          const perseus_tensor tensor{x.data(), x.data(), kShape, 2, PERSEUS_FLOAT32};
          perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", &tensor, 1);
          request.op = PERSEUS_AVERAGE;
          request.gradient_of = 1;
          request.codec = PERSEUS_CODEC_POWERSGD;
          request.codec_argument = 2;
          std::unique_ptr<FlushesDenormals> mode;
          if (flushes && rank == 0) mode = std::make_unique<FlushesDenormals>();
          const Outcome outcome = run(context, request);
          mode.reset();
          EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          results[flushes][static_cast<size_t>(rank)] = x;
        },
        options);
    EXPECT_EQ(results[flushes][0], results[flushes][1]);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_NE(results[0][0][5], 0.0F);
}

}  // namespace

#endif
