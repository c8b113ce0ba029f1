// Who drives: callers that wait, poll, leave or never look again, several threads of a rank at once, several contexts
// of a thread at once. Everything ends, and soon.
#include <future>
#include <stdexcept>

#include "operation.h"
#include "progress/progress_engine.h"

namespace {

using namespace perseus_test;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class Progress : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

uint64_t operations_done(perseus_context* context) { return stats_of(context).operations; }

TEST_P(Progress, SeveralThreadsOfARankSubmitAndWaitAtOnce) {
  constexpr int kThreads = 4, kSteps = 12;
  for (int size : {2, 3}) {
    std::vector<std::vector<std::unique_ptr<Operation>>> operations(kThreads);
    for (int t = 0; t < kThreads; ++t)
      for (int step = 0; step < kSteps; ++step)
        for (int i = 0; i < 5; ++i) {
          operations[t].push_back(random_operation(static_cast<uint64_t>(t * 100 + i + 1),
                                                   std::to_string(t) + "/" + std::to_string(i), ranks_up_to(size), 0,
                                                   100000));
          operations[t].back()->seed += static_cast<uint64_t>(step) * 1000;
        }
    run_world(medium(), size, [&](int rank, perseus_context* context) {
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
          std::mt19937 random(static_cast<unsigned>(rank * 10 + t));
          for (size_t step = 0; step < kSteps; ++step) {
            std::deque<Call> calls;
            for (size_t i = 0; i < 5; ++i) {
              calls.emplace_back(*operations[static_cast<size_t>(t)][step * 5 + i], rank);
              const Outcome outcome = calls.back().submit(context);
              ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            }
            if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
            for (Call& call : calls) call.finish(context);
          }
        });
      for (std::thread& thread : threads) thread.join();
    });
  }
}

TEST_P(Progress, AnyNumberOfThreadsMayWaitForOneHandle) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    for (int step = 0; step < 20; ++step) {
      Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {30000}}});
      Call call(operation, rank);
      if (rank == 1) std::this_thread::sleep_for(std::chrono::microseconds(100 * step));
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t)
        threads.emplace_back([&] { EXPECT_EQ(wait(context, call.handle()).code, PERSEUS_OK); });
      for (std::thread& thread : threads) thread.join();
      call.finish(context);
    }
  });
}

TEST_P(Progress, AThreadThatWaitsForALateRankDoesNotHoldUpItsNeighbours) {
  std::atomic<int> quick_done{0};
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    Operation slow(PERSEUS_ALLREDUCE, "slow", ranks_up_to(2), {{PERSEUS_FLOAT32, {1000}}});
    Call late(slow, rank);
    std::thread waiter([&] {
      // Rank 1 is late until both ranks' quick threads have done their work.
      if (rank == 1) {
        EXPECT_TRUE(comes_true([&] { return quick_done == 2; })) << "held up";
      }
      EXPECT_EQ(late.submit(context).code, PERSEUS_OK);
      late.finish(context);
    });
    for (int step = 0; step < 50; ++step) {
      Operation quick(PERSEUS_ALLREDUCE, "quick", ranks_up_to(2), {{PERSEUS_INT32, {step}}});
      Call(quick, rank).run(context);
    }
    ++quick_done;
    waiter.join();
  });
}

TEST_P(Progress, WorkIsDoneThoughNobodyWaits) {
  constexpr uint64_t kRequests = 40;
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    std::vector<std::unique_ptr<Operation>> operations;
    std::deque<Call> calls;
    for (uint64_t i = 0; i < kRequests; ++i) {
      operations.push_back(random_operation(i + 1, "t" + std::to_string(i), ranks_up_to(3), 0, 1 << 20));
      ASSERT_EQ(calls.emplace_back(*operations.back(), rank).submit(context).code, PERSEUS_OK);
    }
    EXPECT_TRUE(comes_true([&] { return operations_done(context) == kRequests; })) << operations_done(context);
    // Counted a moment before it can be seen to be finished.
    for (Call& call : calls) EXPECT_TRUE(comes_true([&] { return perseus_handle_poll(context, call.handle()) == 1; }));
    for (Call& call : calls) call.finish(context);
    // One by one, with pauses of different lengths, in which the engine thread goes back to sleep.
    for (int step = 0; step < 10; ++step) {
      Operation operation(PERSEUS_ALLREDUCE, "alone", ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
      Call call(operation, rank);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      const uint64_t done = kRequests + static_cast<uint64_t>(step) + 1;
      EXPECT_TRUE(comes_true([&] { return operations_done(context) >= done; }));
      call.finish(context);
      std::this_thread::sleep_for(milliseconds(step));
    }
  });
}

TEST_P(Progress, ARankThatNeverLooksAgainDoesNotHoldUpTheOthers) {
  std::atomic<int> done{0};
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    std::deque<Operation> operations;
    std::deque<Call> calls;
    for (int i = 0; i < 20; ++i) {
      operations.emplace_back(PERSEUS_ALLREDUCE, "t" + std::to_string(i), ranks_up_to(3),
                              std::vector<Operation::Tensor>{{PERSEUS_FLOAT32, {i * i * 300}}});
      ASSERT_EQ(calls.emplace_back(operations.back(), rank).submit(context).code, PERSEUS_OK);
      if (rank == 0) std::this_thread::sleep_for(milliseconds(i % 3));
    }
    if (rank == 0) {
      EXPECT_TRUE(comes_true([&] { return done == 2; })) << "the others wait for a rank that does not wait";
    } else {
      for (Call& call : calls) call.finish(context);
      ++done;
    }
    perseus_context_shutdown(context);  // rank 0's handles were never looked at; its buffers go now
  });
}

TEST_P(Progress, PollingAloneFinishesTheWork) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    for (uint64_t i = 0; i < 60; ++i) {
      const auto operation = random_operation(i + 1, "t" + std::to_string(i % 20), ranks_up_to(2), 0, 1 << 18);
      Call call(*operation, rank);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK) << perseus_error_message();
      const auto end = Clock::now() + std::chrono::seconds(300);
      while (perseus_handle_poll(context, call.handle()) == 0) ASSERT_LT(Clock::now(), end);
      call.finish(context);
    }
  });
}

TEST_P(Progress, WaitsInSlicesEndWithTheirSlice) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {50000}}});
    for (int step = 0; step < 10; ++step) {
      Call call(operation, rank);
      if (rank == 1) std::this_thread::sleep_for(milliseconds(12));
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      const auto end = Clock::now() + std::chrono::seconds(300);
      perseus_code code = PERSEUS_IN_PROGRESS;
      while (code == PERSEUS_IN_PROGRESS && Clock::now() < end)
        code = perseus_handle_wait(context, call.handle(), step % 3);
      EXPECT_EQ(code, PERSEUS_OK);
      call.finish(context);
    }
  });
}

TEST_P(Progress, TwoContextsOfAThreadAreUsedInTurnsAndInOppositeOrders) {
  // The second world is made inside the first one's threads.
  const std::string second_name = unique_name();
  run_world(medium(), 3, [&](int rank, perseus_context* first) {
    perseus_context* second = nullptr;
    ASSERT_EQ(create_context(medium(), second_name, rank, 3, 0, {}, &second), PERSEUS_OK) << perseus_error_message();
    for (int step = 0; step < 30; ++step) {
      const auto a = random_operation(static_cast<uint64_t>(step) + 1, "same", ranks_up_to(3), 0, 100000);
      const auto b = random_operation(static_cast<uint64_t>(step) + 501, "same", ranks_up_to(3), 0, 100000);
      Call in_first(*a, rank), in_second(*b, rank);
      ASSERT_EQ(in_first.submit(first).code, PERSEUS_OK) << perseus_error_message();
      ASSERT_EQ(in_second.submit(second).code, PERSEUS_OK) << perseus_error_message();
      // While one is waited for here, others wait for the other one.
      if ((rank + step) % 2 == 0) {
        in_first.finish(first);
        in_second.finish(second);
      } else {
        in_second.finish(second);
        in_first.finish(first);
      }
    }
    perseus_context_destroy(second);
    Operation last(PERSEUS_ALLREDUCE, "last", ranks_up_to(3), {{PERSEUS_FLOAT32, {10}}});
    Call(last, rank).run(first);
  });
}

// Has nothing to do, and notes what it is told.
class Idle final : public perseus::ProgressWork {
 public:
  bool pass(bool) override {
    ++passes;
    if (throws) throws();
    return false;
  }
  void on_failure(const perseus::Error& cause) noexcept override { failures.push_back(cause.what()); }
  bool busy() noexcept override { return false; }
  bool has_submissions() const noexcept override { return false; }
  bool awaited() const noexcept override { return false; }

  int passes = 0;
  std::function<void()> throws;
  std::vector<std::string> failures;
};

TEST(ProgressLock, IsGivenBackByAnActionThatThrows) {
  perseus::Waker waker;
  Idle idle;
  perseus::ProgressEngine engine(waker, {}, idle);
  const auto throws = [&] {
    const perseus::ProgressLock lock(engine);
    throw std::runtime_error("no");
  };
  EXPECT_THROW(throws(), std::runtime_error);
  EXPECT_THROW(engine.wait([]() -> bool { throw std::runtime_error("no"); }, 0), std::runtime_error);
  // A wait that gets as far as driving before its condition throws.
  int looks = 0;
  const auto throws_later = [&]() -> bool { return ++looks < 3 ? false : throw std::runtime_error("no"); };
  EXPECT_THROW(engine.wait(throws_later, INT64_MAX), std::runtime_error);
  std::promise<void> ran;
  std::thread other([&] {
    const perseus::ProgressLock lock(engine);
    ran.set_value();
  });
  if (ran.get_future().wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
    std::fprintf(stderr, "the progress lock was never given back\n");
    std::_Exit(1);  // the thread waits for ever
  }
  other.join();
}

TEST(ProgressEngine, TellsItsWorkOfWhatAPassThrows) {
  perseus::Waker waker;
  Idle work;
  perseus::ProgressEngine engine(waker, {}, work);
  engine.stop();  // else its thread passes, too
  const std::vector<std::pair<std::function<void()>, std::string>> cases = {
      {[] { perseus::fail(perseus::ErrorKind::kIo, "[tcp] the wire is cut"); }, "[tcp] the wire is cut"},
      {[] { throw std::bad_alloc(); }, "[engine] std::bad_alloc: this process is out of memory"},
      {[] { throw std::out_of_range("17"); }, "[engine] 17"}};
  for (const auto& [throws, text] : cases) {
    work.throws = throws;
    work.failures.clear();
    engine.nudge();
    EXPECT_EQ(work.failures, std::vector<std::string>{text});
  }
  perseus::Status outcome;
  const perseus::ProgressLock lock(engine);
  EXPECT_FALSE(engine.guard([] { perseus::fail(perseus::ErrorKind::kTimeout, "late"); }, &outcome));
  EXPECT_FALSE(outcome.ok);
  EXPECT_EQ(outcome.kind, perseus::ErrorKind::kTimeout);
  EXPECT_EQ(outcome.message, "late");
  EXPECT_TRUE(engine.guard([] {}, &outcome));
}

INSTANTIATE_TEST_SUITE_P(Media, Progress, each_medium(), medium_name);

}  // namespace
