// The ring and its file.
#include "observe/flight_recorder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <tuple>

#include "base/clock.h"
#include "base/descriptors.h"
#include "base/json.h"
#include "base/plain_numbers.h"
#include "base/utf8.h"
#include "base/write_aside.h"

namespace perseus {
namespace {

// Milliseconds before `end_ns`; null where it never happened.
std::string ago(int64_t at_ns, int64_t end_ns) {
  return at_ns == 0 ? "null" : std::to_string(static_cast<double>(at_ns - end_ns) / kMillisecond);
}

constexpr char kPrefix[] = "perseus-flight-rank", kSuffix[] = ".jsonl";
constexpr size_t kLeastFiles = 16, kFilesPerRank = 4;

constexpr int kMostOfAName = 100;

// Opens `stem` and the suffix, or, where that is there, the first name with a number that is not: of another world of
// the process, or of a process with its number in an earlier container. O_EXCL, because the directory may be open to
// others, who could have put a link there.
int open_new(const std::string& stem, std::string* path) {
  int fd = -1;
  for (int number = 1; fd < 0 && number <= kMostOfAName; ++number) {
    *path = stem + (number == 1 ? "" : "-" + std::to_string(number)) + kSuffix;
    fd = ::open(path->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno != EEXIST) break;
  }
  return fd;
}

// Returns why it failed, or "", and which file it is.
std::string write_file(const std::string& stem, const std::string& text, std::string* path) {
  const int fd = open_new(stem, path);
  if (fd < 0) return error_text(errno);
  std::string trouble;
  for (size_t written = 0; written < text.size() && trouble.empty();) {
    const ssize_t n = ::write(fd, text.data() + written, text.size() - written);
    if (n > 0) written += static_cast<size_t>(n);
    else if (n == 0 || errno != EINTR) trouble = n < 0 ? error_text(errno) : "nothing was written";
  }
  ::close(fd);
  if (!trouble.empty()) ::unlink(path->c_str());
  return trouble;
}

bool is_ours(const std::string& name) {
  const size_t suffix = sizeof kSuffix - 1;
  return name.rfind(kPrefix, 0) == 0 && name.size() > suffix &&
         name.compare(name.size() - suffix, suffix, kSuffix) == 0;
}

// All but the newest `kept` of this user.
void remove_old_files(const std::string& directory, size_t kept) {
  DIR* entries = ::opendir(directory.c_str());
  if (entries == nullptr) return;
  std::vector<std::tuple<time_t, long, std::string>> files;  // the time of the last change, and the name
  while (const dirent* entry = ::readdir(entries)) {
    struct stat status{};
    if (!is_ours(entry->d_name) || ::fstatat(::dirfd(entries), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(status.st_mode) || status.st_uid != ::geteuid())
      continue;
    files.emplace_back(status.st_mtim.tv_sec, status.st_mtim.tv_nsec, entry->d_name);
  }
  std::sort(files.rbegin(), files.rend());
  // Another rank may be doing the same.
  for (size_t i = kept; i < files.size(); ++i) ::unlinkat(::dirfd(entries), std::get<2>(files[i]).c_str(), 0);
  ::closedir(entries);
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
  record.name.assign(name, 0, fitting_characters(name, kNameBytes));
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

std::string FlightRecorder::text(const std::string& cause) const {
  const PlainNumbers plain;
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
  return text;
}

void FlightRecorder::write(const std::string& cause, const Log& log) const {
  if (off_ || count_ == 0) return;
  const std::string stem = directory_ + "/" + kPrefix + std::to_string(rank_) + "-pid" + std::to_string(getpid()) +
                           "-epoch" + std::to_string(epoch_);
  const size_t kept = std::max(kLeastFiles, kFilesPerRank * static_cast<size_t>(size_));
  // The caller drives, and a disk may take its time.
  write_aside([stem, log, kept, directory = directory_, text = text(cause)] {
    std::string path;
    const std::string trouble = write_file(stem, text, &path);
    if (!trouble.empty()) return log.warning("[flight recorder] cannot write '" + path + "': " + trouble);
    log.warning("the last operations of this rank are in " + path);
    remove_old_files(directory, kept);
  });
}

}  // namespace perseus
