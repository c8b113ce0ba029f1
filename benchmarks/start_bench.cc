// How long ranks take to become a world: from the moment at which all may begin to the end of the last
// perseus_context_create. One JSON line for each way of running ranks.
//
//   start_bench [threads = 256] [processes = 256] [repetitions = 5]
//
// "threads": ranks are threads of this process, which meet in memory. "processes": this program once for each rank,
// without Python; they meet through a store's server in the first process and are connected by shared memory, or by
// "processes tcp". 0 leaves a way out.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "barrier.h"
#include "perseus/perseus.h"

namespace perseus {
namespace {

constexpr char kSecret[] = "secret of a benchmark";
constexpr char kRankWord[] = "rank";  // the first argument of a process that is a rank
constexpr const char* kQuiet = "PERSEUS_LOG_LEVEL=error";

using Clock = std::chrono::steady_clock;

int64_t now() { return Clock::now().time_since_epoch().count(); }

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "start_bench: %s\n", why.c_str());
  std::exit(2);
}

perseus_context* create(perseus_context_options options) {
  perseus_context* context = nullptr;
  options.struct_size = sizeof options;
  options.secret = kSecret;
  options.secret_size = sizeof kSecret - 1;
  if (perseus_context_create(&options, &context) != PERSEUS_OK)
    give_up("rank " + std::to_string(options.rank) + ": " + perseus_error_message());
  return context;
}

double start_threads(int size, int repetition) {
  const std::string world = "start " + std::to_string(repetition);
  const char* overrides[] = {kQuiet, nullptr};
  Barrier barrier(size);
  std::vector<int64_t> ends(static_cast<size_t>(size));
  std::vector<perseus_context*> contexts(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      perseus_context_options options{};
      options.rank = rank;
      options.size = size;
      options.memory_world = world.c_str();
      options.overrides = overrides;
      const Clock::time_point moment = barrier.begin();
      if (rank == 0) begin = moment.time_since_epoch().count();
      std::this_thread::sleep_until(moment);
      contexts[static_cast<size_t>(rank)] = create(options);
      ends[static_cast<size_t>(rank)] = now();
    });
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  for (perseus_context* context : contexts) threads.emplace_back([context] { perseus_context_destroy(context); });
  for (std::thread& thread : threads) thread.join();
  return static_cast<double>(*std::max_element(ends.begin(), ends.end()) - begin) / 1e9;
}

// What a process that is a rank needs to know: its arguments after the word, and the ends of four pipes.
struct Part {
  int rank, size, port, epoch;
  int here, go, done, leave;  // to write "I am here" to; closed when all may begin; for the time of the end; like go
};

void transfer(bool good) {
  if (!good) give_up("a pipe broke: a rank has ended");
}

int be_rank(char** arguments) {
  Part part{};
  int* const fields[] = {&part.rank, &part.size, &part.port, &part.epoch,
                         &part.here, &part.go,   &part.done, &part.leave};
  for (int* field : fields) *field = std::atoi(*arguments++);
  perseus_context_options options{};
  options.rank = part.rank;
  options.size = part.size;
  options.store_host = "127.0.0.1";
  options.store_port = part.port;
  options.epoch = static_cast<uint32_t>(part.epoch);
  const char* overrides[] = {kQuiet, nullptr};
  options.overrides = overrides;
  char byte = 0;
  transfer(::write(part.here, &byte, 1) == 1);
  transfer(::read(part.go, &byte, 1) == 0);
  perseus_context* context = create(options);
  const int64_t end = now();
  transfer(::write(part.done, &end, sizeof end) == sizeof end);
  transfer(::read(part.leave, &byte, 1) == 0);
  perseus_context_destroy(context);
  return 0;
}

void spawn(const Part& part, int go, int leave) {
  std::vector<std::string> words{"start_bench", kRankWord};
  for (const int number : {part.rank, part.size, part.port, part.epoch, part.here, part.go, part.done, part.leave})
    words.push_back(std::to_string(number));
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  if (child < 0) give_up(std::string("fork: ") + std::strerror(errno));
  if (child > 0) return;
  ::close(go);
  ::close(leave);
  ::execv("/proc/self/exe", arguments.data());
  ::_exit(127);
}

double start_processes(int size, int repetition) {
  perseus_store_server* server = nullptr;
  if (perseus_store_server_create("127.0.0.1", 0, 0, kSecret, sizeof kSecret - 1, &server) != PERSEUS_OK)
    give_up(perseus_error_message());
  int here[2], go[2], done[2], leave[2];
  transfer(::pipe(here) == 0 && ::pipe(go) == 0 && ::pipe(done) == 0 && ::pipe(leave) == 0);
  for (int rank = 0; rank < size; ++rank)
    spawn(Part{rank, size, perseus_store_server_port(server), repetition, here[1], go[0], done[1], leave[0]}, go[1],
          leave[1]);
  for (const int fd : {here[1], go[0], done[1], leave[0]}) ::close(fd);
  for (int rank = 0; rank < size; ++rank) {
    char byte;
    transfer(::read(here[0], &byte, 1) == 1);
  }
  const int64_t begin = now();
  ::close(go[1]);
  int64_t last = 0;
  for (int rank = 0; rank < size; ++rank) {
    int64_t end;
    transfer(::read(done[0], &end, sizeof end) == sizeof end);
    last = std::max(last, end);
  }
  ::close(leave[1]);
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    if (::wait(&status) < 0 || status != 0) give_up("a rank failed");
  }
  for (const int fd : {here[0], done[0]}) ::close(fd);
  perseus_store_server_destroy(server);
  return static_cast<double>(last - begin) / 1e9;
}

void measure(const char* way, int size, int repetitions, const std::function<double(int repetition)>& start) {
  if (size == 0) return;
  std::vector<double> seconds;
  for (int repetition = 0; repetition < repetitions; ++repetition) seconds.push_back(start(repetition));
  std::sort(seconds.begin(), seconds.end());
  std::printf(
      "{\"case\": \"start\", \"ranks\": %d, \"way\": \"%s\", \"median_s\": %.6f, \"min_s\": %.6f, \"max_s\": %.6f, "
      "\"n\": %d}\n",
      size, way, seconds[seconds.size() / 2], seconds.front(), seconds.back(), repetitions);
  std::fflush(stdout);
}

int number(int argc, char** argv, int index, int otherwise, int low, int high) {
  const int value = argc > index ? std::atoi(argv[index]) : otherwise;
  if (value < low || value > high)
    give_up("argument " + std::to_string(index) + " is '" + argv[index] + "', expected " + std::to_string(low) +
            " to " + std::to_string(high));
  return value;
}

int run(int argc, char** argv) {
  const int threads = number(argc, argv, 1, 256, 0, 4096);
  const int processes = number(argc, argv, 2, 256, 0, 4096);
  const int repetitions = number(argc, argv, 3, 5, 1, 1000);
  measure("threads", threads, repetitions, [&](int repetition) { return start_threads(threads, repetition); });
  const auto start = [&](int repetition) { return start_processes(processes, repetition); };
  ::setenv("PERSEUS_TRANSPORT", "auto", 1);
  measure("processes", processes, repetitions, start);
  ::setenv("PERSEUS_TRANSPORT", "tcp", 1);
  measure("processes tcp", processes, repetitions, start);
  return 0;
}

}  // namespace
}  // namespace perseus

int main(int argc, char** argv) {
  if (argc == 10 && std::strcmp(argv[1], perseus::kRankWord) == 0) return perseus::be_rank(argv + 2);
  return perseus::run(argc, argv);
}
