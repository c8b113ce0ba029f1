// perseus_request.done: called once for every request that was taken, whatever became of it, and nobody has to ask.
#include <condition_variable>
#include <future>
#include <mutex>

#include "operation.h"

namespace {

using namespace perseus_test;

// Counts calls, and what each handle had become by then.
class Calls {
 public:
  explicit Calls(perseus_context* context) : context_(context) {}

  static void call(void* arg, perseus_handle handle) { static_cast<Calls*>(arg)->add(handle); }
  void ask(perseus_request* request) {
    request->done = call;
    request->done_arg = this;
  }
  // Outcomes in the order of the calls, once there are so many.
  std::vector<Outcome> wait_for(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(called_.wait_for(lock, std::chrono::seconds(300), [&] { return calls_ >= count; }))
        << calls_ << " of " << count;
    return outcomes_;
  }
  std::vector<perseus_handle> handles() {
    std::lock_guard<std::mutex> lock(mutex_);
    return handles_;
  }
  // Called on the thread that makes progress, with the number of calls so far.
  std::function<void(size_t)> next;

 private:
  void add(perseus_handle handle) {
    const Outcome outcome = wait(context_, handle, 0);
    EXPECT_EQ(perseus_handle_release(context_, handle), PERSEUS_OK) << perseus_error_message();
    size_t count;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      outcomes_.push_back(outcome);
      handles_.push_back(handle);
      count = outcomes_.size();
    }
    if (next) next(count);
    // Only now, and under the lock: the one who waits may destroy this object next.
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    called_.notify_all();
  }

  perseus_context* context_;
  std::mutex mutex_;
  std::condition_variable called_;
  size_t calls_ = 0;  // that are over
  std::vector<Outcome> outcomes_;
  std::vector<perseus_handle> handles_;
};

class Completion : public testing::TestWithParam<int> {
 protected:
  void run_ranks(int size, const std::function<void(int, perseus_context*)>& body,
                 std::vector<std::string> overrides = {}) {
    WorldOptions options;
    options.overrides = std::move(overrides);
    run_world(all_media()[static_cast<size_t>(GetParam())], size, body, options);
  }
};

TEST_P(Completion, EveryRequestIsToldOnceAndMaySubmitTheNext) {
  constexpr int kSize = 3;
  constexpr size_t kChain = 20;
  run_ranks(kSize, [](int rank, perseus_context* context) {
    Calls calls(context);
    std::vector<int64_t> memory(kChain * 5);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = (rank + 1) * 100 + static_cast<int64_t>(i);
    const int64_t shape = 5;
    std::vector<perseus_handle> submitted(kChain);
    const auto go = [&](size_t i) {
      const std::string name = "chain" + std::to_string(i);
      const perseus_tensor tensor{&memory[i * 5], &memory[i * 5], &shape, 1, PERSEUS_INT64};
      perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
      calls.ask(&request);
      const Outcome outcome = submit(context, request, &submitted[i]);
      EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    };
    calls.next = [&](size_t count) {
      if (count < kChain) go(count);
    };
    go(0);
    for (const Outcome& outcome : calls.wait_for(kChain)) EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    EXPECT_EQ(calls.handles(), submitted);
    for (size_t i = 0; i < memory.size(); ++i)
      ASSERT_EQ(memory[i], 100 * kSize * (kSize + 1) / 2 + kSize * static_cast<int64_t>(i)) << i;
  });
}

TEST_P(Completion, WhoIsToldFindsItCounted) {
  run_ranks(2, [](int, perseus_context* context) {
    std::vector<std::pair<uint64_t, uint64_t>> counted;  // operations, buckets
    Calls calls(context);
    calls.next = [&](size_t) {
      perseus_stats stats{};
      stats.struct_size = sizeof stats;
      EXPECT_EQ(perseus_context_stats(context, &stats), PERSEUS_OK);
      counted.emplace_back(stats.operations, stats.buckets);
    };
    int64_t memory = 1;
    const int64_t shape = 1;
    const perseus_tensor tensor{&memory, &memory, &shape, 1, PERSEUS_INT64};
    perseus_request request = request_of(PERSEUS_ALLREDUCE, "again", &tensor, 1);
    calls.ask(&request);
    for (uint64_t i = 1; i < 6; ++i) {
      perseus_handle handle = 0;
      ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
      calls.wait_for(i);
      EXPECT_EQ(counted.back(), std::make_pair(i, i));
    }
  });
}

TEST_P(Completion, ErrorsAreToldToo) {
  std::promise<void> submitted;  // what stays pending
  run_ranks(2, [&](int rank, perseus_context* context) {
    Calls calls(context);
    std::vector<float> memory(8, 1.0f);
    const int64_t unequal = 4 + rank, equal = 4;
    perseus_tensor tensor{memory.data(), memory.data(), &unequal, 1, PERSEUS_FLOAT32};
    perseus_request request = request_of(PERSEUS_ALLREDUCE, "unequal", &tensor, 1);
    calls.ask(&request);
    perseus_handle handle = 0;
    EXPECT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
    EXPECT_EQ(calls.wait_for(1)[0].code, PERSEUS_MISMATCH);
    // A name in use is refused, and nobody is told twice; the other rank never has it, and leaves.
    if (rank == 1) return submitted.get_future().wait();
    tensor.shape = &equal;
    request.name = "pending";
    EXPECT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
    perseus_handle second = 0;
    EXPECT_EQ(submit(context, request, &second).code, PERSEUS_INVALID_ARGUMENT);
    // Who is told of the world's end finds its reason there.
    int reasons = 0;
    calls.next = [&](size_t) { reasons += perseus_context_failed(context, nullptr) == PERSEUS_ABORTED; };
    submitted.set_value();
    EXPECT_EQ(calls.wait_for(2)[1].code, PERSEUS_ABORTED);
    EXPECT_EQ(reasons, 1);
    perseus_context_shutdown(context);
    EXPECT_EQ(calls.handles().size(), 2u);
    EXPECT_EQ(calls.handles()[1], handle);
  });
}

TEST_P(Completion, WhatIsHeldIsToldWhileItIsSubmitted) {
  run_ranks(2,
            [](int rank, perseus_context* context) {
              Calls calls(context);
              std::vector<float> memory(6);
              const int64_t shape = 6;
              const perseus_tensor tensor{memory.data(), memory.data(), &shape, 1, PERSEUS_FLOAT32};
              for (int step = 0; step < 2; ++step) {
                for (size_t i = 0; i < memory.size(); ++i)
                  memory[i] = static_cast<float>((step + 1) * (rank + 1)) + static_cast<float>(i);
                perseus_request request = request_of(PERSEUS_ALLREDUCE, "gradient", &tensor, 1);
                request.gradient_of = 7;
                calls.ask(&request);
                perseus_handle handle = 0;
                EXPECT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
                if (step == 0) {
                  EXPECT_EQ(calls.handles(), std::vector<perseus_handle>{handle});
                }
              }
              for (const Outcome& outcome : calls.wait_for(2)) EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
              for (size_t i = 0; i < memory.size(); ++i) EXPECT_EQ(memory[i], 9.0f + 4.0f * static_cast<float>(i));
            },
            {"PERSEUS_ACCUMULATE_N_STEPS=2"});
}

TEST_P(Completion, ACallbackThatThrowsEndsTheWorldAndCompletesEveryRequest) {
  static constexpr int kRequests = 6;
  run_ranks(2, [](int rank, perseus_context* context) {
    std::atomic<int> told{0};
    std::vector<int64_t> memory(kRequests);
    std::vector<perseus_handle> handles(kRequests);
    const int64_t shape = 1;
    for (size_t i = 0; i < kRequests; ++i) {
      const std::string name = "t" + std::to_string(i);
      const perseus_tensor tensor{&memory[i], &memory[i], &shape, 1, PERSEUS_INT64};
      perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
      request.done_arg = &told;
      request.done = [](void* arg, perseus_handle) { ++*static_cast<std::atomic<int>*>(arg); };
      if (rank == 0 && i == 0)
        request.done = [](void* arg, perseus_handle) {
          ++*static_cast<std::atomic<int>*>(arg);
          throw std::runtime_error("thrown by a callback");
        };
      // Nothing more may be taken once the world has ended.
      if (submit(context, request, &handles[i]).code != PERSEUS_OK) ++told;
    }
    for (perseus_handle handle : handles) {
      const Outcome outcome = wait(context, handle);
      EXPECT_NE(outcome.code, PERSEUS_IN_PROGRESS);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (told < kRequests && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_EQ(told, kRequests);
    perseus_handle late = 0;
    Outcome outcome;
    do outcome = submit(context, request_of(PERSEUS_BARRIER, "late", nullptr, 0), &late);
    while (outcome.code == PERSEUS_OK && (outcome = wait(context, late)).code == PERSEUS_OK);
    EXPECT_NE(outcome.message.find("thrown by a callback"), std::string::npos) << outcome.message;
  });
}

// Nobody asks for a handle, so nobody is seen to wait when a step leaves out what its batch was learnt with.
TEST(CompletionOffline, AStepThatLeavesAScheduleIsFinished) {
  constexpr int kTensors = 4, kSteps = 12;
  WorldOptions options;
  options.overrides = {"PERSEUS_OFFLINE_NEG=1"};
  run_world(
      all_media()[0], 2,
      [](int rank, perseus_context* context) {
        Calls calls(context);
        std::vector<int64_t> memory(kTensors);
        const int64_t shape = 1;
        size_t asked = 0;
        for (int step = 0; step <= kSteps; ++step) {
          const int tensors = step == kSteps ? kTensors - 1 : kTensors;
          for (int t = 0; t < tensors; ++t) {
            const std::string name = "t" + std::to_string(t);
            memory[static_cast<size_t>(t)] = (rank + 1) * 10 + step + t;
            int64_t* at = &memory[static_cast<size_t>(t)];
            const perseus_tensor tensor{at, at, &shape, 1, PERSEUS_INT64};
            perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
            calls.ask(&request);
            perseus_handle handle = 0;
            ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
            ++asked;
          }
          calls.wait_for(asked);
          for (int t = 0; t < tensors; ++t) ASSERT_EQ(memory[static_cast<size_t>(t)], 30 + 2 * (step + t)) << step;
        }
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Media, Completion, each_medium(), medium_name);

}  // namespace
