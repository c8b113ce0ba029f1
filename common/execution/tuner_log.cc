// What the tuner found out, as lines that it can begin with the next time:
//   log  = "step,bucket_bytes,streams,nccl_percent,seconds,score,chosen" LF line*
//   line = step "," bucket_bytes "," streams "," nccl_percent "," seconds "," score "," ("0" | "1") LF
// seconds are those of the slowest rank, score is MB of gradients a second; both are 0 where nothing was tried. At
// least one line is chosen, and all that are agree.
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "base/error.h"
#include "base/plain_numbers.h"
#include "execution/tuner.h"

namespace perseus {
namespace {

std::string line_of(const Tuner::Trial& trial, size_t bytes, bool chosen) {
  const PlainNumbers plain;
  const double seconds = trial.microseconds * 1e-6;
  char line[160];
  std::snprintf(line, sizeof line, "%" PRIu64 ",%zu,%d,%d,%.6f,%.3f,%d\n", trial.step, trial.tuning.bucket_bytes,
                trial.tuning.streams, trial.tuning.nccl_percent, seconds,
                seconds == 0 ? 0.0 : static_cast<double>(bytes) / seconds * 1e-6, chosen ? 1 : 0);
  return line;
}

}  // namespace

std::string tuner_log_header() { return "step,bucket_bytes,streams,nccl_percent,seconds,score,chosen\n"; }

std::string tuner_log_lines(const Tuner::Decision& decision) {
  std::string lines;
  bool said = false;
  for (const Tuner::Trial& trial : decision.trials) {
    const bool chosen = trial.tuning == decision.chosen;
    lines += line_of(trial, decision.step_bytes, chosen);
    said |= chosen;
  }
  return said ? lines : lines + line_of({0, decision.chosen, 0}, 0, true);
}

Tuning read_tuner_log(const std::string& path) {
  const std::string where = "[tuner] PERSEUS_TUNER_REPLAY='" + path + "': ";
  std::ifstream file(path);
  if (!file) fail(ErrorKind::kInvalidArgument, where + std::strerror(errno));
  std::string text;
  std::getline(file, text);
  if (text + "\n" != tuner_log_header())
    fail(ErrorKind::kInvalidArgument, where + "no file that PERSEUS_AUTOTUNE_LOG wrote: it does not begin with '" +
                                          tuner_log_header().substr(0, tuner_log_header().size() - 1) + "'");
  Tuning found;
  bool any = false;
  for (int line = 2; std::getline(file, text); ++line) {
    const auto refuse = [&](const std::string& what) {
      fail(ErrorKind::kInvalidArgument, where + "line " + std::to_string(line) + " '" + text + "': " + what);
    };
    unsigned long long step, bytes;
    int streams, nccl_percent, chosen, used = 0;
    double seconds, score;
    const PlainNumbers plain;
    const int fields = std::sscanf(text.c_str(), "%llu,%llu,%d,%d,%lf,%lf,%d%n", &step, &bytes, &streams, &nccl_percent,
                                   &seconds, &score, &chosen, &used);
    if (fields != 7 || static_cast<size_t>(used) != text.size() || chosen < 0 || chosen > 1)
      refuse("expected seven numbers, the last one 0 or 1");
    if (bytes > 1099511627776 || streams < 1 || streams > 12 || nccl_percent < 0 || nccl_percent > 100)
      refuse("expected at most 1099511627776 bytes, 1..12 streams and 0..100 percent");
    if (chosen == 0) continue;
    const Tuning tuning{static_cast<size_t>(bytes), streams, nccl_percent};
    if (any && !(tuning == found)) refuse("an earlier line has another choice");
    found = tuning;
    any = true;
  }
  if (!any) fail(ErrorKind::kInvalidArgument, where + "no line is chosen: that job ended before it had settled");
  return found;
}

}  // namespace perseus
