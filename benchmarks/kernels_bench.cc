// Speed of the kernels in the shapes that shared-memory collectives use, beside memcpy of the same bytes. The threads
// given on the command line each do the same, on their own memory.
//
//   kernels_bench [threads = 1] [chunk KiB = 128] [repetitions = 15] [variant = auto]
//
// A rate is payload bytes per second of a thread's own processor time, so that other processes' turns do not count;
// "best" and the median over the repetitions, in which all cases take turns. Before each case the tensor is written, as
// a backward pass would: what the case before left in the caches makes a factor of two.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"

namespace perseus::kernels {
namespace {

constexpr size_t kLarge = size_t{64} << 20;    // a tensor, far larger than a core's caches
constexpr size_t kWindow = size_t{256} << 10;  // a ring that stays in the second-level cache

double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Page-aligned, 4 KiB pages, never given back.
unsigned char* pages(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  madvise(memory, size, MADV_NOHUGEPAGE);
  std::memset(memory, 1, size);
  return static_cast<unsigned char*>(memory);
}

struct Memory {
  unsigned char* tensor = pages(kLarge);
  unsigned char* output = pages(kLarge);
  unsigned char* window = pages(kWindow);
  unsigned char* peer_window = pages(kWindow);
};

// One chunk at `at` of the tensor.
using Chunk = std::function<void(const Memory& memory, size_t at, size_t size)>;

struct Case {
  std::string name;
  Chunk chunk;
  std::vector<double> seconds;  // of the first thread
};

Chunk sum(bool in_place, double postscale, bool stream) {
  return [=](const Memory& m, size_t at, size_t size) {
    ReduceSpec spec;
    spec.postscale = postscale;
    const void* sources[] = {m.tensor + at, m.peer_window + at % kWindow};
    reduce(spec, (in_place ? m.tensor : m.output) + at, m.window + at % kWindow, sources, 2, size / sizeof(float),
           stream);
  };
}

Chunk cached_sum(DType dtype, int n, double postscale) {
  return [=](const Memory& m, size_t, size_t size) {
    ReduceSpec spec;
    spec.dtype = dtype;
    spec.postscale = postscale;
    std::vector<const void*> sources;
    for (int k = 0; k < n; ++k) sources.push_back(k % 2 == 0 ? m.peer_window : m.tensor + k * size);
    reduce(spec, m.window, nullptr, sources.data(), n, size / dtype_size(dtype), false);
  };
}

std::vector<Case> all_cases() {
  return {
      {"memory to window, memcpy",
       [](const Memory& m, size_t at, size_t size) { std::memcpy(m.window + at % kWindow, m.tensor + at, size); },
       {}},
      {"memory to window, copy",
       [](const Memory& m, size_t at, size_t size) { copy(m.window + at % kWindow, m.tensor + at, size, false); },
       {}},
      {"window to memory, memcpy",
       [](const Memory& m, size_t at, size_t size) { std::memcpy(m.output + at, m.window + at % kWindow, size); },
       {}},
      {"window to memory, copy stream",
       [](const Memory& m, size_t at, size_t size) { copy(m.output + at, m.window + at % kWindow, size, true); },
       {}},
      {"memory to memory, memcpy",
       [](const Memory& m, size_t at, size_t size) { std::memcpy(m.output + at, m.tensor + at, size); },
       {}},
      {"memory to memory, copy stream",
       [](const Memory& m, size_t at, size_t size) { copy(m.output + at, m.tensor + at, size, true); },
       {}},
      {"window to window, memcpy",
       [](const Memory& m, size_t, size_t size) { std::memcpy(m.window, m.peer_window, size); },
       {}},
      {"window to window, copy",
       [](const Memory& m, size_t, size_t size) { copy(m.window, m.peer_window, size, false); },
       {}},
      {"sum f32 to memory", sum(false, 1.0, false), {}},
      {"sum f32 to memory, stream", sum(false, 1.0, true), {}},
      {"sum f32 to memory, stream, scaled", sum(false, 0.3, true), {}},
      {"sum f32 in place", sum(true, 1.0, false), {}},
      {"sum f32 in place, stream", sum(true, 1.0, true), {}},
      {"sum f32 in place, scaled", sum(true, 0.999, false), {}},
      {"in cache: sum f32, 2", cached_sum(DType::kFloat32, 2, 1.0), {}},
      {"in cache: sum f32, 2, scaled", cached_sum(DType::kFloat32, 2, 0.3), {}},
      {"in cache: sum f32, 4", cached_sum(DType::kFloat32, 4, 1.0), {}},
      {"in cache: sum f32, 8", cached_sum(DType::kFloat32, 8, 1.0), {}},
      {"in cache: sum f16, 2", cached_sum(DType::kFloat16, 2, 1.0), {}},
      {"in cache: sum bf16, 2", cached_sum(DType::kBFloat16, 2, 1.0), {}},
      {"in cache: sum f64, 2", cached_sum(DType::kFloat64, 2, 1.0), {}},
      {"in cache: sum i32, 2", cached_sum(DType::kInt32, 2, 1.0), {}},
      {"in cache: sum i32, 2, scaled", cached_sum(DType::kInt32, 2, 0.3), {}},
      {"in cache: sum i64, 2, scaled", cached_sum(DType::kInt64, 2, 0.3), {}},
  };
}

// All threads go through the cases in step, so that each case meets itself on the other cores.
void measure(std::vector<Case>& cases, int threads, size_t chunk, int repetitions) {
  std::atomic<int> arrived{0};
  auto work = [&](int thread) {
    Memory memory;
    int expected = 0;
    for (int r = 0; r < repetitions; ++r) {
      for (Case& c : cases) {
        expected += threads;
        ++arrived;
        while (arrived.load() < expected) std::this_thread::yield();
        std::memset(memory.tensor, r + 1, kLarge);
        double start = processor_seconds();
        for (size_t at = 0; at < kLarge; at += chunk) c.chunk(memory, at, chunk);
        if (thread == 0) c.seconds.push_back(processor_seconds() - start);
      }
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (std::thread& other : others) other.join();
}

int number(int argc, char** argv, int index, int otherwise, int low, int high) {
  int value = argc > index ? std::atoi(argv[index]) : otherwise;
  if (value >= low && value <= high) return value;
  std::fprintf(stderr, "kernels_bench: argument %d is '%s', expected %d to %d\n", index, argv[index], low, high);
  std::exit(2);
}

int run(int argc, char** argv) {
  int threads = number(argc, argv, 1, 1, 1, 256);
  size_t chunk = static_cast<size_t>(number(argc, argv, 2, 128, 4, kWindow >> 10)) << 10;
  int repetitions = number(argc, argv, 3, 15, 1, 10000);
  while (kWindow % chunk != 0) chunk -= 4096;
  select_variant(argc > 4 ? argv[4] : "auto");
  std::vector<Case> cases = all_cases();
  std::printf("%s, %d threads, chunks of %zu KiB, %d repetitions\n", variant(), threads, chunk >> 10, repetitions);
  measure(cases, threads, chunk, repetitions);
  for (Case& c : cases) {
    std::sort(c.seconds.begin(), c.seconds.end());
    std::printf("%-36s best %6.1f  median %6.1f GB/s\n", c.name.c_str(), kLarge / c.seconds[0] / 1e9,
                kLarge / c.seconds[c.seconds.size() / 2] / 1e9);
  }
  return 0;
}

}  // namespace
}  // namespace perseus::kernels

int main(int argc, char** argv) {
  try {
    return perseus::kernels::run(argc, argv);
  } catch (const perseus::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
