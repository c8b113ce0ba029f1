// How worlds come together and end: identity, missing ranks, shutting down with and without work in flight, starting
// again.
#include <dlfcn.h>
#include <sys/epoll.h>

#include "operation.h"
#include "variants.h"

namespace {

using namespace perseus_test;
using std::chrono::milliseconds;

// While false, a wait of the engine thread that would end with the next heartbeat, a second later, takes kNoHeartbeat.
std::atomic<bool> heartbeats{true};
constexpr int kNoHeartbeat = 120'000;  // ms

}  // namespace

// The linker prefers this one to libc's.
extern "C" int epoll_wait(int set, epoll_event* events, int most, int timeout_ms) {
  using Wait = int (*)(int, epoll_event*, int, int);
  static const Wait wait = reinterpret_cast<Wait>(dlsym(RTLD_NEXT, "epoll_wait"));
  return wait(set, events, most, timeout_ms > 500 && !heartbeats ? kNoHeartbeat : timeout_ms);
}

namespace {

constexpr char kShutDown[] = "Horovod has been shut down";

class Contexts : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

TEST_P(Contexts, RanksKnowTheirPlaceAndTheirPeers) {
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    EXPECT_EQ(perseus_context_rank(context), rank);
    EXPECT_EQ(perseus_context_size(context), 3);
    EXPECT_EQ(perseus_context_local_rank(context), rank);
    EXPECT_EQ(perseus_context_local_size(context), 3);
    EXPECT_EQ(perseus_context_cross_rank(context), 0);
    EXPECT_EQ(perseus_context_cross_size(context), 1);
    EXPECT_EQ(perseus_context_is_homogeneous(context), 1);
    for (int peer = -1; peer < 5; ++peer) {
      const bool is_peer = peer >= 0 && peer < 3 && peer != rank;
      EXPECT_STREQ(perseus_context_transport(context, peer), is_peer ? medium().name : "none") << peer;
    }
    const char* reason = nullptr;
    EXPECT_EQ(perseus_context_failed(context, &reason), 0);
    EXPECT_STREQ(reason, "");
    Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_FLOAT32, {30000}}});
    Call(operation, rank).run(context);
    const perseus_stats stats = stats_of(context);
    const bool tcp = std::string(medium().name) == "tcp";
    // A third goes to each of two peers, as does a result of a third.
    EXPECT_GE(tcp ? stats.tcp_bytes_sent : stats.shm_bytes_sent, 160000u);
    EXPECT_GE(tcp ? stats.tcp_bytes_received : stats.shm_bytes_received, 160000u);
    EXPECT_EQ(tcp ? stats.shm_bytes_sent : stats.tcp_bytes_sent, 0u);
    EXPECT_EQ(stats.operations, 1u);
    EXPECT_EQ(stats.buckets, 1u);
    EXPECT_GE(stats.rounds, 1u);
    // Two messages of each rank in a round of three; the last round may be under way.
    EXPECT_LE(stats.messages, 2 * stats.rounds);
    EXPECT_GT(stats.messages, 2 * (stats.rounds - 1));
  });
}

TEST(Context, MissingRanksAreNamed) {
  std::vector<std::thread> threads;
  for (const Medium& medium : all_media())
    for (int rank : {0, 3})
      threads.emplace_back([medium, rank] {
        perseus_context* context = nullptr;
        const std::string name = std::string("incomplete-") + medium.name;
        EXPECT_EQ(create_context(medium, name, rank, 5, 0, {"HOROVOD_START_TIMEOUT=5"}, &context), PERSEUS_TIMEOUT);
        const std::string message = perseus_error_message();
        EXPECT_NE(message.find("rank 1, 2, 4 of 5 did not appear within 5 s (HOROVOD_START_TIMEOUT)"),
                  std::string::npos)
            << message;
        EXPECT_EQ(context, nullptr);
      });
  for (std::thread& thread : threads) thread.join();
}

TEST(Context, ARankThatIsThereTwiceIsSaid) {
  const std::string name = unique_name();
  std::atomic<int> told{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&] {
      perseus_context* context = nullptr;
      EXPECT_EQ(create_context(all_media()[0], name, 0, 2, 0, {"HOROVOD_START_TIMEOUT=4"}, &context), PERSEUS_TIMEOUT);
      const std::string message = perseus_error_message();
      EXPECT_NE(message.find("rank 1 of 2 did not appear within 4 s"), std::string::npos) << message;
      if (message.find("; another process says that it is rank 0, too") != std::string::npos) ++told;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(told, 1) << "at least the one whose entry was overwritten";
}

TEST(Context, RanksOutsideTheWorldAreRefused) {
  for (const auto& [rank, size] : std::vector<std::pair<int, int>>{{2, 2}, {-1, 2}, {0, 0}, {0, -3}}) {
    perseus_context* context = nullptr;
    EXPECT_EQ(create_context(all_media()[0], unique_name(), rank, size, 0, {}, &context), PERSEUS_INVALID_ARGUMENT);
  }
}

TEST(Context, WaitingForTheOthersCanBeInterrupted) {
  perseus_context_options o{};
  o.struct_size = sizeof o;
  o.size = 2;
  const std::string name = unique_name();
  o.memory_world = name.c_str();
  std::atomic<int> asked{0};
  o.interrupted = [](void* arg) { return static_cast<std::atomic<int>*>(arg)->fetch_add(1) >= 2 ? 1 : 0; };
  o.interrupted_arg = &asked;
  perseus_context* context = nullptr;
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(perseus_context_create(&o, &context), PERSEUS_ABORTED) << perseus_error_message();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(asked, 3);
}

TEST(Context, RanksFindEachOtherThroughAServer) {
  perseus_store_server* server = nullptr;
  ASSERT_EQ(perseus_store_server_create("127.0.0.1", 0, 0, "key", 3, &server), PERSEUS_OK) << perseus_error_message();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      perseus_context_options o{};
      o.struct_size = sizeof o;
      o.rank = rank;
      o.size = 3;
      o.store_host = "127.0.0.1";
      o.store_port = perseus_store_server_port(server);
      o.secret = "key";
      o.secret_size = 3;
      perseus_context* context = nullptr;
      ASSERT_EQ(perseus_context_create(&o, &context), PERSEUS_OK) << perseus_error_message();
      EXPECT_STREQ(perseus_context_transport(context, (rank + 1) % 3), "shm");
      Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_FLOAT16, {1001}}});
      Call(operation, rank).run(context);
      perseus_context_destroy(context);
    });
  for (std::thread& thread : threads) thread.join();
  perseus_store_server_destroy(server);
}

TEST(Context, WhoComesAfterARankHasGivenUpIsToldSoAtOnceAndMeetsItInTheNextEpoch) {
  perseus_store_server* server = nullptr;
  ASSERT_EQ(perseus_store_server_create("127.0.0.1", 0, 0, "key", 3, &server), PERSEUS_OK) << perseus_error_message();
  const auto create = [&](int rank, uint32_t epoch, const char* timeout, perseus_context** context) {
    const char* overrides[] = {timeout, nullptr};
    perseus_context_options o{};
    o.struct_size = sizeof o;
    o.rank = rank;
    o.size = 2;
    o.epoch = epoch;
    o.store_host = "127.0.0.1";
    o.store_port = perseus_store_server_port(server);
    o.secret = "key";
    o.secret_size = 3;
    o.overrides = overrides;
    return perseus_context_create(&o, context);
  };
  perseus_context* contexts[2] = {nullptr, nullptr};
  EXPECT_EQ(create(1, 5, "HOROVOD_START_TIMEOUT=5", &contexts[1]), PERSEUS_TIMEOUT);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(create(0, 5, "HOROVOD_START_TIMEOUT=60", &contexts[0]), PERSEUS_ABORTED);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  const std::string message = perseus_error_message();
  EXPECT_TRUE(starts_with(message,
                          "[rendezvous] rank 1 has given up this start (world 5): [rendezvous] rank 0 of 2 did not "
                          "appear within 5 s (HOROVOD_START_TIMEOUT)"))
      << message;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      ASSERT_EQ(create(rank, 6, "HOROVOD_START_TIMEOUT=60", &contexts[rank]), PERSEUS_OK) << perseus_error_message();
      Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {1001}}});
      Call(operation, rank).run(contexts[rank]);
      perseus_context_destroy(contexts[rank]);
    });
  for (std::thread& thread : threads) thread.join();
  perseus_store_server_destroy(server);
}

TEST_P(Contexts, AShutdownEndsWhatOthersHavePending) {
  Barrier barrier(3);
  perseus_context* contexts[3];
  uint64_t sleeps[3];  // when all have submitted
  for (int leaver = 0; leaver < 3; ++leaver)
    run_world(medium(), 3, [&](int rank, perseus_context* context) {
      Operation known(PERSEUS_ALLREDUCE, "known", ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
      Operation fresh(PERSEUS_ALLREDUCE, "new", ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
      Operation mine(PERSEUS_ALLREDUCE, "only the leaver's", ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
      Call(known, rank).run(context);
      std::deque<Call> calls;
      if (rank == leaver) {
        EXPECT_EQ(calls.emplace_back(mine, rank).submit(context).code, PERSEUS_OK);
      } else {
        EXPECT_EQ(calls.emplace_back(known, rank).submit(context).code, PERSEUS_OK);
        EXPECT_EQ(calls.emplace_back(fresh, rank).submit(context).code, PERSEUS_OK);
      }
      contexts[rank] = context;
      sleeps[rank] = stats_of(context).sleeps;
      barrier.wait();
      if (rank == leaver) {
        for (int other = 0; other < 3; ++other) {
          const auto waits = [&] { return stats_of(contexts[other]).sleeps > sleeps[other]; };
          EXPECT_TRUE(other == leaver || comes_true(waits)) << "rank " << other << " does not wait";
        }
        perseus_context_shutdown(context);
      }
      for (Call& call : calls) {
        const Outcome outcome = wait(context, call.handle());
        EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
        EXPECT_TRUE(starts_with(outcome.message, kShutDown)) << outcome.message;
        EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
      }
      const Outcome outcome = Call(fresh, rank).submit(context);
      EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
      EXPECT_TRUE(starts_with(outcome.message, kShutDown)) << outcome.message;
      const char* reason = nullptr;
      EXPECT_EQ(perseus_context_failed(context, &reason), PERSEUS_ABORTED);
      EXPECT_TRUE(starts_with(reason, kShutDown)) << reason;
    });
}

TEST_P(Contexts, AnAbortEndsWhatIsUnderWayEverywhereWithItsReason) {
  Barrier barrier(3);
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    Operation awaited(PERSEUS_ALLREDUCE, "not of rank 1", ranks_up_to(3), {{PERSEUS_FLOAT32, {100}}});
    std::deque<Call> calls;
    if (rank != 1) {
      EXPECT_EQ(calls.emplace_back(awaited, rank).submit(context).code, PERSEUS_OK);
    }
    barrier.wait();
    if (rank == 1) {
      EXPECT_EQ(perseus_context_abort(context, "the loss is not finite"), PERSEUS_OK);
      EXPECT_EQ(perseus_context_abort(context, "another one"), PERSEUS_OK);
    }
    const std::string expected = "rank 1 called abort(): the loss is not finite";
    for (Call& call : calls) {
      const Outcome outcome = wait(context, call.handle());
      EXPECT_EQ(outcome.code, PERSEUS_ABORTED);
      EXPECT_EQ(outcome.message, expected);
      EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    }
    const Outcome later = Call(awaited, rank).submit(context);
    EXPECT_EQ(later.code, PERSEUS_ABORTED);
    EXPECT_EQ(later.message, expected);
    const char* reason = nullptr;
    EXPECT_EQ(perseus_context_failed(context, &reason), PERSEUS_ABORTED);
    EXPECT_EQ(reason, expected);
  });
}

TEST_P(Contexts, ABarrierDoneByAllBeforeTheShutdownNeverFails) {
  const int rounds = full_grid() ? 1000 : thin_grid() ? 30 : 60;
  for (int size : {2, 3, 5})
    for (int round = 0; round < rounds / size; ++round)
      run_world(medium(), size, [&](int rank, perseus_context* context) {
        std::mt19937 random(static_cast<unsigned>(round * 10 + rank));
        Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(size), {{PERSEUS_FLOAT32, {round * 500}}});
        Call call(operation, rank);
        ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
        if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        const Outcome outcome = run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0));
        EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        // Under way on all ranks, so it is finished first, wherever somebody shuts down already.
        if (rank % 2 == 0) {
          call.finish(context);
          perseus_context_shutdown(context);
        } else {
          perseus_context_shutdown(context);
          call.finish(context);
        }
      });
}

TEST_P(Contexts, ShutdownMayBeCalledAgainAndByAnyThread) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0)).code, PERSEUS_OK);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) threads.emplace_back([&] { perseus_context_shutdown(context); });
    for (std::thread& thread : threads) thread.join();
    perseus_context_shutdown(context);
    EXPECT_EQ(perseus_context_failed(context, nullptr), PERSEUS_ABORTED);
  });
  perseus_context_destroy(nullptr);
}

TEST_P(Contexts, EndingWaitsForNoHeartbeat) {
  // A wake-up that goes astray is made good by the next heartbeat, which does not come here.
  heartbeats = false;
  for (int round = 0; round < 60; ++round) {
    const std::string name = unique_name();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] {
        perseus_context* context = nullptr;
        ASSERT_EQ(create_context(medium(), name, rank, 2, 0, {}, &context), PERSEUS_OK) << perseus_error_message();
        if (round % 2 == 0) run(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0));
        if (round % 3 == 0) std::this_thread::sleep_for(milliseconds(3));
        const auto start = std::chrono::steady_clock::now();
        perseus_context_destroy(context);
        EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(kNoHeartbeat / 2)) << "round " << round;
      });
    for (std::thread& thread : threads) thread.join();
  }
  heartbeats = true;
}

// A busy machine may not run a rank for a second, but hardly three times in a row.
TEST_P(Contexts, IdleRanksOutliveTheShortestLimit) {
  WorldOptions options;
  options.overrides = {"GLOO_TIMEOUT_SECONDS=1"};
  std::string failures;
  for (int attempt = 0; attempt < 3; ++attempt) {
    std::atomic<int> failed{0};
    std::mutex mutex;
    run_world(
        medium(), 2,
        [&](int, perseus_context* context) {
          for (int pause = 0; pause < 2; ++pause) {
            std::this_thread::sleep_for(milliseconds(2500));
            const Outcome outcome = run(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0));
            if (outcome.code == PERSEUS_OK) continue;
            ++failed;
            const std::lock_guard<std::mutex> lock(mutex);
            failures += outcome.message + "\n";
          }
        },
        options);
    if (failed == 0) return;
  }
  FAIL() << failures;
}

TEST_P(Contexts, SubmittingWhileTheWorldEndsNeverHangs) {
  // Requests race with the end of the world; every one of them ends with a result or with the reason.
  for (int round = 0; round < (full_grid() ? 300 : 25); ++round)
    run_world(medium(), 3, [&](int rank, perseus_context* context) {
      std::vector<std::thread> threads;
      for (int t = 0; t < 2; ++t)
        threads.emplace_back([&, t] {
          for (int i = 0; i < 100000; ++i) {
            float data[4] = {};
            const int64_t shape = 4;
            const perseus_tensor tensor{data, data, &shape, 1, PERSEUS_FLOAT32};
            const std::string name = std::to_string(t) + "/" + std::to_string(i % 7);
            const Outcome outcome = run(context, request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1));
            if (outcome.code == PERSEUS_OK) continue;
            EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
            EXPECT_TRUE(starts_with(outcome.message, kShutDown)) << outcome.message;
            return;
          }
        });
      if (rank == round % 3) {
        std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
        perseus_context_shutdown(context);
      }
      for (std::thread& thread : threads) thread.join();
    });
}

TEST_P(Contexts, AWorldCanBeBuiltAgainAtOnce) {
  // Nobody waits for the others between the end of one world and the start of the next.
  const std::string name = unique_name();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      for (uint32_t epoch = 0; epoch < 12; ++epoch) {
        perseus_context* context = nullptr;
        ASSERT_EQ(create_context(medium(), name, rank, 3, epoch, {}, &context), PERSEUS_OK) << perseus_error_message();
        for (int i = 0; i < 3; ++i) {
          Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_FLOAT64, {i * 5000}}});
          operation.seed = epoch * 10 + static_cast<uint64_t>(i);
          Call(operation, rank).run(context);
        }
        if ((static_cast<uint32_t>(rank) + epoch) % 3 == 0) std::this_thread::sleep_for(milliseconds(3));
        EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0)).code, PERSEUS_OK)
            << perseus_error_message();
        perseus_context_destroy(context);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_P(Contexts, ARankThatEndsInTheMiddleOfAnOperationEndsItForAll) {
  // It goes without having waited; whether the others get a result or the reason, they get it soon.
  for (int round = 0; round < 20; ++round)
    run_world(medium(), 3, [&](int rank, perseus_context* context) {
      Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_FLOAT32, {round * 20000}}});
      Call call(operation, rank);
      Outcome outcome = call.submit(context);
      if (outcome.code == PERSEUS_ABORTED) return;  // it has gone already
      ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
      if (rank == round % 3) {
        std::this_thread::sleep_for(std::chrono::microseconds(round * 7));
        perseus_context_shutdown(context);  // after which nobody reads the buffers
        return;
      }
      outcome = wait(context, call.handle());
      if (outcome.code == PERSEUS_OK) {
        call.check(context);
      } else {
        EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
        EXPECT_TRUE(starts_with(outcome.message, kShutDown)) << outcome.message;
      }
    });
}

TEST_P(Contexts, AShutdownDoesNotWaitForAThreadThatWaits) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    Operation operation(PERSEUS_ALLREDUCE, "never answered", ranks_up_to(2), {{PERSEUS_FLOAT32, {100}}});
    Call call(operation, rank);
    if (rank == 1) {
      EXPECT_TRUE(comes_true([&] { return perseus_context_failed(context, nullptr) != 0; }));
      return;
    }
    ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
    const uint64_t sleeps = stats_of(context).sleeps;
    std::thread waiter([&] {
      const Outcome outcome = wait(context, call.handle());
      EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
      EXPECT_TRUE(starts_with(outcome.message, kShutDown)) << outcome.message;
    });
    EXPECT_TRUE(comes_true([&] { return stats_of(context).sleeps > sleeps; })) << "it does not wait";
    const auto start = std::chrono::steady_clock::now();
    perseus_context_shutdown(context);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(100)) << "the thread waits 300 s";
    waiter.join();
  });
}

TEST_P(Contexts, AShutdownThatRacesWithARoundFinishesWhatTheRoundAgreedOn) {
  // At every distance in time between one rank's shutdown and the other's request.
  for (int round = 0; round < (full_grid() ? 5000 : 150); round += thin_grid() ? 3 : 1)
    run_world(medium(), 2, [&](int rank, perseus_context* context) {
      Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {50000}}});
      Call call(operation, rank);
      const auto start = std::chrono::steady_clock::now() + std::chrono::nanoseconds(round % 150 * 700);
      while (rank == round % 2 && std::chrono::steady_clock::now() < start) continue;
      if (call.submit(context).code != PERSEUS_OK) return;  // the other one has gone
      if (rank == 0) return perseus_context_shutdown(context);
      const Outcome outcome = wait(context, call.handle());
      EXPECT_TRUE(outcome.code == PERSEUS_OK || starts_with(outcome.message, kShutDown)) << outcome.message;
    });
}

// Kernels are the process's: a context that forces a variant changes those of others, and no bits. ThreadSanitizer sees
// no race.
TEST(Context, MayForceASimdVariantWhileAnotherOneComputes) {
  const std::vector<std::string> variants = variants_here();
  std::atomic<bool> done{false};
  std::thread later([&] {
    for (size_t i = 0; !done; ++i) {
      WorldOptions options;
      options.overrides = {"PERSEUS_SIMD=" + variants[i % variants.size()]};
      run_world(all_media()[0], 1, [](int, perseus_context*) {}, options);
    }
  });
  Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {30001}}});
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    for (int times = 0; times < 100; ++times) Call(operation, rank).run(context);
  });
  done = true;
  later.join();
  perseus::kernels::select_variant("auto");
}

INSTANTIATE_TEST_SUITE_P(Media, Contexts, each_medium(), medium_name);

}  // namespace
