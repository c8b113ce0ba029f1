// The ring and its file.
#include "engine/flight_recorder.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"

namespace perseus {
namespace {

// Milliseconds before `end_ns`; null where it never happened.
std::string ago(int64_t at_ns, int64_t end_ns) {
  return at_ns == 0 ? "null" : std::to_string(static_cast<double>(at_ns - end_ns) / kMillisecond);
}

}  // namespace

FlightRecorder::FlightRecorder(const World& world, const std::string& directory)
    : rank_(world.rank), size_(world.size), epoch_(world.epoch), off_(directory == "off"), directory_(directory) {
  for (Record& record : records_) record.name.reserve(kNameBytes);
}

void FlightRecorder::record(const Entry& entry, const std::string& name, bool ok) {
  Record& record = records_[count_ % kKept];
  const Description& d = entry.description;
  record.number = count_++;
  record.name.assign(name, 0, kNameBytes);
  record.kind = d.kind;
  record.dtype = d.tensors.empty() ? DType::kUInt8 : d.tensors[0].dtype;
  record.group = entry.group;
  record.tensors = d.tensors.size();
  record.bytes = entry.bytes;
  record.submitted_ns = entry.submitted_ns;
  record.agreed_ns = entry.agreed_ns;
  record.started_ns = entry.started_ns;
  record.ended_ns = now_ns();
  record.ok = ok;
}

std::string FlightRecorder::write(const std::string& cause) const {
  if (off_ || count_ == 0) return "";
  const int64_t now = now_ns();
  std::string text = "{\"rank\": " + std::to_string(rank_) + ", \"size\": " + std::to_string(size_) +
                     ", \"epoch\": " + std::to_string(epoch_) + ", \"operations\": " + std::to_string(count_) +
                     ", \"times\": \"ms before the failure\", \"failure\": " + json_string(cause) + "}\n";
  for (uint64_t number = count_ > kKept ? count_ - kKept : 0; number < count_; ++number) {
    const Record& r = records_[number % kKept];
    text += "{\"number\": " + std::to_string(r.number) + ", \"name\": " + json_string(r.name) + ", \"kind\": \"" +
            kind_name(r.kind) + "\", \"group\": " + std::to_string(r.group) + ", \"dtype\": \"" + dtype_name(r.dtype) +
            "\", \"tensors\": " + std::to_string(r.tensors) + ", \"bytes\": " + std::to_string(r.bytes) +
            ", \"submitted\": " + ago(r.submitted_ns, now) + ", \"agreed\": " + ago(r.agreed_ns, now) +
            ", \"started\": " + ago(r.started_ns, now) + ", \"ended\": " + (r.ok ? ago(r.ended_ns, now) : "null") +
            ", \"outcome\": \"" + (r.ok ? "done" : "failed") + "\"}\n";
  }
  const std::string path = directory_ + "/perseus-flight-rank" + std::to_string(rank_) + "-pid" +
                           std::to_string(getpid()) + "-epoch" + std::to_string(epoch_) + ".jsonl";
  // O_EXCL: the directory may be open to others, who could have put a link there.
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return "";
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t n = ::write(fd, text.data() + written, text.size() - written);
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  ::close(fd);
  return written == text.size() ? path : "";
}

}  // namespace perseus
