// What ranks leave behind when a world fails, and that they leave nothing when it does not.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "operation.h"

namespace {

using namespace perseus_test;
namespace fs = std::filesystem;

class FlightRecorder : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "flight-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  // 300 allreduces of 3 ranks; then rank 2 leaves the others alone with `late` until the stall clock ends the job.
  void fail_after_operations(const std::string& where) {
    WorldOptions options;
    options.overrides = {"HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=3",
                         "PERSEUS_LOG_LEVEL=warning", "PERSEUS_FLIGHT_RECORDER=" + where};
    run_world(
        all_media()[0], 3,
        [&](int rank, perseus_context* context) {
          for (int i = 0; i < 300; ++i) {
            Operation operation(PERSEUS_ALLREDUCE, "t" + std::to_string(i), ranks_up_to(3), {{PERSEUS_INT16, {5, 2}}});
            Call(operation, rank).run(context);
          }
          Operation operation(PERSEUS_BROADCAST, "a \"late\"\none", ranks_up_to(3), {{PERSEUS_FLOAT64, {7}}});
          Call call(operation, rank);
          if (rank == 2) {
            const char* reason = "";
            EXPECT_TRUE(comes_true([&] { return perseus_context_failed(context, &reason) != 0; }));
            return;
          }
          ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
          EXPECT_NE(wait(context, call.handle()).code, PERSEUS_OK);
        },
        options);
  }

  std::vector<std::string> lines_of(int rank) const {
    std::vector<std::string> lines;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      if (entry.path().filename().string().find("rank" + std::to_string(rank) + "-") == std::string::npos) continue;
      struct stat status{};
      EXPECT_EQ(stat(entry.path().c_str(), &status), 0);
      EXPECT_EQ(status.st_mode & 0777, 0600u) << "names of tensors are the owner's business";
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) lines.push_back(line);
    }
    return lines;
  }

  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }

  std::string directory_;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(FlightRecorder, AFailedWorldLeavesTheLastOperationsOfEveryRank) {
  testing::internal::CaptureStderr();
  fail_after_operations(directory_);
  const std::string said = testing::internal::GetCapturedStderr();
  ASSERT_EQ(files(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    const std::vector<std::string> lines = lines_of(rank);
    ASSERT_EQ(lines.size(), 257u) << "the failure and 256 operations";
    EXPECT_TRUE(contains(lines[0], "\"rank\": " + std::to_string(rank) + ", \"size\": 3, \"epoch\": 0, ")) << lines[0];
    EXPECT_TRUE(contains(lines[0], "2: [a ")) << lines[0];
    // Rank 2 never submitted the late one: one operation less before the first that is kept.
    const int first = rank == 2 ? 44 : 45;
    const std::string name = "t" + std::to_string(first);
    EXPECT_TRUE(contains(lines[1], "{\"number\": " + std::to_string(first) + ", \"name\": \"" + name +
                                       "\", \"kind\": \"ALLREDUCE\", \"group\": 0, \"dtype\": \"int16\", "
                                       "\"tensors\": 1, \"bytes\": 20, \"submitted\": -"))
        << lines[1];
    EXPECT_TRUE(contains(lines[1], "\"outcome\": \"done\"}")) << lines[1];
    EXPECT_FALSE(contains(lines[1], "null")) << lines[1];
    if (rank == 2) continue;
    const std::string& last = lines.back();
    EXPECT_TRUE(contains(last, "\"name\": \"a \\\"late\\\"\\u000aone\", \"kind\": \"BROADCAST\"")) << last;
    EXPECT_TRUE(contains(last, "\"agreed\": null, \"started\": null, \"ended\": null, \"outcome\": \"failed\"}"))
        << last;
  }
  for (const auto& entry : fs::directory_iterator(directory_))
    EXPECT_TRUE(contains(said, "the last operations of this rank are in " + entry.path().string())) << said;
}

// As of worlds that a process has at once, or of processes with one number in containers.
TEST_F(FlightRecorder, AWorldThatFailsLaterHasAFileOfItsOwn) {
  for (size_t failed : {1, 2}) {
    fail_after_operations(directory_);
    const size_t lines = lines_of(0).size();
    EXPECT_EQ(lines % failed, 0U);
    EXPECT_GT(lines / failed, 200U);
    size_t files = 0;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      const std::string name = entry.path().filename().string();
      files += name.rfind("perseus-flight-rank0-", 0) == 0 ? 1 : 0;
    }
    EXPECT_EQ(files, failed);
  }
}

TEST_F(FlightRecorder, ItCanBeSwitchedOffAndSurvivesAMissingDirectory) {
  testing::internal::CaptureStderr();
  std::thread off([&] { fail_after_operations("off"); });
  fail_after_operations(directory_ + "/missing");
  off.join();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_FALSE(contains(said, "the last operations"));
  EXPECT_TRUE(contains(said, "[flight recorder] cannot write '" + directory_ + "/missing/perseus-flight-rank0-"))
      << said;
  EXPECT_FALSE(fs::exists("off"));
  EXPECT_EQ(files(), 0u);
}

TEST_F(FlightRecorder, TheLastFewFilesOfAUserAreKept) {
  const auto touch = [&](const std::string& name, int hours_ago) {
    std::ofstream(directory_ + "/" + name) << name;
    fs::last_write_time(directory_ + "/" + name, fs::file_time_type::clock::now() - std::chrono::hours(hours_ago));
  };
  for (int i = 1; i <= 30; ++i) touch("perseus-flight-rank9-pid" + std::to_string(i) + "-epoch0.jsonl", i);
  touch("perseus-flight-rank9-pid99-epoch0.json", 1000);
  touch("my-perseus-flight-rank0.jsonl", 1000);
  fs::create_symlink("nowhere", directory_ + "/perseus-flight-rank7-pid1-epoch0.jsonl");
  testing::internal::CaptureStderr();
  fail_after_operations(directory_);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(files(), 16u + 3u) << said;
  for (int i = 1; i <= 30; ++i)
    EXPECT_EQ(fs::exists(directory_ + "/perseus-flight-rank9-pid" + std::to_string(i) + "-epoch0.jsonl"), i <= 13) << i;
  for (int rank = 0; rank < 3; ++rank) EXPECT_GE(lines_of(rank).size(), 257u) << rank;
}

TEST_F(FlightRecorder, ALongNameKeepsWholeCharacters) {
  WorldOptions options;
  options.overrides = {"PERSEUS_FLIGHT_RECORDER=" + directory_};
  const auto accents = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += "\xc3\xa9";
    return text;
  };
  Barrier all_are_done(2);
  testing::internal::CaptureStderr();
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        for (const std::string begin : {"", "x"}) {
          Operation operation(PERSEUS_BROADCAST, begin + accents(150), ranks_up_to(2), {{PERSEUS_INT8, {1}}});
          Call(operation, rank).run(context);
        }
        all_are_done.wait();
        if (rank == 0) perseus_context_abort(context, "enough");
        const char* reason = "";
        EXPECT_TRUE(comes_true([&] { return perseus_context_failed(context, &reason) != 0; }));
      },
      options);
  testing::internal::GetCapturedStderr();
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<std::string> lines = lines_of(rank);
    ASSERT_EQ(lines.size(), 3u);
    EXPECT_TRUE(contains(lines[1], "\"name\": \"" + accents(100) + "\", \"kind\"")) << lines[1];
    EXPECT_TRUE(contains(lines[2], "\"name\": \"x" + accents(99) + "\", \"kind\"")) << lines[2];
  }
}

TEST_F(FlightRecorder, AWorldThatEndsAsItShouldLeavesNothing) {
  WorldOptions options;
  options.overrides = {"PERSEUS_FLIGHT_RECORDER=" + directory_};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {3}}});
        Call(operation, rank).run(context);
        if (rank == 0) perseus_context_shutdown(context);
      },
      options);
  EXPECT_EQ(files(), 0u);
}

}  // namespace
