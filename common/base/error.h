// The one exception root of the core; api/ alone turns it into codes. Thread-safe: values only.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace perseus {

enum class ErrorKind {
  kInvalidArgument = 1,  // the caller's request makes no sense; nothing was started
  kMismatch = 2,         // ranks disagree about one tensor; the job goes on
  kIo = 3,               // a link, a file or a segment failed
  kTimeout = 4,          // a deadline passed
  kAborted = 5,          // the group has failed or was shut down
  kInternal = 6,         // a broken invariant: a bug
  kNan = 8,              // a gradient has a NaN, and the job wants an error then (7 is no failure, see perseus.h)
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// The outcome of an asynchronous operation, for places an exception cannot cross.
struct Status {
  bool ok = true;
  ErrorKind kind = ErrorKind::kInternal;
  std::string message;

  static Status from(const Error& error) { return Status{false, error.kind(), error.what()}; }
};

[[noreturn]] inline void fail(ErrorKind kind, const std::string& what) { throw Error(kind, what); }

}  // namespace perseus
