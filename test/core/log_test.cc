// Lines of the log when nobody reads standard error: whoever logs goes on, and nothing is lost.
#include "base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <string>

namespace {

using namespace perseus;
using Clock = std::chrono::steady_clock;

// Standard error is a pipe that nobody reads, and full.
class FullPipe {
 public:
  explicit FullPipe(int flags) : old_(dup(2)) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    reader_ = ends[0];
    dup2(ends[1], 2);
    close(ends[1]);
    fcntl(2, F_SETFL, O_NONBLOCK);
    const std::string filler(4096, '.');
    while (::write(2, filler.data(), filler.size()) > 0) filled_ += filler.size();
    fcntl(2, F_SETFL, flags);
  }
  ~FullPipe() {
    restore();
    close(reader_);
  }

  // Puts back what was standard error; the pipe then ends when all is written.
  void restore() {
    if (old_ < 0) return;
    dup2(old_, 2);
    close(old_);
    old_ = -1;
  }

  // What was written behind the filler, up to `bytes`.
  std::string read(size_t bytes) {
    std::string all(filled_ + bytes, ' ');
    for (size_t got = 0; got < all.size();) {
      pollfd ready{reader_, POLLIN, 0};
      if (poll(&ready, 1, 60'000) <= 0) return all.substr(0, got);
      const ssize_t n = ::read(reader_, &all[got], all.size() - got);
      if (n <= 0) return all.substr(0, got);
      got += static_cast<size_t>(n);
    }
    return all.substr(filled_);
  }

 private:
  int old_, reader_ = -1;
  size_t filled_ = 0;
};

// First: while lines are held up the next ones are not waited for.
TEST(Log, ALineIsOutWhenTheCallReturns) {
  const Log log(LogLevel::kInfo, true, -1);
  for (int i = 0; i < 20; ++i) {
    testing::internal::CaptureStderr();
    log.write(LogLevel::kInfo, std::to_string(i));
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "perseus info: " + std::to_string(i) + "\n");
  }
}

class Held : public testing::TestWithParam<int> {};

TEST_P(Held, NobodyWaitsForAReaderAndNothingIsLost) {
  const Log log(LogLevel::kWarning, true, 3);
  constexpr int kLines = 500;
  std::string expected;
  FullPipe pipe(GetParam());
  const auto begin = Clock::now();
  for (int i = 0; i < kLines; ++i) {
    const std::string text = std::to_string(i) + std::string(static_cast<size_t>(i * 7), 'x');
    log.warning(text);
    expected += "perseus rank 3 warning: " + text + "\n";
  }
  const auto took = Clock::now() - begin;
  const std::string got = pipe.read(expected.size());
  pipe.restore();
  EXPECT_EQ(got, expected);
  EXPECT_LT(took, std::chrono::seconds(30)) << "each line was waited for";
}

// Without O_NONBLOCK and with it, which another process may have set on what they share.
INSTANTIATE_TEST_SUITE_P(Log, Held, testing::Values(0, O_NONBLOCK));

}  // namespace
