// A JSON array on disk that is complete after every write, which always ends with the closing bracket. Used by one
// thread.
#pragma once

#include <cstdint>
#include <string>

namespace perseus {

// trace.json as trace, `more`, .json.
std::string before_suffix(const std::string& path, const std::string& more);

class TraceFile {
 public:
  // Makes the file, or empties it; throws Error(kInvalidArgument) when that cannot be done. While another TraceFile of
  // any process writes to it, this is another file: of NAME.json, NAME-2.json.
  explicit TraceFile(const std::string& path);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  const std::string& path() const { return path_; }
  const std::string& wanted() const { return wanted_; }  // may be another one's
  // Appends events, separated by ",\n". "" or what went wrong; then the file ends with the events before these.
  std::string append(const std::string& events);

 private:
  int open_free();
  std::string write_at(const std::string& text);

  const std::string wanted_;
  std::string path_;
  int fd_ = -1;
  int64_t end_ = 0;  // of the last event
};

}  // namespace perseus
