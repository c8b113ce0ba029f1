// A forked child, such as a DataLoader's worker, gets one clear error and disturbs nobody, alive or ending.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/fork_guard.h"
#include "operation.h"

// Under ThreadSanitizer: the second rank starts its threads in a forked process, where it would rather give up.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace {

using namespace perseus;
using namespace perseus_test;

// Runs body in a forked child and returns its exit status; -1 when it does not end in time.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(600);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class Fork : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

bool says_forked(perseus_code code) {
  return code == PERSEUS_ABORTED &&
         std::string(perseus_error_message()).find("this process was forked after init()") != std::string::npos;
}

// Every other entry point in a forked child: the number of the first that works on the context, else 0.
int first_that_does_not_refuse(perseus_context* context, perseus_handle handle) {
  float two[2] = {};
  int ranks[2];
  const char* reason = "";
  perseus_stats stats{};
  stats.struct_size = sizeof stats;
  perseus_speeds speeds{};
  speeds.struct_size = sizeof speeds;
  perseus_output output{};
  output.struct_size = sizeof output;
  perseus_residual residual{};
  residual.struct_size = sizeof residual;
  residual.name = "t";
  residual.data = two;
  residual.count = 2;
  if (!says_forked(perseus_handle_release(context, handle))) return 10;
  if (!says_forked(perseus_context_stats(context, &stats))) return 11;
  if (!says_forked(perseus_residual_read(context, &residual))) return 12;
  if (!says_forked(perseus_residual_write(context, &residual))) return 13;
  if (!says_forked(perseus_residuals_flush(context))) return 14;
  if (!says_forked(perseus_handle_output(context, handle, 0, &output))) return 15;
  if (!says_forked(perseus_group_speeds(context, 0, &speeds))) return 16;
  if (!says_forked(perseus_timeline_start(context, "t", 0))) return 17;
  if (!says_forked(perseus_timeline_stop(context))) return 18;
  if (perseus_handle_take_output(context, handle, 0) != nullptr) return 19;
  if (perseus_handle_gradient(context, handle) != -1) return 20;
  if (perseus_group_ranks(context, 0, ranks, 2) != -1) return 21;
  if (perseus_group_next_number(context, 0) != -1) return 22;
  if (perseus_context_setting(context, "PERSEUS_ALLREDUCE_STREAMS") != -1) return 23;
  if (std::string(perseus_context_transport(context, 1)) != "none") return 24;
  perseus_gradients_forget(context, 1);
  if (!says_forked(PERSEUS_ABORTED)) return 25;
  if (perseus_context_failed(context, &reason) == 0) return 26;
  if (std::string(reason).find("this process was forked after init()") == std::string::npos) return 27;
  return 0;
}

TEST_P(Fork, AChildGetsAClearErrorAndItsEndDisturbsNobody) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {50000}}});
    Call before(operation, rank);
    before.run(context);
    Operation pending_operation(PERSEUS_ALLREDUCE, "pending", ranks_up_to(2), {{PERSEUS_FLOAT32, {50000}}});
    Call pending(pending_operation, rank);
    if (rank == 0) {
      ASSERT_EQ(pending.submit(context).code, PERSEUS_OK);
      const int status = in_child([&] {
        perseus_handle handle = 0;
        const perseus_request request = pending.request();
        if (!says_forked(perseus_request_submit(context, &request, &handle))) return 1;
        if (!says_forked(perseus_handle_wait(context, pending.handle(), 1000))) return 2;
        if (perseus_handle_poll(context, pending.handle()) != -1) return 3;
        if (perseus_context_rank(context) != 0 || perseus_context_size(context) != 2) return 4;
        if (perseus_context_forked(context) == 0) return 5;
        if (const int failed = first_that_does_not_refuse(context, pending.handle())) return failed;
        perseus_context_shutdown(context);
        perseus_context_destroy(context);
        return 77;
      });
      EXPECT_EQ(status, 77);
      // One that lives on and still holds whatever fork copied.
      const pid_t sleeper = fork();
      if (sleeper == 0) {
        alarm(600);
        for (;;) pause();
      }
      EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "forked", nullptr, 0)).code, PERSEUS_OK);
      kill(sleeper, SIGKILL);
      waitpid(sleeper, nullptr, 0);
    } else {
      EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "forked", nullptr, 0)).code, PERSEUS_OK);
      ASSERT_EQ(pending.submit(context).code, PERSEUS_OK);
    }
    pending.finish(context);
    for (int step = 0; step < 5; ++step) {
      Call after(operation, rank);
      after.run(context);
    }
  });
}

TEST(ForkGuard, AForkWaitsUntilADescriptorThatOpensIsGuarded) {
  std::atomic<int> opened{-1};
  std::atomic<bool> forking{false};
  std::atomic<bool> forked{false};
  std::thread opens([&] {
    const int guarded = open_guarded([&] {
      const int fd = eventfd(0, EFD_CLOEXEC);
      opened = fd;
      while (!forking) std::this_thread::yield();
      // Time for a fork that does not wait.
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return fd;
    });
    EXPECT_EQ(guarded, opened);
    // A thread that had ended and was not joined yet would be a leak of the child, for ThreadSanitizer.
    while (!forked) std::this_thread::yield();
  });
  while (opened < 0) std::this_thread::yield();
  forking = true;
  EXPECT_EQ(in_child([&] { return fcntl(opened, F_GETFD) < 0 && errno == EBADF ? 77 : 1; }), 77);
  forked = true;
  EXPECT_GE(fcntl(opened, F_GETFD), 0);
  opens.join();
  close_guarded(opened);
  EXPECT_LT(fcntl(opened, F_GETFD), 0);
}

TEST(ForkGuard, GivesAnErrorsReasonAndGuardsNothingThen) {
  const int fd = open_guarded([] { return open("/nowhere/at/all", O_RDONLY | O_CLOEXEC); });
  EXPECT_EQ(errno, ENOENT);
  EXPECT_EQ(fd, -1);
}

TEST_P(Fork, AChildDoesNotKeepItsParentsConnectionsOpen) {
  // A process of one rank ends without a word while a child of its lives on: the other rank must notice.
  perseus_store_server* server = nullptr;
  ASSERT_EQ(perseus_store_server_create("127.0.0.1", 0, 0, "key", 3, &server), PERSEUS_OK) << perseus_error_message();
  if (std::string(medium().name) == "mem") {
    perseus_store_server_destroy(server);
    GTEST_SKIP() << "ranks of mem are threads";
  }
  const int port = perseus_store_server_port(server);
  const std::string transport = std::string("PERSEUS_TRANSPORT=") + medium().transport;
  const char* overrides[] = {transport.c_str(), nullptr};
  perseus_context_options o{};
  o.struct_size = sizeof o;
  o.size = 2;
  o.store_host = "127.0.0.1";
  o.store_port = port;
  o.secret = "key";
  o.secret_size = 3;
  o.overrides = overrides;
  int pipe_of_worker[2];
  ASSERT_EQ(pipe(pipe_of_worker), 0);
  const pid_t rank_1 = fork();
  if (rank_1 == 0) {
    alarm(600);
    o.rank = 1;
    perseus_context* context = nullptr;
    if (perseus_context_create(&o, &context) != PERSEUS_OK) _exit(1);
    const pid_t worker = fork();
    if (worker == 0) {
      alarm(600);
      for (;;) pause();
    }
    if (write(pipe_of_worker[1], &worker, sizeof worker) != sizeof worker) _exit(2);
    run(context, request_of(PERSEUS_BARRIER, "both are here", nullptr, 0));
    kill(getpid(), SIGKILL);
  }
  perseus_context* context = nullptr;
  ASSERT_EQ(perseus_context_create(&o, &context), PERSEUS_OK) << perseus_error_message();
  run(context, request_of(PERSEUS_BARRIER, "both are here", nullptr, 0));
  const Outcome outcome = run(context, request_of(PERSEUS_BARRIER, "only one is here", nullptr, 0));
  EXPECT_NE(outcome.code, PERSEUS_OK);
  EXPECT_NE(outcome.message.find("lost rank 1"), std::string::npos) << outcome.message;
  pid_t worker = 0;
  ASSERT_EQ(read(pipe_of_worker[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  EXPECT_EQ(kill(worker, 0), 0) << "it should have been there all the time";
  kill(worker, SIGKILL);
  waitpid(rank_1, nullptr, 0);
  perseus_context_destroy(context);
  perseus_store_server_destroy(server);
  close(pipe_of_worker[0]);
  close(pipe_of_worker[1]);
}

INSTANTIATE_TEST_SUITE_P(Media, Fork, each_medium(), medium_name);

}  // namespace
