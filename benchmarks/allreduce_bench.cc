// What an allreduce of one tensor takes by each algorithm: ranks as threads of this process, a world for each
// algorithm, all of them alive at once and measured in turn. One JSON line for each number of ranks, size and
// algorithm.
//
//   allreduce_bench [auto|shm|tcp = tcp] [ranks = 4,8] [bytes = 4,1024,…,4194304] [rounds = 101]
//
// Times are of the slowest rank, from a barrier of threads on; every sum is verified. They all contain the agreement
// that the tensor is ready: "nothing" is a tensor without elements. Lines of the transport "arithmetic" are what the
// cost model says of sockets on an ordinary network.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "barrier.h"
#include "perseus/perseus.h"
#include "topology/allreduce_cost.h"

namespace {

using perseus::Barrier;
using Clock = Barrier::Clock;

// The first four in the order of perseus::Algorithm.
constexpr const char* kContenders[] = {"pairwise", "halving_doubling", "ring", "recursive_doubling", "auto", "nothing"};
constexpr size_t kCount = sizeof kContenders / sizeof kContenders[0];
constexpr int kWarmUps = 5;

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "allreduce_bench: %s\n", what.c_str());
  std::_Exit(1);
}

void check(perseus_code code) {
  if (code != PERSEUS_OK) give_up(perseus_error_message());
}

perseus_context* join_world(const std::string& transport, const std::string& algorithm, int rank, int size) {
  const std::string name = algorithm + std::to_string(size), over = "PERSEUS_TRANSPORT=" + transport;
  const std::string chosen = "PERSEUS_ALLREDUCE_ALGORITHM=" + (algorithm == "nothing" ? "auto" : algorithm);
  const char* overrides[] = {over.c_str(), chosen.c_str(), "PERSEUS_ALLREDUCE_STREAMS=1", "PERSEUS_FLIGHT_RECORDER=off",
                             nullptr};
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

// One allreduce; seconds.
double reduce(perseus_context* context, Barrier* barrier, const std::string& name, int rank, int size,
              std::vector<float>* values) {
  for (size_t i = 0; i < values->size(); ++i) (*values)[i] = static_cast<float>(rank + static_cast<int>(i % 7));
  const int64_t count = static_cast<int64_t>(values->size());
  const perseus_tensor tensor{values->data(), values->data(), &count, 1, PERSEUS_FLOAT32};
  perseus_request request{};
  request.struct_size = sizeof request;
  request.kind = PERSEUS_ALLREDUCE;
  request.name = name.c_str();
  request.tensors = &tensor;
  request.tensor_count = 1;
  request.op = PERSEUS_SUM;
  request.prescale = request.postscale = 1.0;
  const Clock::time_point begin = barrier->begin();
  std::this_thread::sleep_until(begin);
  perseus_handle handle = 0;
  check(perseus_request_submit(context, &request, &handle));
  check(perseus_handle_wait(context, handle, -1));
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  check(perseus_handle_release(context, handle));
  for (size_t i = 0; i < values->size(); ++i)
    if ((*values)[i] != static_cast<float>(size * (size - 1) / 2 + size * static_cast<int>(i % 7)))
      give_up("a sum is wrong");
  return seconds;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const std::string& transport, int ranks, size_t bytes, size_t contender, double seconds, double ratio) {
  std::printf(
      "{\"transport\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"algorithm\": \"%s\", \"median_s\": %.9f, "
      "\"vs_pairwise\": %.4f}\n",
      transport.c_str(), ranks, bytes, kContenders[contender], seconds, ratio);
}

void measure(const std::string& transport, int size, const std::vector<size_t>& sizes, int rounds) {
  Barrier barrier(size);
  // [size][contender][rank][round]
  std::vector<std::vector<std::vector<std::vector<double>>>> times(
      sizes.size(), std::vector<std::vector<std::vector<double>>>(
                        kCount, std::vector<std::vector<double>>(static_cast<size_t>(size))));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      std::vector<perseus_context*> contexts;
      for (const char* contender : kContenders) contexts.push_back(join_world(transport, contender, rank, size));
      for (size_t s = 0; s < sizes.size(); ++s) {
        std::vector<float> values(sizes[s] / sizeof(float)), nothing;
        const std::string name = "t" + std::to_string(sizes[s]);
        for (int round = -kWarmUps; round < rounds; ++round)
          for (size_t turn = 0; turn < kCount; ++turn) {
            const size_t c = (turn + static_cast<size_t>(round + kWarmUps)) % kCount;
            std::vector<float>* data = contexts[c] == contexts.back() ? &nothing : &values;
            const double seconds = reduce(contexts[c], &barrier, name, rank, size, data);
            if (round >= 0) times[s][c][static_cast<size_t>(rank)].push_back(seconds);
          }
      }
      std::this_thread::sleep_until(barrier.begin());
      for (perseus_context* context : contexts) perseus_context_destroy(context);
    });
  for (std::thread& thread : threads) thread.join();
  for (size_t s = 0; s < sizes.size(); ++s) {
    std::vector<std::vector<double>> slowest(kCount), ratios(kCount);  // of each round
    for (size_t c = 0; c < kCount; ++c)
      for (size_t round = 0; round < static_cast<size_t>(rounds); ++round) {
        double most = 0;
        for (const std::vector<double>& of_rank : times[s][c]) most = std::max(most, of_rank[round]);
        slowest[c].push_back(most);
        ratios[c].push_back(most / slowest[0][round]);
      }
    for (size_t c = 0; c < kCount; ++c) print(transport, size, sizes[s], c, median(slowest[c]), median(ratios[c]));
  }
  std::fflush(stdout);
}

void calculate() {
  for (int members : {8, 64, 256})
    for (size_t bytes = 4; bytes <= size_t{1} << 24; bytes *= 2)
      for (size_t c = 0; c < 4; ++c) {
        const auto cost = [&](size_t algorithm) {
          return perseus::allreduce_cost(static_cast<perseus::Algorithm>(algorithm), members, bytes, perseus::kTcpCost);
        };
        print("arithmetic", members, bytes, c, cost(c), cost(c) / cost(0));
      }
}

std::vector<size_t> numbers(const std::string& text) {
  std::vector<size_t> found;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    found.push_back(std::stoul(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return found;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string transport = count > 1 ? arguments[1] : "tcp";
  const std::string sizes = count > 3 ? arguments[3] : "4,1024,4096,16384,32768,65536,131072,262144,1048576,4194304";
  calculate();
  for (size_t ranks : numbers(count > 2 ? arguments[2] : "4,8"))
    measure(transport, static_cast<int>(ranks), numbers(sizes), count > 4 ? std::atoi(arguments[4]) : 101);
  return 0;
}
