// Sends and receives between two ranks: what arrives, in which order, and how they end when a rank goes.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <memory>

#include "values.h"
#include "world.h"

namespace {

using namespace perseus_test;

constexpr size_t kEager = 4 * 1024, kLargest = 256 * 1024;

class PointToPoint : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

// The bytes of the `number`-th message between two ranks.
Bytes message(int from, int to, uint64_t number, size_t size) {
  Bytes bytes(size);
  fill(PERSEUS_UINT8, mix(static_cast<uint64_t>(to) << 32 | number), from, 0, size, bytes.data());
  return bytes;
}

// One send or receive, and its memory.
class Half {
 public:
  static constexpr unsigned char kUnwritten = 0xa5;

  // A send of the bytes.
  Half(perseus_context* context, Bytes bytes, int to, int64_t tag) : bytes_(std::move(bytes)) {
    start(context, PERSEUS_SEND, to, tag);
  }
  // A receive.
  Half(perseus_context* context, size_t size, int from, int64_t tag) : bytes_(size, kUnwritten) {
    start(context, PERSEUS_RECEIVE, from, tag);
  }
  Half(const Half&) = delete;
  Half& operator=(const Half&) = delete;

  const Outcome& submitted() const { return submitted_; }
  const Bytes& bytes() const { return bytes_; }
  bool poll() { return perseus_handle_poll(context_, handle_) == 1; }

  Outcome outcome() {
    if (handle_ == 0) return submitted_;
    const Outcome outcome = wait(context_, handle_);
    if (outcome.code == PERSEUS_OK && receives_) {
      perseus_output output{};
      output.struct_size = sizeof output;
      EXPECT_EQ(perseus_handle_output(context_, handle_, 0, &output), PERSEUS_OK);
      EXPECT_EQ(output.ndim, 0);
      source_ = static_cast<int>(output.size);
    }
    EXPECT_EQ(perseus_handle_release(context_, handle_), PERSEUS_OK);
    handle_ = 0;
    return outcome;
  }
  void finish() {
    const Outcome outcome = this->outcome();
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  }
  void expect(const Bytes& expected, int source) {
    finish();
    EXPECT_EQ(source_, source);
    ASSERT_EQ(bytes_.size(), expected.size());
    EXPECT_TRUE(expected.empty() || std::memcmp(bytes_.data(), expected.data(), expected.size()) == 0)
        << expected.size() << " bytes from rank " << source;
  }
  int source() const { return source_; }

 private:
  void start(perseus_context* context, perseus_kind kind, int peer, int64_t tag) {
    context_ = context;
    receives_ = kind == PERSEUS_RECEIVE;
    const int64_t shape[1] = {static_cast<int64_t>(bytes_.size())};
    const perseus_tensor tensor{receives_ ? nullptr : bytes_.data(), receives_ ? bytes_.data() : nullptr, shape, 1,
                                PERSEUS_UINT8};
    perseus_request r = request_of(kind, nullptr, &tensor, 1);
    r.root = peer;
    r.tag = tag;
    submitted_ = submit(context, r, &handle_);
  }

  Bytes bytes_;
  perseus_context* context_ = nullptr;
  perseus_handle handle_ = 0;
  bool receives_ = false;
  int source_ = -2;
  Outcome submitted_;
};

std::vector<size_t> sizes() {
  if (kThreadSanitizer && thin_grid()) return {0, 1, kEager, kEager + 1, kLargest + 1, 1 << 20};
  return {0,
          1,
          2,
          kEager - 1,
          kEager,
          kEager + 1,
          64 * 1024 - 1,
          64 * 1024,
          64 * 1024 + 1,
          kLargest - 1,
          kLargest,
          kLargest + 1,
          8 << 20};
}

TEST_P(PointToPoint, MessagesOfEverySizeArriveBitForBitInBothDirections) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    const int other = 1 - rank;
    for (const bool receives_first : {false, true}) {
      std::deque<Half> sends, receives;
      for (size_t turn = 0; turn < 2; ++turn) {
        for (size_t i = 0; i < sizes().size(); ++i) {
          if ((turn == 0) == receives_first) receives.emplace_back(context, sizes()[i], other, 7);
          else sends.emplace_back(context, message(rank, other, i, sizes()[i]), other, 7);
        }
      }
      for (size_t i = 0; i < sizes().size(); ++i) receives[i].expect(message(other, rank, i, sizes()[i]), other);
      for (Half& send : sends) send.finish();
    }
  });
}

TEST_P(PointToPoint, EitherRankMaySendFirst) {
  for (const int sender : {0, 1})
    run_world(medium(), 2, [&](int rank, perseus_context* context) {
      for (const size_t size : {size_t{10}, size_t{100'000}}) {
        if (rank == sender) Half(context, message(rank, 1 - rank, 0, size), 1 - rank, 0).finish();
        else Half(context, size, PERSEUS_ANY_RANK, 0).expect(message(sender, rank, 0, size), sender);
      }
    });
}

TEST_P(PointToPoint, TagsNeverBlockEachOther) {
  constexpr int kTags = 40;
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    const auto size = [](int tag) { return static_cast<size_t>(tag % 3 == 0 ? 100'000 : tag * 50); };
    std::deque<Half> all;
    if (rank == 0) {
      for (int tag = 0; tag < kTags; ++tag) all.emplace_back(context, message(0, 1, tag, size(tag)), 1, tag);
      for (Half& send : all) send.finish();
      return;
    }
    for (int tag = kTags; tag-- > 0;) Half(context, size(tag), 0, tag).expect(message(0, 1, tag, size(tag)), 0);
  });
}

TEST_P(PointToPoint, MessagesOfOneTagKeepTheirOrder) {
  const int count = kSanitizer ? 500 : 4000;
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    std::deque<Half> all;
    for (int i = 0; i < count; ++i) {
      const size_t size = static_cast<size_t>(i % 97 == 96 ? 10'000 : i % 61);
      if (rank == 0) all.emplace_back(context, message(0, 1, i, size), 1, 3);
      else all.emplace_back(context, size, i % 5 == 0 ? PERSEUS_ANY_RANK : 0, 3);
    }
    for (int i = 0; i < count; ++i) {
      if (rank == 0) all[i].finish();
      else all[i].expect(message(0, 1, i, all[i].bytes().size()), 0);
    }
    EXPECT_EQ(stats_of(context).operations, static_cast<uint64_t>(count));
  });
}

TEST_P(PointToPoint, AReceiveFromAnyRankSaysWhoseMessageItGot) {
  constexpr int kRounds = 30, kRanks = 4;
  Barrier done(kRanks);  // who leaves ends what others still have under way
  run_world(medium(), kRanks, [&](int rank, perseus_context* context) {
    const auto size = [](int round) { return static_cast<size_t>(round % 3 == 0 ? 20'000 : round); };
    if (rank != 0) {
      std::deque<Half> sends;
      for (int round = 0; round < kRounds; ++round)
        sends.emplace_back(context, message(rank, 0, round, size(round)), 0, round);
      for (Half& send : sends) send.finish();
      return done.wait();
    }
    for (int round = 0; round < kRounds; ++round) {
      std::vector<int> sources;
      for (int i = 0; i < 3; ++i) {
        Half receive(context, size(round), PERSEUS_ANY_RANK, round);
        receive.finish();
        sources.push_back(receive.source());
        EXPECT_EQ(receive.bytes(), message(receive.source(), 0, round, size(round)));
      }
      std::sort(sources.begin(), sources.end());
      EXPECT_EQ(sources, (std::vector<int>{1, 2, 3}));
    }
    done.wait();
  });
}

TEST_P(PointToPoint, CollectivesAreUnderWayMeanwhile) {
  constexpr int kSteps = 10, kRanks = 3;
  Barrier done(kRanks);
  run_world(medium(), kRanks, [&](int rank, perseus_context* context) {
    const int next = (rank + 1) % kRanks, last = (rank + kRanks - 1) % kRanks;
    for (int step = 0; step < kSteps; ++step) {
      const size_t size = step % 2 == 0 ? 1 << 20 : 100;
      Half send(context, message(rank, next, step, size), next, step);
      std::vector<int64_t> sum(50'000, rank + 1);
      const int64_t shape[1] = {50'000};
      const perseus_tensor tensor{sum.data(), sum.data(), shape, 1, PERSEUS_INT64};
      perseus_handle reduction = 0;
      ASSERT_EQ(submit(context, request_of(PERSEUS_ALLREDUCE, "sum", &tensor, 1), &reduction).code, PERSEUS_OK);
      Half receive(context, size, last, step);
      EXPECT_EQ(wait(context, reduction).code, PERSEUS_OK);
      perseus_handle_release(context, reduction);
      EXPECT_EQ(sum, std::vector<int64_t>(50'000, 6));
      receive.expect(message(last, rank, step, size), last);
      send.finish();
    }
    done.wait();
  });
}

TEST_P(PointToPoint, PollingMakesProgress) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    for (const size_t size : {size_t{3}, size_t{1} << 20}) {
      Half send(context, message(rank, 1 - rank, 0, size), 1 - rank, 0), receive(context, size, 1 - rank, 0);
      EXPECT_TRUE(comes_true([&] { return send.poll() && receive.poll(); }));
      receive.expect(message(1 - rank, rank, 0, size), 1 - rank);
      send.finish();
    }
  });
}

TEST_P(PointToPoint, NobodyHasToWaitForAMessageToMove) {
  Barrier submitted(2);
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    std::atomic<int> done{0};
    const auto count = [](void* arg, perseus_handle) { static_cast<std::atomic<int>*>(arg)->fetch_add(1); };
    Bytes bytes = message(0, 1, 0, 1 << 20), expected = bytes;
    if (rank == 1) std::fill(bytes.begin(), bytes.end(), Half::kUnwritten);
    const int64_t shape[1] = {1 << 18};
    const perseus_tensor tensor{bytes.data(), bytes.data(), shape, 1, PERSEUS_FLOAT32};
    perseus_request r = request_of(rank == 0 ? PERSEUS_SEND : PERSEUS_RECEIVE, nullptr, &tensor, 1);
    r.root = 1 - rank;
    r.done = count;
    r.done_arg = &done;
    perseus_handle handle = 0;
    ASSERT_EQ(submit(context, r, &handle).code, PERSEUS_OK);
    EXPECT_TRUE(comes_true([&] { return done == 1; }));
    EXPECT_EQ(wait(context, handle, 0).code, PERSEUS_OK);
    EXPECT_EQ(bytes, expected);
    perseus_handle_release(context, handle);
    submitted.wait();
  });
}

TEST_P(PointToPoint, SizesThatDifferAreAnErrorOnBothRanksAndTheWorldGoesOn) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    const std::vector<std::pair<size_t, size_t>> cases{{10, 9}, {0, 1}, {100'000, 100'001}, {5000, 5}};
    for (const bool late : {false, true})
      for (const auto& [sent, room] : cases) {
        Half wrong = rank == 0 ? Half(context, message(0, 1, 0, sent), 1, 5) : Half(context, room, 0, 5);
        Half right = rank == 0 ? Half(context, message(0, 1, 1, sent), 1, 5) : Half(context, sent, 0, 5);
        if (late && rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        const Outcome outcome = wrong.outcome();
        EXPECT_EQ(outcome.code, PERSEUS_MISMATCH);
        EXPECT_EQ(outcome.message, "Mismatched sizes: rank 0 sends " + std::to_string(sent) +
                                       " bytes to rank 1 with tag 5, but the receive there is of " +
                                       std::to_string(room) +
                                       " bytes. Receive into a tensor of the size that is sent.");
        if (rank == 1) {
          EXPECT_EQ(wrong.bytes(), Bytes(room, Half::kUnwritten));
          right.expect(message(0, 1, 1, sent), 0);
        } else {
          right.finish();
        }
      }
  });
}

TEST_P(PointToPoint, WhatMakesNoSenseIsRefusedAtOnce) {
  Barrier refused(2);
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    const auto expect = [&](const Outcome& outcome, const std::string& text) {
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      EXPECT_EQ(outcome.message, text);
    };
    const std::string self = std::to_string(rank);
    expect(Half(context, Bytes(4), rank, 0).submitted(),
           "Send to rank " + self + " with tag 0: that is this rank itself. Copy the tensor instead.");
    expect(Half(context, 4, rank, 1).submitted(),
           "Receive from rank " + self + " with tag 1: that is this rank itself. Copy the tensor instead.");
    expect(Half(context, Bytes(4), 2, 0).submitted(), "Send to rank 2 with tag 0: the world has ranks 0 to 1.");
    expect(Half(context, Bytes(4), -1, 0).submitted(), "Send to rank -1 with tag 0: the world has ranks 0 to 1.");
    expect(Half(context, 4, -2, 0).submitted(), "Receive from rank -2 with tag 0: the world has ranks 0 to 1.");
    expect(Half(context, 4, 1 - rank, -3).submitted(),
           "Receive from rank " + std::to_string(1 - rank) + " with tag -3: a tag must not be negative.");
    perseus_request r = request_of(PERSEUS_SEND, nullptr, nullptr, 0);
    r.root = 1 - rank;
    expect(run(context, r), "Send to rank " + std::to_string(1 - rank) + " with tag 0: expected one tensor, got 0.");
    const int64_t shape[1] = {4};
    const perseus_tensor nowhere{nullptr, nullptr, shape, 1, PERSEUS_FLOAT32};
    r.tensors = &nowhere;
    r.tensor_count = 1;
    expect(run(context, r), "[engine] 'send' has elements but no memory: its pointer is null");
    r.group = 1;
    expect(run(context, r),
           "Send to rank " + std::to_string(1 - rank) +
               " with tag 0: sends and receives name ranks of the world, so the process set must be 0.");
    refused.wait();
  });
  run_world(medium(), 1, [&](int, perseus_context* context) {
    EXPECT_EQ(Half(context, 4, PERSEUS_ANY_RANK, 0).submitted().message,
              "Receive from rank -1 with tag 0: the world has no other rank.");
  });
}

TEST_P(PointToPoint, WhatIsNeverReceivedEndsWithTheWorld) {
  for (const int leaver : {0, 1}) {
    Barrier all_there(2);
    run_world(medium(), 2, [&](int rank, perseus_context* context) {
      // Of every state: announced with its bytes, without, waiting for any, and from one.
      Half small(context, Bytes(10), 1 - rank, 1), large(context, Bytes(100'000), 1 - rank, 2);
      Half any(context, 5, PERSEUS_ANY_RANK, 3), one(context, 6, 1 - rank, 4);
      // A message makes the round, so that the others are known.
      Half send(context, message(rank, 1 - rank, 0, 70'000), 1 - rank, 5), receive(context, 70'000, 1 - rank, 5);
      receive.expect(message(1 - rank, rank, 0, 70'000), 1 - rank);
      send.finish();
      all_there.wait();
      if (rank == leaver) perseus_context_shutdown(context);
      for (Half* half : {&small, &large, &any, &one}) {
        const Outcome outcome = half->outcome();
        EXPECT_EQ(outcome.code, PERSEUS_ABORTED);
        const std::string who = rank == leaver ? "this rank" : "rank " + std::to_string(leaver);
        EXPECT_EQ(outcome.message.find("Horovod has been shut down: " + who + " called shutdown()"), 0u)
            << outcome.message;
      }
      EXPECT_EQ(Half(context, Bytes(1), 1 - rank, 0).submitted().code, PERSEUS_ABORTED);
    });
  }
}

// The other rank lives, and does not know of it.
TEST_P(PointToPoint, WhatNobodyAnswersEndsWhereAskedForAndNamesRankAndTag) {
  WorldOptions options;
  options.overrides = {"HOROVOD_STALL_CHECK_TIME_SECONDS=60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=1"};
  const struct {
    bool sends;
    int peer;
    const char* text;
  } kCases[] = {
      {true, 1, "[p2p] rank 1 has not started a receive from rank 0 with tag 7 within 1 s"},
      {false, 1, "[p2p] rank 1 has not started a send to rank 0 with tag 7 within 1 s"},
      {false, PERSEUS_ANY_RANK, "[p2p] none of ranks 1, 2 has started a send to rank 0 with tag 7 within 1 s"}};
  for (const auto& c : kCases)
    run_world(
        medium(), 3,
        [&](int rank, perseus_context* context) {
          const char* reason = "";
          if (rank != 0) {
            EXPECT_TRUE(comes_true([&] { return perseus_context_failed(context, &reason) == PERSEUS_ABORTED; }));
            EXPECT_NE(std::string(reason).find(c.text), std::string::npos) << reason;
            return;
          }
          std::unique_ptr<Half> half(c.sends ? new Half(context, Bytes(10), c.peer, 7)
                                             : new Half(context, 10, c.peer, 7));
          const Outcome outcome = half->outcome();
          EXPECT_EQ(outcome.code, PERSEUS_TIMEOUT) << outcome.message;
          EXPECT_EQ(outcome.message.find(c.text), 0u) << outcome.message;
          EXPECT_EQ(perseus_context_failed(context, nullptr), PERSEUS_TIMEOUT);
        },
        options);
}

TEST_P(PointToPoint, TheTimeForAnAnswerCanBeChangedMeanwhile) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    EXPECT_EQ(perseus_context_set_stall_limits(context, -1, 0), PERSEUS_INVALID_ARGUMENT);
    if (rank == 1) {
      EXPECT_TRUE(comes_true([&] { return perseus_context_failed(context, nullptr) != 0; }));
      return;
    }
    Half receive(context, 10, 1, 7);
    EXPECT_EQ(perseus_context_set_stall_limits(context, 0, 1), PERSEUS_OK);
    EXPECT_EQ(receive.outcome().code, PERSEUS_TIMEOUT);
  });
}

// The last message of a rank that leaves: its payload may still be on its way when it says goodbye.
TEST_P(PointToPoint, WhatWasSentBeforeAShutdownArrives) {
  const int turns = kSanitizer ? 3 : 20;
  for (int turn = 0; turn < turns; ++turn) {
    const size_t size = turn % 2 == 0 ? 3 << 20 : 100;
    run_world(medium(), 3, [&](int rank, perseus_context* context) {
      if (rank == 1) return Half(context, message(1, 0, turn, size), 0, 0).finish();
      if (rank == 0) return Half(context, size, PERSEUS_ANY_RANK, 0).expect(message(1, 0, turn, size), 1);
      const Outcome outcome = Half(context, size, PERSEUS_ANY_RANK, 0).outcome();
      EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
    });
  }
}

// A rank that is killed amid a payload, or before any, in a process of its own.
TEST_P(PointToPoint, ARankThatDiesIsNamed) {
  if (std::string(medium().name) == "mem") GTEST_SKIP() << "ranks of mem are threads";
  if (kThreadSanitizer) GTEST_SKIP() << "looks at memory that is being written";
  for (const bool amid : {false, true}) {
    perseus_store_server* server = nullptr;
    ASSERT_EQ(perseus_store_server_create("127.0.0.1", 0, 0, "key", 3, &server), PERSEUS_OK);
    const std::string transport = std::string("PERSEUS_TRANSPORT=") + medium().transport;
    const char* overrides[] = {transport.c_str(), nullptr};
    perseus_context_options o{};
    o.struct_size = sizeof o;
    o.size = 2;
    o.store_host = "127.0.0.1";
    o.store_port = perseus_store_server_port(server);
    o.secret = "key";
    o.secret_size = 3;
    o.overrides = overrides;
    constexpr size_t kBytes = 256 << 20;  // takes a while
    const pid_t child = fork();
    if (child == 0) {
      alarm(600);
      o.rank = 1;
      perseus_context* context = nullptr;
      if (perseus_context_create(&o, &context) != PERSEUS_OK) _exit(1);
      Half(context, 1, 0, 1).outcome();
      if (!amid) kill(getpid(), SIGKILL);
      Half(context, Bytes(kBytes, 'x'), 0, 2).outcome();
      _exit(2);
    }
    perseus_context* context = nullptr;
    ASSERT_EQ(perseus_context_create(&o, &context), PERSEUS_OK) << perseus_error_message();
    Half(context, Bytes(1), 1, 1).outcome();
    Half receive(context, amid ? kBytes : 8, amid ? 1 : PERSEUS_ANY_RANK, 2), never(context, Bytes(8), 1, 9);
    if (amid) {
      const volatile unsigned char& first = receive.bytes()[0];
      EXPECT_TRUE(comes_true([&] { return first == 'x'; }));
      kill(child, SIGKILL);
    }
    for (Half* half : {&receive, &never}) {
      const Outcome outcome = half->outcome();
      EXPECT_NE(outcome.code, PERSEUS_OK);
      EXPECT_NE(outcome.message.find("lost rank 1"), std::string::npos) << outcome.message;
    }
    EXPECT_TRUE(!amid || receive.bytes().back() == Half::kUnwritten) << "it had arrived before";
    waitpid(child, nullptr, 0);
    perseus_context_destroy(context);
    perseus_store_server_destroy(server);
  }
}

TEST(PointToPointCallers, AnOlderOneKnowsNoTag) {
  run_world(all_media()[0], 2, [](int rank, perseus_context* context) {
    Bytes bytes = rank == 0 ? message(0, 1, 0, 20) : Bytes(20);
    const int64_t shape[1] = {20};
    const perseus_tensor tensor{bytes.data(), bytes.data(), shape, 1, PERSEUS_UINT8};
    perseus_request r = request_of(rank == 0 ? PERSEUS_SEND : PERSEUS_RECEIVE, nullptr, &tensor, 1);
    r.root = 1 - rank;
    r.tag = 77;  // behind the end of its struct
    r.struct_size = offsetof(perseus_request, tag);
    const Outcome outcome = run(context, r);
    EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    EXPECT_EQ(bytes, message(0, 1, 0, 20));
  });
}

INSTANTIATE_TEST_SUITE_P(Media, PointToPoint, each_medium(), medium_name);

}  // namespace
