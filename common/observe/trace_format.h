// Records of the timeline as events of a Chrome trace (the format of chrome://tracing that Perfetto reads too):
// Horovod's rows and names, one process per tensor, plus one process with a row for every stream. Requests whose names
// do not come again share processes, so that a long job has no more of them than are under way at once. Used by one
// thread.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "observe/trace_record.h"

namespace perseus {

// Whose recording a trace is.
struct TraceOwner {
  int rank = 0;
  int size = 1;
  std::string world;  // equal in all traces of a world, and in no other ones
};

class TraceFormat {
 public:
  // Times are written in µs since `start_ns` of the monotonic clock; earlier beginnings are cut there.
  TraceFormat(TraceOwner owner, int64_t start_ns, int64_t epoch_us);

  // All of these append events separated by ",\n" to `events`.
  void header(std::string* events);
  void record(const TraceRecord& record, const std::string& name, std::string* events);
  void dropped(uint64_t records, int64_t now_ns, std::string* events);

 private:
  struct Row {
    int pid = 0;
    bool transient = false;  // the request's name does not come again
    std::pair<int, Kind> shared_by;
    // The events within a request that has not ended: viewers want the containing event first.
    std::string inner;
    std::unordered_map<int, int64_t> busy_until;  // line → the end of what inner has there
  };
  // A row of requests whose names do not come again, between two of them.
  struct Idle {
    int pid;
    int64_t since_ns;
  };

  Row& row_of(const TraceRecord& record, int64_t begun_ns, const std::string& name, std::string* events);
  int new_row(const std::string& name, int group, std::string* events);
  int shared_row(const TraceRecord& record, int64_t begun_ns, std::string* events);
  int stream_row(int group, int stream, std::string* events);
  void operation(const TraceRecord& record, const std::string& name, std::string* events);
  void whole(const TraceRecord& record, const std::string& name, bool joined, const std::string& outcome, Row* row,
             std::string* events);
  void member(const TraceRecord& record, const std::string& name, std::string* events);
  void bucket_done(std::string* events);
  void span(const std::string& name, int process, int line, int64_t begin_ns, int64_t end_ns, const std::string& args,
            std::string* events) const;
  void mark(const std::string& name, int64_t at_ns, const std::string& args, std::string* events) const;
  std::string time(int64_t at_ns) const;

  const TraceOwner owner_;
  const int64_t start_ns_, epoch_us_;
  std::unordered_map<std::string, Row> rows_;  // group and name → row, or transient: while it is under way
  std::map<std::pair<int, Kind>, std::vector<Idle>> idle_;
  int rows_made_ = 0;
  std::unordered_map<std::string, int> stream_rows_;  // name → line of the streams' process
  TraceRecord bucket_;                                // whose members come now
  std::string bucket_tensors_;                        // their names, as a JSON array without its end
  uint32_t members_left_ = 0;
};

}  // namespace perseus
