// Every task once, on the threads asked for; what tasks throw; work after work.
#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace perseus {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, DoesEveryTaskOnce) {
  ThreadPool pool(GetParam());
  for (size_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
    for (int again = 0; again < 20; ++again) {
      std::vector<std::atomic<int>> done(tasks);
      std::vector<size_t> by_thread(static_cast<size_t>(GetParam()));  // unguarded: tasks of a thread do not overlap
      pool.parallel_for(tasks, [&](size_t task, size_t thread) {
        ++done[task];
        by_thread[thread] += task + 1;
      });
      for (size_t task = 0; task < tasks; ++task) ASSERT_EQ(done[task], 1) << task;
      ASSERT_EQ(std::accumulate(by_thread.begin(), by_thread.end(), size_t{0}), tasks * (tasks + 1) / 2);
    }
  }
}

TEST_P(ThreadPoolTest, ThrowsWhatTheFirstTaskThrew) {
  ThreadPool pool(GetParam());
  for (int again = 0; again < 50; ++again) {
    std::vector<std::atomic<int>> done(40);
    try {
      pool.parallel_for(40, [&](size_t task, size_t) {
        if (task % 10 == 7) throw std::runtime_error("task " + std::to_string(task));
        ++done[task];
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      ASSERT_STREQ(error.what(), "task 7");
    }
    for (size_t task = 0; task < 7; ++task) ASSERT_EQ(done[task], 1) << task;
    size_t sum = 0;
    pool.parallel_for(1, [&](size_t, size_t) { ++sum; });
    ASSERT_EQ(sum, 1U) << "work after a failure";
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 8));

// Parts cover everything once, and what is over before a thread wakes up is not shared.
TEST(ThreadPoolParts, AreAsManyAsPayOff) {
  ThreadPool pool(3);
  EXPECT_EQ(ThreadPool(1).tasks_for(SIZE_MAX), 1U);
  EXPECT_EQ(pool.tasks_for(0), 1U);
  EXPECT_EQ(pool.tasks_for(100'000), 1U);
  EXPECT_EQ(pool.tasks_for(300'000), 4U);
  EXPECT_EQ(pool.tasks_for(SIZE_MAX), 9U);
  for (const size_t items : {0, 1, 5, 100}) {
    std::vector<std::atomic<int>> seen(items);
    std::atomic<size_t> parts{0};
    pool.for_parts(items, 10'000'000, [&](size_t begin, size_t end, size_t) {
      ++parts;
      for (size_t i = begin; i < end; ++i) ++seen[i];
    });
    EXPECT_EQ(parts, std::min<size_t>(items, 9));
    for (const auto& times : seen) EXPECT_EQ(times, 1);
  }
}

// As many at once as there are threads: each waits for all others.
TEST(ThreadPoolTogether, UsesAllItsThreads) {
  ThreadPool pool(4);
  std::atomic<int> here{0};
  std::vector<size_t> threads(4);
  pool.parallel_for(4, [&](size_t task, size_t thread) {
    ++here;
    while (here < 4) std::this_thread::yield();
    threads[task] = thread;
  });
  std::sort(threads.begin(), threads.end());
  EXPECT_EQ(threads, (std::vector<size_t>{0, 1, 2, 3}));
}

}  // namespace
}  // namespace perseus
