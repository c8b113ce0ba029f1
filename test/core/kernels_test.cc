// Pins reduce and copy: for every variant this machine runs, the bits of a reference that goes element by element, and
// nearness to float64.
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "variants.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/error.h"
#include "base/half.h"

namespace perseus::kernels {
namespace {

using perseus_test::variants_here;

using Bytes = std::vector<unsigned char>;

// ---- the reference ------------------------------------------------------------------------------------------------

template <class T>
T read(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Rounded on its own: no multiplication may be joined with the addition after it.
template <class A>
A rounded(A value) {
  volatile A stored = value;
  return stored;
}

template <class A>
A float_reduce(const ReduceSpec& spec, const std::vector<A>& operands) {
  A pre = static_cast<A>(spec.prescale);
  A result = rounded(operands[0] * pre);
  for (size_t k = 1; k < operands.size(); ++k) {
    A next = rounded(operands[k] * pre);
    if (spec.op == ReduceOp::kSum) result = rounded(result + next);
    if (spec.op == ReduceOp::kProduct) result = rounded(result * next);
    if (spec.op == ReduceOp::kMin && (next < result || std::isnan(next))) result = next;
    if (spec.op == ReduceOp::kMax && (next > result || std::isnan(next))) result = next;
  }
  result = rounded(result * static_cast<A>(spec.postscale / spec.divisor));
  return std::isnan(result) ? std::numeric_limits<A>::quiet_NaN() : result;
}

template <class T>
T scaled(T value, double factor, int divisor = 1) {
  if (factor == 1.0) return static_cast<T>(static_cast<int64_t>(value) / divisor);
  double product = std::trunc(static_cast<double>(value) * factor / divisor);
  if (std::isnan(product)) return 0;
  if (product >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  if (product <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(product);
}

template <class T>
T int_reduce(const ReduceSpec& spec, const std::vector<T>& operands) {
  T result = scaled(operands[0], spec.prescale);
  for (size_t k = 1; k < operands.size(); ++k) {
    T next = scaled(operands[k], spec.prescale);
    if (spec.op == ReduceOp::kSum) result = static_cast<T>(static_cast<uint64_t>(result) + static_cast<uint64_t>(next));
    if (spec.op == ReduceOp::kProduct) {
      result = static_cast<T>(static_cast<uint64_t>(result) * static_cast<uint64_t>(next));
    }
    if (spec.op == ReduceOp::kMin) result = std::min(result, next);
    if (spec.op == ReduceOp::kMax) result = std::max(result, next);
  }
  return scaled(result, spec.postscale, spec.divisor);
}

bool is_plain(const ReduceSpec& spec) { return spec.prescale == 1.0 && spec.postscale == 1.0 && spec.divisor == 1; }

// The result's elements one by one, as bytes.
template <class T, class Decode, class Encode, class Reduce>
Bytes elements(const std::vector<const unsigned char*>& sources, size_t count, Decode decode, Encode encode,
               Reduce reduce) {
  Bytes out(count * sizeof(T));
  std::vector<decltype(decode(T{}))> operands(sources.size());
  for (size_t at = 0; at < out.size(); at += sizeof(T)) {
    for (size_t k = 0; k < sources.size(); ++k) operands[k] = decode(read<T>(sources[k] + at));
    T result = encode(reduce(operands));
    std::memcpy(out.data() + at, &result, sizeof result);
  }
  return out;
}

Bytes reference(const ReduceSpec& spec, const std::vector<const unsigned char*>& sources, size_t count) {
  if (sources.size() == 1 && is_plain(spec) && spec.dtype != DType::kBool) {
    return Bytes(sources[0], sources[0] + count * dtype_size(spec.dtype));
  }
  auto same = [](auto value) { return value; };
  auto as_float = [&](const std::vector<float>& operands) { return float_reduce(spec, operands); };
  auto as_double = [&](const std::vector<double>& operands) { return float_reduce(spec, operands); };
  auto as_int = [&](const auto& operands) { return int_reduce(spec, operands); };
  auto as_bool = [&](const std::vector<bool>& operands) {
    bool any = spec.op == ReduceOp::kSum || spec.op == ReduceOp::kMax;
    for (bool operand : operands) {
      if (operand == any) return any;
    }
    return !any;
  };
  switch (spec.dtype) {
    case DType::kFloat16:
      return elements<uint16_t>(sources, count, half_to_float, float_to_half, as_float);
    case DType::kBFloat16:
      return elements<uint16_t>(sources, count, bfloat16_to_float, float_to_bfloat16, as_float);
    case DType::kFloat32:
      return elements<float>(sources, count, same, same, as_float);
    case DType::kFloat64:
      return elements<double>(sources, count, same, same, as_double);
    case DType::kUInt8:
      return elements<uint8_t>(sources, count, same, same, as_int);
    case DType::kInt8:
      return elements<int8_t>(sources, count, same, same, as_int);
    case DType::kInt16:
      return elements<int16_t>(sources, count, same, same, as_int);
    case DType::kInt32:
      return elements<int32_t>(sources, count, same, same, as_int);
    case DType::kInt64:
      return elements<int64_t>(sources, count, same, same, as_int);
    case DType::kBool:
      return elements<uint8_t>(
          sources, count, [](uint8_t value) { return value != 0; }, [](bool value) { return uint8_t(value); }, as_bool);
  }
  std::abort();
}

// ---- operands -----------------------------------------------------------------------------------------------------

// Different for every source and index; about one element in four is zero, infinite, NaN, denormal, huge or a limit.
double interesting_double(std::mt19937_64& random) {
  static const double kSpecial[] = {0.0,     -0.0,     INFINITY, -INFINITY,  NAN,      -NAN,
                                    0x1p-24, -0x1p-15, 0x1p-149, 0x1.8p-130, 65504,    65519,
                                    -65520,  3.4e38,   -3.4e38,  1e308,      0x1p-1074};
  if (random() % 4 == 0) return kSpecial[random() % (sizeof kSpecial / sizeof kSpecial[0])];
  return std::normal_distribution<double>(0.0, 3.0)(random);
}

void fill(DType dtype, unsigned char* to, size_t count, std::mt19937_64& random) {
  size_t size = dtype_size(dtype);
  for (size_t i = 0; i < count; ++i) {
    uint64_t bits = random();
    double value = dtype_is_float(dtype) ? interesting_double(random) : 0.0;
    // Integers: any bits, often small, so that products and divisions show more than wrapping.
    if (!dtype_is_float(dtype) && bits % 3 == 0)
      bits = static_cast<uint64_t>(static_cast<int64_t>(bits >> 40) % 100 - 50);
    if (dtype == DType::kBool) bits = bits % 2 == 0 ? 0 : bits >> 56;
    if (dtype_is_float(dtype) && bits % 8 != 0) {  // else any bits: NaNs with payloads, signalling ones too
      float single = static_cast<float>(value);
      if (dtype == DType::kFloat64) std::memcpy(&bits, &value, 8);
      if (dtype == DType::kFloat32) bits = float_bits(single);
      if (dtype == DType::kFloat16) bits = float_to_half(single);
      if (dtype == DType::kBFloat16) bits = float_to_bfloat16(single);
    }
    std::memcpy(to + i * size, &bits, size);
  }
}

struct Case {
  ReduceSpec spec;
  int n;
  size_t count;
  size_t dst_offset;     // bytes past a 64-byte boundary
  size_t source_offset;  // likewise, and one more for each source
  bool two_outputs;
  bool stream;
  int in_place;  // index of the source that dst equals, -1 = none
};

std::string describe(const Case& c, const std::string& variant) {
  return variant + " " + dtype_name(c.spec.dtype) + " " + reduce_op_name(c.spec.op) + " n=" + std::to_string(c.n) +
         " count=" + std::to_string(c.count) + " dst+" + std::to_string(c.dst_offset) + " src+" +
         std::to_string(c.source_offset) + " pre=" + std::to_string(c.spec.prescale) +
         " post=" + std::to_string(c.spec.postscale) + " divisor=" + std::to_string(c.spec.divisor) +
         (c.two_outputs ? " dst2" : "") + (c.stream ? " stream" : "") + " in_place=" + std::to_string(c.in_place);
}

// Memory with room around it that must stay as it was.
class Guarded {
 public:
  Guarded(size_t size, size_t offset) : bytes_(size + offset + 3 * kRoom, 0xa5), size_(size) {
    size_t at = reinterpret_cast<uintptr_t>(bytes_.data()) % 64;
    start_ = kRoom + (64 - at) % 64 + offset;
  }
  unsigned char* data() { return bytes_.data() + start_; }
  bool untouched_around() const {
    const auto untouched = [](unsigned char byte) { return byte == 0xa5; };
    const auto start = bytes_.begin() + static_cast<std::ptrdiff_t>(start_);
    return std::all_of(bytes_.begin(), start, untouched) &&
           std::all_of(start + static_cast<std::ptrdiff_t>(size_), bytes_.end(), untouched);
  }

 private:
  static constexpr size_t kRoom = 128;
  Bytes bytes_;
  size_t size_;
  size_t start_;
};

// Where they begin to differ; the size if they do not.
size_t first_difference(const unsigned char* bytes, const Bytes& expected) {
  if (std::memcmp(bytes, expected.data(), expected.size()) == 0) return expected.size();
  return static_cast<size_t>(std::mismatch(expected.begin(), expected.end(), bytes).first - expected.begin());
}

void check(const Case& c, const std::vector<std::string>& variants) {
  size_t bytes = c.count * dtype_size(c.spec.dtype);
  std::mt19937_64 random(c.count * 31 + c.n);
  std::vector<Guarded> originals;
  std::vector<const unsigned char*> sources;
  for (int k = 0; k < c.n; ++k) {
    originals.emplace_back(bytes, (c.source_offset + k * (c.source_offset != 0)) % 64);
    fill(c.spec.dtype, originals.back().data(), c.count, random);
  }
  for (Guarded& original : originals) sources.push_back(original.data());
  Bytes expected = reference(c.spec, sources, c.count);
  for (const std::string& variant : variants) {
    select_variant(variant.c_str());
    Guarded dst(bytes, c.dst_offset), dst2(bytes, (c.dst_offset * 3) % 64);
    std::vector<const void*> pointers(sources.begin(), sources.end());
    if (c.in_place >= 0) {
      std::memcpy(dst.data(), sources[c.in_place], bytes);
      pointers[c.in_place] = dst.data();
    }
    reduce(c.spec, dst.data(), c.two_outputs ? dst2.data() : nullptr, pointers.data(), c.n, c.count, c.stream);
    ASSERT_EQ(first_difference(dst.data(), expected), bytes) << describe(c, variant);
    if (c.two_outputs) {
      ASSERT_EQ(first_difference(dst2.data(), expected), bytes) << describe(c, variant) << ", second output";
    }
    ASSERT_TRUE(dst.untouched_around() && dst2.untouched_around()) << describe(c, variant);
  }
  select_variant("auto");
}

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

struct Factors {
  double pre, post;
  int divisor;
};
constexpr Factors kFactors[] = {{1, 1, 1}, {1, 1, 3}, {0.5, 1, 1}, {1, 0.3, 2}, {-1.7, 2.5, 300}, {1e9, 1e12, 1}};

class ReduceTest : public ::testing::TestWithParam<int> {
 protected:
  DType dtype() const { return static_cast<DType>(GetParam()); }
};

TEST_P(ReduceTest, GivesTheReferencesBitsForEveryOperationFactorAndNumberOfSources) {
  auto variants = variants_here();
  ASSERT_GE(variants.size(), 1u);
  for (ReduceOp op : kOps) {
    for (const Factors& f : kFactors) {
      for (int n : {1, 2, 3, 4, 7}) {
        for (size_t count : {1, 5, 67, 1029}) {
          ReduceSpec spec{dtype(), op, f.pre, f.post, f.divisor};
          check(Case{spec, n, count, 0, 0, n % 2 == 0, n % 3 == 0, -1}, variants);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(ReduceTest, TakesPointersAlignedToAByte) {
  auto variants = variants_here();
  for (size_t dst_offset : {0, 1, 2, 4, 8, 36, 63}) {
    for (size_t source_offset : {0, 1, 7, 16}) {
      for (bool stream : {false, true}) {
        for (int n : {2, 3}) {
          ReduceSpec spec;
          spec.dtype = dtype();
          check(Case{spec, n, 2501, dst_offset, source_offset, true, stream, -1}, variants);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(ReduceTest, TakesEveryCountAroundAVector) {
  auto variants = variants_here();
  for (size_t count = 1; count <= 200; ++count) {
    ReduceSpec spec;
    spec.dtype = dtype();
    check(Case{spec, 2, count, count % 64, count % 5, count % 2 == 0, true, -1}, variants);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ReduceTest, MayWriteOverAnyOfItsSources) {
  auto variants = variants_here();
  for (int n : {1, 2, 3, 5}) {
    for (int in_place = 0; in_place < n; ++in_place) {
      for (double post : {1.0, 0.25}) {
        for (size_t offset : {0, 24}) {
          ReduceSpec spec;
          spec.dtype = dtype();
          spec.postscale = post;
          check(Case{spec, n, 9001, offset, 0, in_place % 2 == 0, offset == 0, in_place}, variants);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryType, ReduceTest, ::testing::Range(0, kDTypeCount),
                         [](const auto& info) { return std::string(dtype_name(static_cast<DType>(info.param))); });

TEST(ReduceTest, IsNearToTheExactSum) {
  constexpr size_t kCount = 1000;
  constexpr int kSources = 4;
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  std::vector<std::vector<float>> singles(kSources, std::vector<float>(kCount));
  std::vector<std::vector<uint16_t>> halves(kSources, std::vector<uint16_t>(kCount));
  std::vector<double> exact(kCount), exact_half(kCount);
  for (int k = 0; k < kSources; ++k) {
    for (size_t i = 0; i < kCount; ++i) {
      singles[k][i] = static_cast<float>(normal(random) + k);
      halves[k][i] = float_to_half(singles[k][i]);
      exact[i] += singles[k][i];
      exact_half[i] += half_to_float(halves[k][i]);
    }
  }
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    std::vector<const void*> sources, half_sources;
    for (auto& one : singles) sources.push_back(one.data());
    for (auto& one : halves) half_sources.push_back(one.data());
    std::vector<float> sum(kCount);
    std::vector<uint16_t> half_sum(kCount);
    ReduceSpec spec;
    spec.divisor = kSources;
    reduce(spec, sum.data(), nullptr, sources.data(), kSources, kCount, false);
    spec.dtype = DType::kFloat16;
    reduce(spec, half_sum.data(), nullptr, half_sources.data(), kSources, kCount, false);
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_NEAR(sum[i], exact[i] / kSources, 2e-6) << variant;
      // Half a unit in the last place of a value below 8.
      ASSERT_NEAR(half_to_float(half_sum[i]), exact_half[i] / kSources, 0x1p-9) << variant;
    }
  }
  select_variant("auto");
}

TEST(ReduceTest, HalvesAreRoundedOnceAfterTheWholeSum) {
  // 2048 + 1 rounds back to 2048 in f16: rounding after each addition would lose both ones.
  uint16_t big = float_to_half(2048.0f), one = float_to_half(1.0f), result = 0;
  const void* sources[] = {&big, &one, &one};
  ReduceSpec spec;
  spec.dtype = DType::kFloat16;
  reduce(spec, &result, nullptr, sources, 3, 1, false);
  EXPECT_EQ(half_to_float(result), 2050.0f);
}

TEST(ReduceTest, EveryHalfValueGoesThroughEveryVariantAsThroughTheScalarConversion) {
  std::vector<uint16_t> all(0x10000), zero(0x10000), expected(0x10000);
  for (uint32_t h = 0; h < 0x10000; ++h) {
    all[h] = static_cast<uint16_t>(h);
    float value = half_to_float(all[h]);
    zero[h] = 0x3555;  // about a third, so that results need rounding
    float product = value * half_to_float(0x3555);
    expected[h] = std::isnan(product) ? 0x7e00 : float_to_half(product);
  }
  ReduceSpec spec;
  spec.dtype = DType::kFloat16;
  spec.op = ReduceOp::kProduct;
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    std::vector<uint16_t> result(0x10000);
    const void* sources[] = {all.data(), zero.data()};
    reduce(spec, result.data(), nullptr, sources, 2, result.size(), false);
    for (uint32_t h = 0; h < 0x10000; ++h) ASSERT_EQ(result[h], expected[h]) << variant << " " << std::hex << h;
  }
  select_variant("auto");
}

TEST(ReduceTest, IntegerAverageTruncatesTowardZeroExactly) {
  // 49 * (1 / 49) < 1 in double: a multiplication by the inverse would give 0.
  int32_t values[] = {49, -49, -1, 98, 2147483647, -2147483647 - 1, 97, -97}, result[8];
  int32_t expected[] = {1, -1, 0, 2, 43826196, -43826196, 1, -1};
  int64_t wide[] = {int64_t{49} << 53, -(int64_t{1} << 62), 48}, wide_result[3];
  const void* sources[] = {values};
  const void* wide_sources[] = {wide};
  ReduceSpec spec;
  spec.divisor = 49;
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    spec.dtype = DType::kInt32;
    reduce(spec, result, nullptr, sources, 1, 8, false);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(result[i], expected[i]) << variant << " " << i;
    spec.dtype = DType::kInt64;
    reduce(spec, wide_result, nullptr, wide_sources, 1, 3, false);
    EXPECT_EQ(wide_result[0], int64_t{1} << 53) << variant;
    EXPECT_EQ(wide_result[1], -(int64_t{1} << 62) / 49) << variant;
    EXPECT_EQ(wide_result[2], 0) << variant;
  }
  // A factor of its own does not act on a mean that was truncated before.
  int32_t sums[] = {5, -5, 4, 49};
  const void* sum_sources[] = {sums};
  int32_t means[4], expected_means[] = {7, -7, 6, 73};
  spec.dtype = DType::kInt32;
  spec.divisor = 2;
  spec.postscale = 3.0;
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    reduce(spec, means, nullptr, sum_sources, 1, 4, false);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(means[i], expected_means[i]) << variant << " " << i;
  }
  select_variant("auto");
}

TEST(ReduceTest, DoesNotDependOnTheCallersRoundingModeNorFlushing) {
  std::vector<float> a(100), b(100), plain(100), other(100);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = 0x1p-126f * static_cast<float>(i + 2) / 3;
    b[i] = i % 2 == 0 ? -0x1p-126f * static_cast<float>(i + 1) / 3 : 1.0f;
  }
  const void* sources[] = {a.data(), b.data()};
  ReduceSpec spec;
  reduce(spec, plain.data(), nullptr, sources, 2, a.size(), false);
  std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
  unsigned int mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);
#endif
  reduce(spec, other.data(), nullptr, sources, 2, a.size(), false);
#if defined(__x86_64__)
  EXPECT_EQ(_mm_getcsr() & 0xe040, (mode | 0x8040) & 0xe040);
  _mm_setcsr(mode);
#endif
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(std::memcmp(plain.data(), other.data(), plain.size() * sizeof(float)), 0);
  EXPECT_NE(plain[0], 0.0f);
}

TEST(ReduceTest, LeavesEverythingAloneForNoElements) {
  float value = 3, result = 7;
  const void* sources[] = {&value};
  reduce(ReduceSpec{}, &result, nullptr, sources, 1, 0, true);
  EXPECT_EQ(result, 7);
}

TEST(ReduceTest, RefusesWhatItCannotDo) {
  float value = 3, result = 7;
  const void* sources[] = {&value};
  auto kind_of = [&](const ReduceSpec& spec, int n) {
    try {
      reduce(spec, &result, nullptr, sources, n, 1, false);
    } catch (const Error& error) {
      return error.kind();
    }
    return ErrorKind::kInternal;
  };
  ReduceSpec average;
  average.op = ReduceOp::kAverage;
  EXPECT_EQ(kind_of(average, 1), ErrorKind::kInvalidArgument);
  ReduceSpec undivided;
  undivided.divisor = 0;
  EXPECT_EQ(kind_of(undivided, 1), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of(ReduceSpec{}, 0), ErrorKind::kInvalidArgument);
  EXPECT_EQ(result, 7);
}

TEST(CopyTest, CopiesEveryByteAndNoOther) {
  std::mt19937_64 random(3);
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    for (size_t n : {0, 1, 63, 64, 65, 1000, 4095, 4096, 4161, 65536, 100003}) {
      for (size_t dst_offset : {0, 1, 31, 63}) {
        for (size_t src_offset : {0, 5, 32}) {
          for (bool stream : {false, true}) {
            Guarded dst(n, dst_offset), src(n, src_offset);
            for (size_t i = 0; i < n; ++i) src.data()[i] = static_cast<unsigned char>(random());
            copy(dst.data(), src.data(), n, stream);
            ASSERT_EQ(std::memcmp(dst.data(), src.data(), n), 0) << variant << " " << n << " " << dst_offset;
            ASSERT_TRUE(dst.untouched_around()) << variant << " " << n << " " << dst_offset;
          }
        }
      }
    }
  }
  select_variant("auto");
}

TEST(VariantTest, IsTheOneChosenByName) {
  std::string best = variant();
  for (const std::string& name : variants_here()) {
    select_variant(name.c_str());
    EXPECT_EQ(variant(), name);
  }
  select_variant("auto");
  EXPECT_EQ(variant(), best);
}

TEST(VariantTest, UnknownNameIsAnErrorThatNamesItAndTheChoices) {
  try {
    select_variant("mmx");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("'mmx'"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos);
  }
}

}  // namespace
}  // namespace perseus::kernels
