// The timeline: what is in a trace, that it can be read at any moment, and starting and stopping it.
#include "observe/timeline.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "control/negotiation.h"
#include "json.h"
#include "observe/recording.h"
#include "operation.h"

namespace {

using namespace perseus_test;
namespace fs = std::filesystem;

std::string content(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Trace {
  std::vector<Json> events;
  std::map<int, std::string> rows;  // pid → name of the tensor

  // A recording that goes on may be met in the middle of a write: then it is read again.
  explicit Trace(const std::string& path, bool goes_on = false) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(goes_on ? 60 : 0);
    Json all;
    for (bool whole = false; !whole; events = all.array) {
      const std::string text = content(path);
      all = Json();
      whole = JsonParser(text).parse(&all);
      if (!whole && std::chrono::steady_clock::now() >= deadline) {
        ADD_FAILURE() << path << " is no JSON: " << text;
        return;
      }
    }
    for (const Json& event : events)
      if (event["name"].text == "process_name")
        rows[static_cast<int>(event["pid"].number)] = event["args"]["name"].text;
  }
  // Events of that name on the row of a tensor ("" = any row).
  std::vector<Json> find(const std::string& name, const std::string& row = "") const {
    std::vector<Json> found;
    for (const Json& event : events)
      if (event["name"].text == name && (row.empty() || rows.at(static_cast<int>(event["pid"].number)) == row))
        found.push_back(event);
    return found;
  }
  bool mentions(const std::string& row) const {
    for (const auto& [pid, name] : rows)
      if (name == row) return true;
    return false;
  }
};

double begin_of(const Json& span) { return span["ts"].number; }
double end_of(const Json& span) { return span["ts"].number + span["dur"].number; }

class Timeline : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "timeline-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string file(const std::string& name) const { return directory_ + "/" + name; }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }
  static void allreduce(perseus_context* context, int rank, int size, const std::string& name, int64_t elements = 5) {
    Operation operation(PERSEUS_ALLREDUCE, name, ranks_up_to(size), {{PERSEUS_FLOAT32, {elements}}});
    Call(operation, rank).run(context);
  }

  std::string directory_;
};

TEST_F(Timeline, EveryRankTellsWhatHappenedToEveryTensor) {
  const std::string odd = "a \"name\"\nof " + std::string(300, 'x') + std::string(56, 'y');
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=" + file("trace.json"), "HOROVOD_TIMELINE_MARK_CYCLES=1",
                       "PERSEUS_TIMELINE_ALL_RANKS=1"};
  run_world(
      all_media()[0], 3,
      [&](int rank, perseus_context* context) {
        allreduce(context, rank, 3, "one");
        allreduce(context, rank, 3, odd, 1000);
        Operation gather(PERSEUS_ALLGATHER, "gather", ranks_up_to(3), {{PERSEUS_INT16, {2 + rank, 3}}});
        gather.rows = {2, 3, 4};
        Call(gather, rank).run(context);
        Operation empty(PERSEUS_ALLREDUCE, "empty", ranks_up_to(3), {{PERSEUS_FLOAT32, {0}}});
        Call(empty, rank).run(context);
      },
      options);
  ASSERT_EQ(files(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    SCOPED_TRACE(rank);
    const Trace trace(file(rank == 0 ? "trace.json" : "trace.rank" + std::to_string(rank) + ".json"));
    const Json& job = trace.events.at(0)["args"];
    EXPECT_EQ(job["rank"].number, rank);
    EXPECT_EQ(job["size"].number, 3);
    EXPECT_NEAR(job["start_time_since_epoch_in_micros"].number, static_cast<double>(time(nullptr)) * 1e6, 600e6);
    for (const std::string& name : {std::string("one"), odd}) {
      ASSERT_EQ(trace.find("NEGOTIATE_ALLREDUCE", name).size(), 1u);
      ASSERT_EQ(trace.find("ALLREDUCE", name).size(), 1u);
      ASSERT_EQ(trace.find("MEM_ALLREDUCE", name).size(), 1u);
      const Json negotiate = trace.find("NEGOTIATE_ALLREDUCE", name)[0], whole = trace.find("ALLREDUCE", name)[0],
                 moving = trace.find("MEM_ALLREDUCE", name)[0];
      const double rounding = 0.002;
      EXPECT_GT(negotiate["dur"].number, 0);
      EXPECT_NEAR(end_of(negotiate), begin_of(whole), rounding);
      EXPECT_GE(begin_of(moving), begin_of(whole) - rounding);
      EXPECT_LE(end_of(moving), end_of(whole) + rounding);
      EXPECT_EQ(whole["args"]["bytes"].number, name == odd ? 4000 : 20);
      EXPECT_EQ(whole["args"]["dtype"].text, "float32");
      EXPECT_EQ(whole["args"]["outcome"].text, "done");
      EXPECT_EQ(moving["args"]["transport"].text, "mem");
      const std::vector<Json> wire =
          trace.find("bucket " + std::to_string(std::lround(moving["args"]["bucket"].number)));
      ASSERT_EQ(wire.size(), 1u);
      EXPECT_GE(begin_of(wire[0]), begin_of(moving) - rounding);
      EXPECT_NEAR(end_of(wire[0]), end_of(moving), rounding);
      EXPECT_EQ(wire[0]["args"]["tensors"].array.at(0).text, name);
      EXPECT_EQ(wire[0]["args"]["ranks"].number, 3);
      EXPECT_EQ(wire[0]["args"]["stream"].number, moving["args"]["stream"].number);
    }
    EXPECT_EQ(trace.find("MEM_ALLGATHER", "gather").at(0)["args"]["bytes"].number, (2 + rank) * 3 * 2);
    EXPECT_EQ(trace.find("ALLREDUCE", "empty").size(), 1u);
    EXPECT_EQ(trace.find("MEM_ALLREDUCE", "empty").size(), 0u);
    EXPECT_GE(trace.find("CYCLE_START").size(), 4u);
    EXPECT_EQ(trace.find("CYCLE_START").at(2)["args"]["round"].number, 3);
  }
}

TEST_F(Timeline, ABucketNamesTheTensorsThatWereFused) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=" + file("trace.json")};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        // Two dtypes, so two buckets at once.
        Operation group(PERSEUS_ALLREDUCE, "group", ranks_up_to(2),
                        {{PERSEUS_FLOAT32, {3}}, {PERSEUS_INT64, {4}}, {PERSEUS_FLOAT32, {5}}});
        Call(group, rank).run(context);
      },
      options);
  ASSERT_EQ(files(), 1u) << "rank 0 alone";
  const Trace trace(file("trace.json"));
  const std::vector<Json> parts = trace.find("MEM_ALLREDUCE", "group");
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_NE(parts[0]["tid"].number, parts[1]["tid"].number) << "they may overlap";
  for (const Json& event : trace.events)
    EXPECT_TRUE(event["ph"].text != "X" || event["tid"].number > 0) << "Perfetto takes 0 for the pid";
  std::vector<double> bytes;
  for (const std::string bucket : {"bucket 0", "bucket 1"}) {
    const Json wire = trace.find(bucket).at(0);
    ASSERT_EQ(wire["args"]["tensors"].array.size(), 1u);
    EXPECT_EQ(wire["args"]["tensors"].array[0].text, "group");
    bytes.push_back(wire["args"]["bytes"].number);
  }
  EXPECT_EQ(bytes, (std::vector<double>{32, 32}));
  EXPECT_EQ(trace.find("ALLREDUCE", "group").at(0)["args"]["tensors"].number, 3);
  EXPECT_EQ(trace.find("CYCLE_START").size(), 0u);
}

TEST_F(Timeline, BucketsOfAGroupFollowEachOtherOnTheirLines) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=" + file("trace.json"), "PERSEUS_ALLREDUCE_STREAMS=2",
                       "HOROVOD_FUSION_THRESHOLD=65536"};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        const Operation group(PERSEUS_ALLREDUCE, "group", ranks_up_to(2),
                              std::vector<Operation::Tensor>(9, {PERSEUS_FLOAT32, {20000}}));
        for (int step = 0; step < 2; ++step) Call(group, rank).run(context);
      },
      options);
  const Trace trace(file("trace.json"));
  ASSERT_EQ(trace.find("MEM_ALLREDUCE", "group").size(), 18u);
  std::map<double, double> busy_until;  // tid → time
  size_t queued = 0;
  for (const Json& event : trace.events) {
    if (event["name"].text != "QUEUE" && event["name"].text != "MEM_ALLREDUCE") continue;
    queued += event["name"].text == "QUEUE";
    double& until = busy_until[event["tid"].number];
    EXPECT_GE(begin_of(event), until - 0.002) << event["name"].text;
    until = end_of(event);
  }
  EXPECT_GT(queued, 0u);
}

TEST_F(Timeline, TheFileIsATraceWhileTheJobRuns) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=" + file("trace.json")};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        if (rank == 0) {
          EXPECT_EQ(Trace(file("trace.json")).rows.at(0), "rank 0 of 2");
        }
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        double seen = 0;  // on rank 0, which says when it is enough
        for (int i = 0; seen == 0; ++i) {
          allreduce(context, rank, 2, "t" + std::to_string(i));
          if (rank == 0 && i % 10 == 9) seen = Trace(file("trace.json"), true).mentions("t5") ? 1 : 0;
          ASSERT_LT(std::chrono::steady_clock::now(), deadline);
          perseus_tensor tensor{&seen, &seen, nullptr, 0, PERSEUS_FLOAT64};
          ASSERT_EQ(run(context, request_of(PERSEUS_BROADCAST, "seen", &tensor, 1)).code, PERSEUS_OK);
        }
      },
      options);
}

TEST_F(Timeline, StartAndStopWhileTheJobRuns) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=DYNAMIC"};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        const std::string first = file("first.json"), second = file("second.json");
        EXPECT_EQ(perseus_timeline_stop(context), PERSEUS_OK) << "nothing to stop";
        allreduce(context, rank, 2, "before");
        EXPECT_EQ(perseus_timeline_start(context, first.c_str(), 1), PERSEUS_OK);
        allreduce(context, rank, 2, "one");
        EXPECT_EQ(perseus_timeline_start(context, first.c_str(), 0), PERSEUS_OK) << "goes on";
        allreduce(context, rank, 2, "two");
        EXPECT_EQ(perseus_timeline_start(context, second.c_str(), 0), PERSEUS_OK);
        if (rank == 0) {
          const Trace trace(first);
          EXPECT_FALSE(trace.mentions("before"));
          EXPECT_EQ(trace.find("ALLREDUCE", "one").size(), 1u);
          EXPECT_EQ(trace.find("ALLREDUCE", "two").size(), 1u);
          EXPECT_GE(trace.find("CYCLE_START").size(), 2u);
        }
        allreduce(context, rank, 2, "three");
        EXPECT_EQ(perseus_timeline_stop(context), PERSEUS_OK);
        if (rank == 0) {
          const Trace trace(second);
          EXPECT_FALSE(trace.mentions("two"));
          EXPECT_EQ(trace.find("ALLREDUCE", "three").size(), 1u);
          EXPECT_EQ(trace.find("CYCLE_START").size(), 0u);
        }
        allreduce(context, rank, 2, "four");
        EXPECT_EQ(perseus_timeline_stop(context), PERSEUS_OK);
        if (rank == 0) {
          EXPECT_EQ(perseus_timeline_start(context, "", 0), PERSEUS_INVALID_ARGUMENT);
          EXPECT_EQ(perseus_timeline_start(context, file("no/file").c_str(), 0), PERSEUS_INVALID_ARGUMENT);
          EXPECT_NE(std::string(perseus_error_message()).find("no/file': No such file or directory"),
                    std::string::npos);
        }
      },
      options);
  EXPECT_FALSE(Trace(file("second.json")).mentions("four"));
  EXPECT_EQ(files(), 2u);
}

TEST_F(Timeline, WithoutTheVariableItCannotBeStarted) {
  run_world(all_media()[0], 2, [&](int, perseus_context* context) {
    EXPECT_EQ(perseus_timeline_start(context, file("t").c_str(), 0), PERSEUS_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(perseus_error_message()).rfind("Set HOROVOD_TIMELINE=DYNAMIC", 0), 0u);
    EXPECT_EQ(perseus_timeline_stop(context), PERSEUS_OK);
  });
  EXPECT_EQ(files(), 0u);
}

TEST_F(Timeline, AFileThatCannotBeMadeEndsTheStart) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=" + file("missing/trace.json")};
  bool failed = false;
  options.on_create_error = [&](int, perseus_code code, const std::string& message) {
    failed = true;
    EXPECT_EQ(code, PERSEUS_INVALID_ARGUMENT);
    EXPECT_EQ(message.rfind("[timeline] cannot write '" + file("missing/trace.json") + "'", 0), 0u) << message;
  };
  run_world(all_media()[0], 1, [](int, perseus_context*) { ADD_FAILURE() << "it started"; }, options);
  EXPECT_TRUE(failed);
}

TEST_F(Timeline, AFullDiskEndsTheRecordingAndNotTheJob) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=/dev/full"};
  testing::internal::CaptureStderr();
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) { allreduce(context, rank, 2, "t"); }, options);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("[timeline] cannot write '/dev/full' any more: No space left on device"), std::string::npos)
      << said;
}

TEST_F(Timeline, FailedOperationsAreSaidToHaveFailed) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=" + file("trace.json")};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        float data[2] = {};
        int64_t shape[1] = {1 + rank};
        perseus_tensor tensor{data, data, shape, 1, PERSEUS_FLOAT32};
        EXPECT_EQ(run(context, request_of(PERSEUS_ALLREDUCE, "bad", &tensor, 1)).code, PERSEUS_MISMATCH);
      },
      options);
  const Trace trace(file("trace.json"));
  EXPECT_EQ(trace.find("NEGOTIATE_ALLREDUCE", "bad").at(0)["args"]["outcome"].text, "failed");
  EXPECT_EQ(trace.find("ALLREDUCE", "bad").size(), 0u);
}

TEST_F(Timeline, WhatARankThatHasJoinedGivesToOthersIsSaidToBeThat) {
  WorldOptions options;
  options.overrides = {"HOROVOD_TIMELINE=" + file("trace.json"), "PERSEUS_TIMELINE_ALL_RANKS=1"};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        allreduce(context, rank, 2, "both");
        float data[3] = {1, 2, 3};
        const int64_t shape[1] = {3};
        const perseus_tensor tensor{data, data, shape, 1, PERSEUS_FLOAT32};
        if (rank == 1) {
          EXPECT_EQ(run(context, request_of(PERSEUS_ALLREDUCE, "one", &tensor, 1)).code, PERSEUS_OK);
        }
        EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
        EXPECT_EQ(data[2], 3);
      },
      options);
  const Trace away(file("trace.json")), there(file("trace.rank1.json"));
  EXPECT_EQ(away.find("NEGOTIATE_ALLREDUCE", "one").size(), 0u);
  EXPECT_EQ(away.find("ALLREDUCE", "one").at(0)["args"]["joined"].number, 1);
  EXPECT_EQ(away.find("MEM_ALLREDUCE", "one").size(), 1u);
  EXPECT_EQ(there.find("NEGOTIATE_ALLREDUCE", "one").size(), 1u);
  EXPECT_FALSE(there.find("ALLREDUCE", "one").at(0)["args"].has("joined"));
  for (const Trace& trace : {away, there}) {
    EXPECT_FALSE(trace.find("ALLREDUCE", "both").at(0)["args"].has("joined"));
    EXPECT_EQ(trace.find("JOIN", "join").size(), 1u);
  }
}

TEST_F(Timeline, NothingIsLostSilently) {
  const std::string path = file("trace.json");
  constexpr int kRecords = 40000;  // more than the ring holds
  uint64_t added = 0;
  testing::internal::CaptureStderr();
  {
    perseus::Recording recording(path, {}, perseus::Log());
    perseus::TraceRecord record;
    record.what = perseus::TraceRecord::What::kRound;
    for (int i = 0; i < kRecords; ++i) {
      record.number = static_cast<uint64_t>(i);
      if (!recording.has_room(1, 1)) continue;
      recording.add(record, "");
      ++added;
    }
    EXPECT_FALSE(recording.has_room(perseus::Recording::kSlots + 1, 7));
  }
  const uint64_t missing = kRecords - added + 7;
  EXPECT_NE(testing::internal::GetCapturedStderr().find(std::to_string(missing) + " records are missing"),
            std::string::npos);
  const Trace trace(path);
  EXPECT_EQ(trace.find("CYCLE_START").size(), added);
  double said = 0;
  for (const Json& event : trace.find("DROPPED_RECORDS")) said += event["args"]["count"].number;
  EXPECT_EQ(said, static_cast<double>(missing));
}

TEST_F(Timeline, UnnamedOperationsShareRowsOnWhichNothingOverlaps) {
  const std::string path = file("trace.json");
  constexpr int kOperations = 30, kAtOnce = 3;
  {
    perseus::Recording recording(path, {}, perseus::Log());
    const int64_t begin = perseus::now_ns();
    for (int i = 0; i < kOperations; ++i) {
      const std::string name = "allreduce.noname." + std::to_string(i);
      const int64_t submitted = begin + 1000 * i, ended = submitted + 1000 * (kAtOnce - 1) + 500;
      perseus::TraceRecord record;
      record.transient = true;
      record.what = perseus::TraceRecord::What::kBucket;
      record.count = 1;
      record.at[0] = record.at[1] = submitted + 200;
      record.at[2] = ended - 100;
      ASSERT_TRUE(recording.has_room(3, 3));
      recording.add(record, "");
      record.what = perseus::TraceRecord::What::kMember;
      record.at[0] = submitted + 100;
      record.at[1] = submitted;
      recording.add(record, name);
      record.what = perseus::TraceRecord::What::kOperation;
      record.at[0] = submitted;
      record.at[1] = submitted + 100;
      record.at[2] = ended;
      recording.add(record, name);
    }
  }
  const Trace trace(path);
  const std::string row = "unnamed ALLREDUCE";
  const std::vector<Json> waits = trace.find("NEGOTIATE_ALLREDUCE", row), wholes = trace.find("ALLREDUCE", row);
  ASSERT_EQ(waits.size(), static_cast<size_t>(kOperations));
  ASSERT_EQ(wholes.size(), static_cast<size_t>(kOperations));
  EXPECT_EQ(trace.find("LOCAL_ALLREDUCE", row).size(), static_cast<size_t>(kOperations));
  std::map<double, double> free_at;  // by row
  for (size_t i = 0; i < wholes.size(); ++i) {
    EXPECT_EQ(wholes[i]["args"]["name"].text, "allreduce.noname." + std::to_string(i));
    EXPECT_GE(begin_of(waits[i]), free_at[wholes[i]["pid"].number]);
    free_at[wholes[i]["pid"].number] = end_of(wholes[i]);
  }
  EXPECT_EQ(free_at.size(), static_cast<size_t>(kAtOnce));
  EXPECT_EQ(trace.rows.size(), 2u + kAtOnce);
}

TEST_F(Timeline, RowsOfUnnamedRequestsWhoseEndsWereDroppedServeOthers) {
  perseus::TraceFormat format({}, 0, 0);
  std::string events;
  for (int i = 0; i < 20; ++i) {
    perseus::TraceRecord record;
    record.transient = true;
    record.what = perseus::TraceRecord::What::kBucket;
    record.count = 1;
    record.at[0] = record.at[1] = 1000 * i + 300;
    record.at[2] = 1000 * i + 700;
    format.record(record, "", &events);
    record.what = perseus::TraceRecord::What::kMember;
    record.at[0] = 1000 * i + 200;
    record.at[1] = 1000 * i + 100;
    format.record(record, "allreduce.noname." + std::to_string(i), &events);
    format.dropped(1, 1000 * i + 800, &events);
  }
  size_t rows = 0;
  for (size_t at = 0; (at = events.find("unnamed ALLREDUCE", at)) != std::string::npos; ++at) ++rows;
  EXPECT_EQ(rows, 1U);
}

TEST_F(Timeline, WhatLiesInARequestWhoseEndWasDroppedIsNoLaterOnes) {
  perseus::TraceFormat format({}, 0, 0);
  std::string events;
  const auto bucket = [&](int64_t begin) {
    perseus::TraceRecord record;
    record.what = perseus::TraceRecord::What::kBucket;
    record.number = static_cast<uint64_t>(begin);
    record.count = 1;
    record.at[0] = record.at[1] = begin;
    record.at[2] = begin + 500;
    format.record(record, "", &events);
    record.what = perseus::TraceRecord::What::kMember;
    record.at[0] = begin - 100;
    record.at[1] = begin - 200;
    format.record(record, "layer", &events);
  };
  bucket(1000);
  format.dropped(1, 1600, &events);
  bucket(3000);
  perseus::TraceRecord whole;
  whole.what = perseus::TraceRecord::What::kOperation;
  whole.ok = true;
  whole.at[0] = 2800;
  whole.at[1] = 2900;
  whole.at[2] = 3600;
  format.record(whole, "layer", &events);
  size_t inner = 0;
  for (size_t at = 0; (at = events.find("LOCAL_ALLREDUCE", at)) != std::string::npos; ++at) ++inner;
  EXPECT_EQ(inner, 1U) << events;
  EXPECT_NE(events.find("\"bucket\": 3000, \"stream\": 0, \"transport\""), std::string::npos) << events;
}

// As where a script has both hvd.init() and a process group.
TEST_F(Timeline, TwoWorldsDoNotWriteToOneFile) {
  const std::string directory = testing::TempDir() + "perseus_two" + std::to_string(getpid()) + unique_name();
  ASSERT_EQ(::mkdir(directory.c_str(), 0700), 0);
  const std::string path = directory + "/trace.json", other = directory + "/trace-2.json";
  const perseus::Log quiet(perseus::LogLevel::kFatal, false, 0);
  for (int again = 0; again < 2; ++again) {
    perseus::Recording first(path, {}, quiet), second(path, {}, quiet);
    EXPECT_EQ(first.path(), path);
    EXPECT_EQ(second.path(), other);
  }
  for (const std::string& each : {path, other}) {
    std::ifstream file(each);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(text.rfind("[\n", 0), 0U);
    EXPECT_EQ(text.find('\0'), std::string::npos);
    EXPECT_EQ(text.substr(text.size() - 3), "\n]\n");
    EXPECT_EQ(std::remove(each.c_str()), 0);
  }
  EXPECT_EQ(::rmdir(directory.c_str()), 0);
}

TEST(TimelinePath, RanksAfterTheFirstPutTheirNumberBeforeTheSuffix) {
  EXPECT_EQ(perseus::timeline_path("trace.json", 0), "trace.json");
  EXPECT_EQ(perseus::timeline_path("trace.json", 12), "trace.rank12.json");
  EXPECT_EQ(perseus::timeline_path("a.b/trace", 1), "a.b/trace.rank1");
  EXPECT_EQ(perseus::timeline_path("/a/.trace", 1), "/a/.trace.rank1");
}

// The description of "t" as group rank `rank` announces it in a round of its own with others.
perseus::RoundContent round_of(std::vector<int> announcing) {
  perseus::RoundContent content;
  content.announced.resize(3);
  for (int rank : announcing) perseus::append_request("t", perseus::Description(), &content.announced[rank]);
  return content;
}

TEST(LastRank, IsKnownWhereOneRankAloneCameWithTheLastRound) {
  const auto last_after = [](const std::vector<std::vector<int>>& rounds) {
    perseus::Entry entry;
    perseus::Negotiation negotiation(1, {4, 6, 9}, [] { return nullptr; });
    negotiation.submit("t", &entry);
    negotiation.collect();
    std::vector<perseus::Entry*> ready;
    std::vector<std::pair<perseus::Entry*, std::string>> failed;
    for (const std::vector<int>& announcing : rounds) negotiation.apply(round_of(announcing), &ready, &failed);
    EXPECT_EQ(ready.size(), 1u);
    return entry.last_rank;
  };
  EXPECT_EQ(last_after({{0}, {1}, {2}}), 9);
  EXPECT_EQ(last_after({{0, 2}, {1}}), 6);
  EXPECT_EQ(last_after({{1}, {0, 2}}), -1);
  EXPECT_EQ(last_after({{0, 1, 2}}), -1);
}

}  // namespace
