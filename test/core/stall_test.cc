// A rank that is late: waited for as long as it lives, named in a warning, and the job's end only where asked for.
#include <unistd.h>

#include "operation.h"

namespace {

using namespace perseus_test;
using std::chrono::milliseconds;

std::string tensor_name(const Medium& medium, bool known) {
  return std::string(known ? "known-" : "new-") + medium.name;
}

size_t times(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Standard error goes here as long as this lives, and can be read meanwhile.
class StandardError {
 public:
  StandardError() : real_(dup(2)) {
    std::string path = testing::TempDir() + "stderr-XXXXXX";
    file_ = mkstemp(path.data());
    EXPECT_GE(file_, 0) << path;
    unlink(path.c_str());
    dup2(file_, 2);
  }
  ~StandardError() {
    dup2(real_, 2);
    close(real_);
    close(file_);
  }
  StandardError(const StandardError&) = delete;
  StandardError& operator=(const StandardError&) = delete;

  std::string text() const {
    std::string all;
    char part[4096];
    for (ssize_t n; (n = pread(file_, part, sizeof part, static_cast<off_t>(all.size()))) > 0;)
      all.append(part, static_cast<size_t>(n));
    return all;
  }

 private:
  const int real_;
  int file_;
};

// Rank 2 of 3 submits when `late` returns; `known`: a name that was used before.
void run_late(const Medium& medium, const std::function<void()>& late, bool known, std::vector<std::string> overrides) {
  WorldOptions options;
  options.overrides = std::move(overrides);
  run_world(
      medium, 3,
      [&](int rank, perseus_context* context) {
        Operation operation(PERSEUS_ALLREDUCE, tensor_name(medium, known), ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
        if (known) Call(operation, rank).run(context);
        if (rank == 2) late();
        Call(operation, rank).run(context);
      },
      options);
}

// Rank 2 is so late in worlds side by side, over every medium, with names new and known; returns what was written to
// standard error.
std::string run_late_everywhere(milliseconds late, const std::vector<std::string>& overrides) {
  const StandardError standard_error;
  std::vector<std::thread> threads;
  for (const Medium& medium : all_media())
    for (bool known : {false, true})
      threads.emplace_back(
          [&, medium, known] { run_late(medium, [late] { std::this_thread::sleep_for(late); }, known, overrides); });
  for (std::thread& thread : threads) thread.join();
  return standard_error.text();
}

TEST(Stall, ALateRankIsWaitedForInSilence) { EXPECT_EQ(run_late_everywhere(milliseconds(300), {}), ""); }

TEST(Stall, ARankThatIsLateForLongerThanTheLivenessLimitIsWaitedFor) {
  EXPECT_EQ(run_late_everywhere(milliseconds(4500), {"GLOO_TIMEOUT_SECONDS=3"}), "");
}

TEST(Stall, TheWarningNamesTensorAndMissingRankAndComesFromOneRank) {
  const StandardError standard_error;
  const auto warned = [&](const Medium& medium, bool known) {
    return times(standard_error.text(), "\n2: [" + tensor_name(medium, known) + "]");
  };
  const auto begun = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (const Medium& medium : all_media())
    for (bool known : {false, true})
      threads.emplace_back([&, medium, known] {
        const auto late = [&] { EXPECT_TRUE(comes_true([&] { return warned(medium, known) > 0; }, 60)); };
        run_late(medium, late, known, {"HOROVOD_STALL_CHECK_TIME_SECONDS=2"});
      });
  for (std::thread& thread : threads) thread.join();
  const size_t most = static_cast<size_t>((std::chrono::steady_clock::now() - begun) / std::chrono::seconds(2));
  const std::string text = standard_error.text();
  const size_t warnings =
      times(text,
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
            "waiting for remainder of ranks for more than 2 seconds.");
  // Ranks of one process also say what they wait for, where they still do when a late one is asked.
  EXPECT_EQ(times(text, "perseus rank 0 warning: One or more"), warnings) << "one rank speaks for all: " << text;
  EXPECT_EQ(times(text, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"), warnings) << text;
  EXPECT_EQ(times(text, "hvd.join()"), warnings) << text;
  for (const Medium& medium : all_media()) {
    for (bool known : {false, true}) {
      const size_t of_world = warned(medium, known);
      EXPECT_TRUE(of_world >= 1 && of_world <= most) << of_world << " warnings from one world: " << text;
    }
  }
  EXPECT_EQ(times(text, "\n0: ["), 0u) << text;
  EXPECT_EQ(times(text, "\n1: ["), 0u) << text;
}

TEST(Stall, ARankThatHasJoinedLeavesTheWarningToThoseThatWait) {
  const StandardError standard_error;
  WorldOptions options;
  options.overrides = {"HOROVOD_STALL_CHECK_TIME_SECONDS=1"};
  run_world(
      all_media()[0], 3,
      [&](int rank, perseus_context* context) {
        const int64_t count = 1;
        float x = static_cast<float>(rank);
        const perseus_tensor tensor{&x, &x, &count, 1, PERSEUS_FLOAT32};
        const auto warned = [&] { return times(standard_error.text(), "\n2: [t]") > 0; };
        if (rank == 2) {
          EXPECT_TRUE(comes_true(warned, 60)) << standard_error.text();
        }
        if (rank > 0) {
          EXPECT_EQ(run(context, request_of(PERSEUS_ALLREDUCE, "t", &tensor, 1)).code, PERSEUS_OK);
          EXPECT_EQ(x, 3);
        }
        EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
      },
      options);
  const std::string text = standard_error.text();
  EXPECT_GE(times(text, "perseus rank 1 warning: One or more"), 1u) << text;
  EXPECT_EQ(times(text, "perseus rank 0 warning: One or more"), 0u) << text;
}

TEST(Stall, TheWarningAndTheEndCanBeSwitchedOff) {
  EXPECT_EQ(run_late_everywhere(milliseconds(2200),
                                {"HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=1",
                                 "HOROVOD_STALL_CHECK_DISABLE=1"}),
            "");
}

void run_until_stall_ends_the_job(const Medium& medium, std::vector<std::string> overrides) {
  WorldOptions options;
  options.overrides = std::move(overrides);
  options.overrides.push_back("PERSEUS_LOG_LEVEL=fatal");
  const auto expect_cause = [](const std::string& text) {
    // All that is missing, the oldest first; what is not yet so old, too.
    EXPECT_NE(text.find("2: [t!, u"), std::string::npos) << text;
    EXPECT_NE(text.find("for more than 2 seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS). Will shutdown."),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("hvd.join()"), std::string::npos) << text;
    EXPECT_EQ(text.find("waited for"), std::string::npos) << text;
  };
  run_world(
      medium, 3,
      [&](int rank, perseus_context* context) {
        Operation first(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
        Operation second(PERSEUS_ALLREDUCE, "u", ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
        Call call(first, rank), later(second, rank);
        if (rank == 2) {
          // The cause reaches the rank that never submitted, too.
          const char* reason = "";
          EXPECT_TRUE(comes_true([&] { return perseus_context_failed(context, &reason) != 0; }));
          expect_cause(reason);
          const Outcome outcome = call.submit(context);
          EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
          return;
        }
        // On a busy machine the clock may have run out for the other rank that submits, before this one does.
        Outcome outcome = call.submit(context);
        std::this_thread::sleep_for(milliseconds(500));  // so that the second one is younger
        later.submit(context);
        if (outcome.code == PERSEUS_OK) outcome = wait(context, call.handle());
        EXPECT_TRUE(outcome.code == PERSEUS_TIMEOUT || outcome.code == PERSEUS_ABORTED) << outcome.code;
        expect_cause(outcome.message);
      },
      options);
}

TEST(Stall, TheJobEndsWhereAskedFor) {
  // Also where the end comes before the first warning would.
  std::vector<std::thread> threads;
  for (const Medium& medium : all_media())
    for (const char* warning : {"HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_STALL_CHECK_TIME_SECONDS=60"})
      threads.emplace_back([medium, warning] {
        run_until_stall_ends_the_job(medium, {warning, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=2"});
      });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
