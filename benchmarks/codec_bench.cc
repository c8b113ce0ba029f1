// Speed of every codec on one core: encode, then decode, chunk by chunk through a buffer that stays in the cache, as an
// exchange does; against memcpy of the same 64 MiB, measured in turn with it.
//
//   codec_bench [repetitions = 15] [variant = auto] [threads = 1]
//
// Input, residual and output are page-aligned with 4 KiB pages, as memcpy is at its fastest so. The time is the
// thread's own processor time; a ratio is the median over the repetitions of memcpy's time to the codec's in the same
// repetition. Several threads share the chunks of each slice, as PERSEUS_CODEC_THREADS says; then times are those that
// pass, memcpy's on one of them.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "codec/codec.h"
#include "kernels/kernels.h"
#include "kernels/low_rank.h"

namespace perseus {
namespace {

constexpr size_t kElements = size_t{16} << 20;

constexpr size_t kSlice = 32;  // chunks: 2 MiB, as with four streams

double seconds(const ThreadPool& threads) {
  timespec now;
  clock_gettime(threads.threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// 4 KiB pages, never given back.
float* floats(size_t count) {
  const size_t size = count * sizeof(float);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  madvise(memory, size, MADV_NOHUGEPAGE);
  std::memset(memory, 0, size);
  return static_cast<float*>(memory);
}

struct Case {
  std::string name;
  CodecSpec spec;
  bool residual;
  std::vector<double> encode_s, decode_s, total_s, ratio;
  size_t wire_bytes = 0;
};

CodecSpec spec_of(CodecKind kind, double ratio = 1.0, bool half_values = false, int every = 1) {
  CodecSpec spec;
  spec.kind = kind;
  spec.ratio = ratio;
  spec.half_values = half_values;
  spec.every = every;
  return spec;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](const CodecSpec& spec, bool residual) {
    cases.push_back({codec_name(spec) + (residual ? ", residual" : ""), spec, residual, {}, {}, {}, {}});
  };
  add(spec_of(CodecKind::kFloat16), false);
  add(spec_of(CodecKind::kBFloat16), false);
  add(spec_of(CodecKind::kLossless), false);
  add(spec_of(CodecKind::kLossless, 1.0, true), false);
  add(spec_of(CodecKind::kInt8), false);
  for (CodecKind kind : {CodecKind::kInt8, CodecKind::kInt4, CodecKind::kInt2}) add(spec_of(kind), true);
  add(spec_of(CodecKind::kTopK, 0.01), true);
  add(spec_of(CodecKind::kTopK, 0.01, true), true);
  add(spec_of(CodecKind::kTopK, 0.1), true);
  add(spec_of(CodecKind::kRotate, 1.0, false, 8), true);
  return cases;
}

// The ratio is that of kBoth; the others encode without decoding, and decode one chunk again and again.
enum class Part { kBoth, kEncode, kDecode };

double run_part(const Case& c, const WireFormat& codec, Part part, const float* x, float* residual, float* y,
                ThreadPool* threads, uint64_t step, size_t* wire_bytes) {
  // A thread's encoded chunk.
  struct Wire {
    std::vector<uint32_t> memory;
    size_t bytes = 0, total = 0;
  };
  std::vector<Wire> wires(static_cast<size_t>(threads->threads()));
  for (Wire& wire : wires) wire.memory.resize(codec.most_bytes(kWireChunk) / 4);
  const double start = seconds(*threads);
  for (size_t first = 0; first < kElements; first += kSlice * kWireChunk) {
    threads->parallel_for(kSlice, [&](size_t task, size_t thread) {
      const size_t at = first + task * kWireChunk;
      Wire& wire = wires[thread];
      Byte* const to = reinterpret_cast<Byte*>(wire.memory.data());
      if (part != Part::kDecode || wire.bytes == 0)
        wire.bytes = codec.encode(x + at, c.residual ? residual + at : nullptr, kWireChunk, step, to);
      wire.total += wire.bytes;
      if (part != Part::kEncode) codec.decode_streamed(to, wire.bytes, kWireChunk, y + at);
    });
  }
  const double spent = seconds(*threads) - start;
  *wire_bytes = 0;
  for (const Wire& wire : wires) *wire_bytes += wire.total;
  return spent;
}

// All that the sender of a square matrix computes for PowerSGD.
double run_low_rank(size_t rank, const float* x, float* residual, float* y) {
  constexpr size_t kSide = 4096;
  static_assert(kSide * kSide == kElements);
  const kernels::MatrixShape shape{kSide, kSide};
  static std::vector<float> p(kSide * rank), q(rank * kSide);
  static kernels::Product taken;
  kernels::fill_with_noise(1, q.data(), q.size());
  const double start = seconds(ThreadPool::none());
  kernels::add_and_project(x, 1.0F, taken, residual, shape, q.data(), rank, p.data());
  kernels::orthogonalize(p.data(), kSide, rank);
  kernels::project_back(residual, shape, p.data(), rank, q.data());
  taken = {shape, rank, p, q};
  kernels::expand(p.data(), q.data(), shape, rank, y);
  return seconds(ThreadPool::none()) - start;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 15;
  if (repetitions < 1) {
    std::fprintf(stderr, "codec_bench: repetitions is '%s', expected at least 1\n", argv[1]);
    return 2;
  }
  kernels::select_variant(argc > 2 ? argv[2] : "auto");
  ThreadPool threads(argc > 3 ? std::max(std::atoi(argv[3]), 1) : 1);
  float *x = floats(kElements), *y = floats(kElements), *residual = floats(kElements);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 1e-3f);
  for (size_t i = 0; i < kElements; ++i) x[i] = normal(random);

  std::vector<Case> cases = all_cases();
  std::vector<double> copy_s, low_rank_s, low_rank_ratio;
  constexpr size_t kRank = 4;
  for (int r = 0; r < repetitions; ++r) {
    for (Case& c : cases) {
      auto codec = make_codec(c.spec);
      std::memset(residual, 0, kElements * sizeof(float));
      const double start = seconds(threads);
      std::memcpy(y, x, kElements * sizeof(float));
      copy_s.push_back(seconds(threads) - start);
      const auto part = [&](Part which) {
        return run_part(c, *codec, which, x, residual, y, &threads, static_cast<uint64_t>(r), &c.wire_bytes);
      };
      c.decode_s.push_back(part(Part::kDecode));
      c.encode_s.push_back(part(Part::kEncode));
      c.total_s.push_back(part(Part::kBoth));
      c.ratio.push_back(copy_s.back() / c.total_s.back());
    }
    low_rank_s.push_back(run_low_rank(kRank, x, residual, y));
    low_rank_ratio.push_back(copy_s.back() / low_rank_s.back());
  }
  const double gigabytes = kElements * sizeof(float) / 1e9;
  std::printf("%s, threads: %d, repetitions: %d, memcpy %.1f GB/s\n", kernels::variant(), threads.threads(),
              repetitions, gigabytes / median(copy_s));
  std::printf("%-36s %8s %8s %8s %10s %10s\n", "", "encode", "decode", "both", "to memcpy", "smaller");
  for (const Case& c : cases) {
    std::printf("%-36s %8.1f %8.1f %8.1f %10.2f %9.1fx\n", c.name.c_str(), gigabytes / median(c.encode_s),
                gigabytes / median(c.decode_s), gigabytes / median(c.total_s), median(c.ratio),
                static_cast<double>(kElements * sizeof(float)) / static_cast<double>(c.wire_bytes));
  }
  std::printf("%-36s %8s %8s %8.1f %10.2f %9.1fx\n", "PowerSGD of rank 4, residual", "", "",
              gigabytes / median(low_rank_s), median(low_rank_ratio), 4096.0 / (2 * kRank));
  return 0;
}

}  // namespace
}  // namespace perseus

int main(int argc, char** argv) {
  try {
    return perseus::run(argc, argv);
  } catch (const perseus::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
