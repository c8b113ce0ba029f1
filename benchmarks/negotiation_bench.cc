// What it costs ranks to agree on which tensors are ready: ranks as threads of this process submit 200 small tensors
// over the time of a backward pass, in bursts, as layers do. One JSON line for each number of ranks and contender.
//
//   negotiation_bench [most ranks = 512] [steps = 7] [backward ms = 200] [fewest ranks = 2]
//
// "perseus": the C ABI in memory worlds, tensors without elements, so that agreeing is all there is to do. "perseus
// with data": tensors of four, sums are verified; up to 64 ranks, as buffers between all of them take memory. "perseus
// offline": the same with PERSEUS_OFFLINE_NEG=1.
// "coordinator": every rank tells rank 0 what is ready and learns what is ready everywhere, over the same transport, in
// its cheapest form: no timer, no message without news, and nothing is reduced. "schedule": the same threads submit to
// nobody, the machine's share of the times.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "barrier.h"
#include "base/error.h"
#include "net/waker.h"
#include "perseus/perseus.h"
#include "transport/transport.h"

namespace perseus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTensors = 200, kBursts = 20, kElements = 4;
constexpr int kMostWithData = 64;
constexpr int kWarmUps = 6;            // names are new in the first, buffers are made, and a schedule is learnt
constexpr size_t kMessageBytes = 248;  // of a round's frame

struct Options {
  int steps;
  std::chrono::microseconds backward;
};

// Counts of the busiest rank, over the measured steps.
struct Counts {
  uint64_t rounds = 0, messages = 0, buckets = 0;
};

struct Result {
  std::vector<double> seconds;  // of each step, of the slowest rank
  Counts counts;
};

void submit_over_time(const Options& options, Clock::time_point begin, const std::function<void(int tensor)>& submit) {
  for (int burst = 0; burst < kBursts; ++burst) {
    std::this_thread::sleep_until(begin + options.backward * (burst + 1) / kBursts);
    for (int i = 0; i < kTensors / kBursts; ++i) submit(burst * (kTensors / kBursts) + i);
  }
}

// Runs rank(rank, step_done) on `size` threads.
class Collector {
 public:
  Collector(int size, int steps) : times_(size, std::vector<double>(steps)) {}
  void step(int rank, int step, Clock::time_point begin) {
    if (step >= kWarmUps) times_[rank][step - kWarmUps] = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  void counts(const Counts& counts) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.rounds = std::max(counts_.rounds, counts.rounds);
    counts_.messages = std::max(counts_.messages, counts.messages);
    counts_.buckets = std::max(counts_.buckets, counts.buckets);
  }
  Result result() const {
    Result result;
    result.counts = counts_;
    for (size_t step = 0; step < times_[0].size(); ++step) {
      double slowest = 0;
      for (const auto& times : times_) slowest = std::max(slowest, times[step]);
      result.seconds.push_back(slowest);
    }
    return result;
  }

 private:
  std::vector<std::vector<double>> times_;
  std::mutex mutex_;
  Counts counts_;
};

void on_threads(int size, const std::function<void(int rank)>& rank) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(rank, r);
  for (std::thread& thread : threads) thread.join();
}

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "negotiation_bench: %s\n", what.c_str());
  std::_Exit(1);
}

// ---- Perseus -----------------------------------------------------------------------------------------------------

void check(perseus_code code) {
  if (code != PERSEUS_OK) give_up(perseus_error_message());
}

Counts counts_of(const perseus_context* context) {
  perseus_stats stats{};
  stats.struct_size = sizeof stats;
  check(perseus_context_stats(context, &stats));
  return {stats.rounds, stats.messages, stats.buckets};
}

perseus_context* join_world(const std::string& name, int rank, int size, bool offline) {
  // A thread of hundreds on few cores may well be silent for a minute.
  const char* overrides[] = {"PERSEUS_TRANSPORT=auto", "GLOO_TIMEOUT_SECONDS=0", "PERSEUS_FLIGHT_RECORDER=off",
                             offline ? "PERSEUS_OFFLINE_NEG=1" : "PERSEUS_OFFLINE_NEG=0", nullptr};
  perseus_context_options options{};
  options.struct_size = sizeof options;
  options.rank = rank;
  options.size = size;
  options.secret = "benchmark";
  options.secret_size = 9;
  options.memory_world = name.c_str();
  options.overrides = overrides;
  perseus_context* context = nullptr;
  check(perseus_context_create(&options, &context));
  return context;
}

Result run_perseus(int size, const Options& options, int elements, bool offline = false) {
  Barrier barrier(size);
  Collector collector(size, options.steps);
  const std::string name =
      "negotiation-" + std::to_string(size) + "-" + std::to_string(elements) + (offline ? "-offline" : "");
  on_threads(size, [&](int rank) {
    perseus_context* context = join_world(name, rank, size, offline);
    std::vector<std::string> names;
    for (int i = 0; i < kTensors; ++i) names.push_back("gradient." + std::to_string(i));
    std::vector<float> values(size_t{kTensors} * kElements);
    std::vector<perseus_handle> handles(kTensors);
    const int64_t shape[] = {elements};
    Counts before;
    for (int step = 0; step < kWarmUps + options.steps; ++step) {
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(rank + step + static_cast<int>(i) % 7);
      const Clock::time_point begin = barrier.begin();
      // Every rank is between two steps: nothing is under way.
      if (step == kWarmUps) before = counts_of(context);
      submit_over_time(options, begin, [&](int i) {
        float* data = &values[size_t{kElements} * i];
        const perseus_tensor tensor{data, data, shape, 1, PERSEUS_FLOAT32};
        perseus_request request{};
        request.struct_size = sizeof request;
        request.kind = PERSEUS_ALLREDUCE;
        request.name = names[i].c_str();
        request.tensors = &tensor;
        request.tensor_count = 1;
        request.op = PERSEUS_SUM;
        request.prescale = request.postscale = 1.0;
        request.gradient_of = 1;
        check(perseus_request_submit(context, &request, &handles[i]));
      });
      for (perseus_handle handle : handles) check(perseus_handle_wait(context, handle, -1));
      collector.step(rank, step, begin);
      for (perseus_handle handle : handles) check(perseus_handle_release(context, handle));
      for (size_t i = 0; i < values.size(); ++i) {
        const int expected = size * (size - 1) / 2 + size * (step + static_cast<int>(i) % 7);
        if (elements > 0 && values[i] != static_cast<float>(expected)) give_up("a sum is wrong");
      }
    }
    barrier.begin();
    const Counts after = counts_of(context);
    collector.counts({after.rounds - before.rounds, after.messages - before.messages, after.buckets - before.buckets});
    barrier.begin();
    perseus_context_destroy(context);
  });
  return collector.result();
}

// ---- a coordinator -----------------------------------------------------------------------------------------------

// One rank's side: a thread of its own talks to rank 0 (and is, on rank 0, the one that all talk to).
class Coordinated {
 public:
  Coordinated(int rank, int size, const std::shared_ptr<MemFabric>& fabric) : rank_(rank), size_(size) {
    World world;
    world.rank = rank;
    world.size = size;
    transport_ = connect_mem(world, fabric, waker_);
    for (int peer = rank == 0 ? 1 : 0; peer < (rank == 0 ? size : 1); ++peer)
      links_.push_back(&transport_->link(peer, Channel{0, kControlStream}));
    thread_ = std::thread([this] { serve(); });
  }
  ~Coordinated() {
    ending_.store(true);
    waker_.doorbell().ring();
    thread_.join();
  }

  // The next tensor is ready here: the ready ones are a prefix, by the same order on all ranks.
  void submit() {
    ready_.fetch_add(1);
    waker_.doorbell().ring();
  }
  void wait(uint64_t tensors) {
    std::unique_lock<std::mutex> lock(mutex_);
    agreed_news_.wait(lock, [&] { return agreed_ >= tensors; });
  }
  Counts counts() {
    std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

 private:
  void serve() {
    while (!ending_.load()) {
      if (rank_ == 0 ? coordinate() : follow()) continue;
      waker_.prepare_sleep();
      if (rank_ == 0 ? coordinate() : follow()) waker_.cancel_sleep();
      else if (ending_.load()) waker_.cancel_sleep();
      else waker_.wait(1'000'000'000);
      waker_.take_events();
    }
  }

  // Rank 0: once everybody has news, the fewest ready are ready everywhere. True when anything moved.
  bool coordinate() {
    bool moved = false;
    received_.resize(links_.size());
    for (size_t i = 0; i < links_.size(); ++i) {
      if (received_[i] != 0 || !receive(*links_[i], &received_[i])) continue;
      ++received_count_;
      moved = true;
    }
    const uint64_t own = ready_.load();
    if (received_count_ < links_.size() || own == agreed_by_thread_) return moved;
    uint64_t fewest = own;
    for (uint64_t& received : received_) {
      fewest = std::min(fewest, received);
      received = 0;
    }
    received_count_ = 0;
    for (Link* link : links_) send(*link, fewest);
    agree(fewest, links_.size());
    return true;
  }

  bool follow() {
    if (asked_) {
      uint64_t agreed = 0;
      if (!receive(*links_[0], &agreed)) return false;
      asked_ = false;
      agree(agreed, 1);
      return true;
    }
    const uint64_t own = ready_.load();
    if (own == agreed_by_thread_) return false;
    send(*links_[0], own);
    asked_ = true;
    return true;
  }

  void agree(uint64_t tensors, uint64_t messages) {
    agreed_by_thread_ = tensors;
    std::lock_guard<std::mutex> lock(mutex_);
    agreed_ = tensors;
    counts_.rounds += 1;
    counts_.messages += messages;
    agreed_news_.notify_all();
  }
  static void send(Link& link, uint64_t number) {
    const Span window = link.send_window(kMessageBytes);
    if (!window) give_up("a coordinator's ring is full");
    std::memcpy(window.data, &number, sizeof number);
    link.send_commit(kMessageBytes);
  }
  static bool receive(Link& link, uint64_t* number) {
    const ConstSpan window = link.recv_window(kMessageBytes);
    if (!window) return false;
    std::memcpy(number, window.data, sizeof *number);
    link.recv_release(kMessageBytes);
    return true;
  }

  const int rank_, size_;
  Waker waker_;
  std::unique_ptr<Transport> transport_;
  std::vector<Link*> links_;  // to rank 0; there, to everybody
  std::atomic<bool> ending_{false};
  std::atomic<uint64_t> ready_{0};

  // Of the thread.
  std::vector<uint64_t> received_;  // of each rank in this round, 0 = nothing
  size_t received_count_ = 0;
  bool asked_ = false;
  uint64_t agreed_by_thread_ = 0;

  std::mutex mutex_;
  std::condition_variable agreed_news_;
  uint64_t agreed_ = 0;
  Counts counts_;
  std::thread thread_;
};

Result run_coordinator(int size, const Options& options) {
  Barrier barrier(size);
  Collector collector(size, options.steps);
  const std::shared_ptr<MemFabric> fabric = make_mem_fabric(size);
  on_threads(size, [&](int rank) {
    Coordinated side(rank, size, fabric);
    Counts before;
    for (int step = 0; step < kWarmUps + options.steps; ++step) {
      const Clock::time_point begin = barrier.begin();
      if (step == kWarmUps) before = side.counts();
      submit_over_time(options, begin, [&](int) { side.submit(); });
      side.wait(uint64_t{kTensors} * (static_cast<uint64_t>(step) + 1));
      collector.step(rank, step, begin);
    }
    barrier.begin();
    const Counts after = side.counts();
    collector.counts({after.rounds - before.rounds, after.messages - before.messages, 0});
    barrier.begin();
  });
  return collector.result();
}

Result run_schedule(int size, const Options& options) {
  Barrier barrier(size);
  Collector collector(size, options.steps);
  on_threads(size, [&](int rank) {
    for (int step = 0; step < kWarmUps + options.steps; ++step) {
      const Clock::time_point begin = barrier.begin();
      submit_over_time(options, begin, [](int) {});
      collector.step(rank, step, begin);
    }
  });
  return collector.result();
}

void show(const char* contender, int size, const Options& options, Result result) {
  std::sort(result.seconds.begin(), result.seconds.end());
  const double steps = options.steps;
  std::printf(
      "{\"case\": \"negotiation\", \"contender\": \"%s\", \"ranks\": %d, \"tensors\": %d, \"backward_s\": %.4f, "
      "\"median_s\": %.6f, \"min_s\": %.6f, \"n\": %d, \"rounds\": %.2f, \"messages\": %.2f, \"buckets\": %.2f}\n",
      contender, size, kTensors, std::chrono::duration<double>(options.backward).count(),
      result.seconds[result.seconds.size() / 2], result.seconds[0], options.steps, result.counts.rounds / steps,
      result.counts.messages / steps, result.counts.buckets / steps);
  std::fflush(stdout);
}

int number(int argc, char** argv, int index, int otherwise, int low, int high) {
  const int value = argc > index ? std::atoi(argv[index]) : otherwise;
  if (value >= low && value <= high) return value;
  std::fprintf(stderr, "negotiation_bench: argument %d is '%s', expected %d to %d\n", index, argv[index], low, high);
  std::exit(2);
}

int run(int argc, char** argv) {
  const int most = number(argc, argv, 1, 512, 2, 4096);
  Options options{};
  options.steps = number(argc, argv, 2, 7, 1, 1000);
  options.backward = std::chrono::milliseconds(number(argc, argv, 3, 200, 1, 100000));
  const int fewest = number(argc, argv, 4, 2, 2, most);
  for (int size = fewest; size <= most; size *= 2) {
    show("schedule", size, options, run_schedule(size, options));
    show("perseus", size, options, run_perseus(size, options, 0));
    if (size <= kMostWithData) {
      show("perseus with data", size, options, run_perseus(size, options, kElements));
      show("perseus offline", size, options, run_perseus(size, options, kElements, true));
    }
    show("coordinator", size, options, run_coordinator(size, options));
  }
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
