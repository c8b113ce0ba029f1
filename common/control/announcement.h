// What one rank announces in a round: a list of messages, each with a tag before its fields (docs/protocol.md has the
// grammar; control/wire_value.h writes and reads the fields). Plain values.
#pragma once

#include <string>
#include <variant>

#include "base/fields.h"
#include "control/wire_value.h"
#include "request/request.h"

namespace perseus {

// This rank has submitted a request whose name the others do not know, or not like this.
struct Request {
  std::string name;
  Description description;
};

// This rank begins no further batch of the frozen schedule (scheduling.cc).
struct LeaveSchedule {
  uint64_t schedule = 0;  // its fingerprint
  uint64_t begun = 0;     // batches, since it was frozen

  static constexpr auto fields() {
    return std::make_tuple(field("schedule", &LeaveSchedule::schedule), field("begun", &LeaveSchedule::begun));
  }
};

// All that this rank's callers could do is wait (deadlock.cc).
struct Blocked {
  std::string waits_for;

  static constexpr auto fields() { return std::make_tuple(field("waits_for", &Blocked::waits_for)); }
};

// A message's tag is its index in this list.
using Message = std::variant<Request, LeaveSchedule, Blocked>;

void append_request(const std::string& name, const Description& description, std::string* blob);
void append_message(const LeaveSchedule& message, std::string* blob);
void append_message(const Blocked& message, std::string* blob);

// Throws Error(kIo) on anything malformed.
class AnnouncementReader {
 public:
  explicit AnnouncementReader(const std::string& blob) : reader_(blob) {}
  bool at_end() const { return reader_.at_end(); }
  Message next();

 private:
  WireReader reader_;
};

}  // namespace perseus
