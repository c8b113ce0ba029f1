// Events and their rows.
#include "observe/trace_format.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "base/json.h"
#include "topology/transport_kind.h"

namespace perseus {
namespace {

constexpr int kJob = 0, kStreams = 1, kFirstTensor = 2;  // pids

// Of a line of a process. To Perfetto 0 is the main thread, whose tid is the pid: beside a line with that number, what
// overlaps would be one line's, and dropped.
int tid(int process, int line) { return process + line; }

std::string microseconds(int64_t ns) {
  char text[40];
  std::snprintf(text, sizeof text, "%" PRId64 ".%03d", ns / 1000, static_cast<int>(ns % 1000));
  return text;
}

std::string field(const char* name, uint64_t value) {
  return std::string("\"") + name + "\": " + std::to_string(value) + ", ";
}

std::string field(const char* name, const std::string& text) {
  return std::string("\"") + name + "\": " + json_string(text) + ", ";
}

void separate(std::string* events) {
  if (!events->empty()) *events += ",\n";
}

void metadata(const char* what, int process, int line, const std::string& args, std::string* events) {
  separate(events);
  *events += std::string("{\"name\": \"") + what + "\", \"ph\": \"M\", \"pid\": " + std::to_string(process) +
             ", \"tid\": " + std::to_string(tid(process, line)) + ", \"args\": {" + args + "}}";
}

std::string transport_text(uint8_t transports) {
  std::string text;
  for (const TransportKind kind : kTransportKinds)
    if ((transports & transport_bit(kind)) != 0) text += (text.empty() ? "" : "+") + std::string(transport_name(kind));
  return text.empty() ? "local" : text;
}

// "SHM_ALLREDUCE": what Horovod calls after its libraries is called after the way the bytes go.
std::string activity(uint8_t transports, Kind kind) {
  std::string text = transport_text(transports) + "_" + kind_name(kind);
  for (char& c : text)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  return text;
}

std::string key_of(const TraceRecord& record, const std::string& name) {
  return std::to_string(record.group) + " " + name;
}

std::string without_comma(std::string fields) {
  if (!fields.empty()) fields.resize(fields.size() - 2);
  return fields;
}

}  // namespace

TraceFormat::TraceFormat(TraceOwner owner, int64_t start_ns, int64_t epoch_us)
    : owner_(std::move(owner)), start_ns_(start_ns), epoch_us_(epoch_us) {}

std::string TraceFormat::time(int64_t at_ns) const { return microseconds(std::max<int64_t>(at_ns - start_ns_, 0)); }

void TraceFormat::header(std::string* events) {
  metadata("process_name", kJob, 0,
           "\"name\": \"rank " + std::to_string(owner_.rank) + " of " + std::to_string(owner_.size) +
               "\", \"start_time_since_epoch_in_micros\": " + std::to_string(epoch_us_) +
               ", \"rank\": " + std::to_string(owner_.rank) + ", \"size\": " + std::to_string(owner_.size) +
               ", \"world\": " + json_string(owner_.world) + ", \"version\": \"" PERSEUS_VERSION "\"",
           events);
  metadata("process_name", kStreams, 0, "\"name\": \"streams: fused buckets on the wire\"", events);
  metadata("process_sort_index", kJob, 0, "\"sort_index\": 0", events);
  metadata("process_sort_index", kStreams, 0, "\"sort_index\": 1", events);
}

TraceFormat::Row& TraceFormat::row_of(const TraceRecord& r, int64_t begun_ns, const std::string& name,
                                      std::string* events) {
  Row& row = rows_[key_of(r, name)];
  if (row.pid != 0) return row;
  row.pid = r.transient ? shared_row(r, begun_ns, events) : new_row(name, r.group, events);
  row.transient = r.transient;
  row.shared_by = {r.group, r.kind};
  return row;
}

int TraceFormat::new_row(const std::string& name, int group, std::string* events) {
  const int pid = kFirstTensor + rows_made_++;
  const std::string shown = group == 0 ? name : name + " (process set " + std::to_string(group) + ")";
  metadata("process_name", pid, 0, "\"name\": " + json_string(shown), events);
  metadata("process_sort_index", pid, 0, "\"sort_index\": " + std::to_string(pid), events);
  return pid;
}

// What overlaps needs rows of its own.
int TraceFormat::shared_row(const TraceRecord& r, int64_t begun_ns, std::string* events) {
  std::vector<Idle>& idle = idle_[{r.group, r.kind}];
  const auto free = std::find_if(idle.begin(), idle.end(), [&](const Idle& row) { return row.since_ns <= begun_ns; });
  if (free == idle.end()) return new_row(std::string("unnamed ") + kind_name(r.kind), r.group, events);
  const int pid = free->pid;
  idle.erase(free);
  return pid;
}

int TraceFormat::stream_row(int group, int stream, std::string* events) {
  std::string name = "stream " + std::to_string(stream);
  if (group != 0) name = "process set " + std::to_string(group) + ", " + name;
  const auto [row, fresh] = stream_rows_.emplace(name, static_cast<int>(stream_rows_.size()));
  if (fresh) metadata("thread_name", kStreams, row->second, "\"name\": " + json_string(name), events);
  return row->second;
}

void TraceFormat::span(const std::string& name, int process, int line, int64_t begin_ns, int64_t end_ns,
                       const std::string& args, std::string* events) const {
  const int64_t begin = std::max(begin_ns, start_ns_);
  separate(events);
  *events += "{\"name\": \"" + name + "\", \"ph\": \"X\", \"pid\": " + std::to_string(process) +
             ", \"tid\": " + std::to_string(tid(process, line)) + ", \"ts\": " + time(begin) +
             ", \"dur\": " + microseconds(std::max<int64_t>(end_ns - begin, 0)) + ", \"args\": {" +
             without_comma(args) + "}}";
}

void TraceFormat::mark(const std::string& name, int64_t at_ns, const std::string& args, std::string* events) const {
  separate(events);
  *events += "{\"name\": \"" + name + "\", \"ph\": \"i\", \"s\": \"g\", \"pid\": " + std::to_string(kJob) +
             ", \"tid\": 0, \"ts\": " + time(at_ns) + ", \"args\": {" + without_comma(args) + "}}";
}

void TraceFormat::record(const TraceRecord& record, const std::string& name, std::string* events) {
  switch (record.what) {
    case TraceRecord::What::kOperation:
      operation(record, name, events);
      break;
    case TraceRecord::What::kBucket:
      bucket_ = record;
      bucket_tensors_ = "[";
      members_left_ = record.count;
      break;
    case TraceRecord::What::kMember:
      member(record, name, events);
      if (--members_left_ == 0) bucket_done(events);
      break;
    case TraceRecord::What::kRound:
      mark("CYCLE_START", record.at[0],
           field("round", record.number) + field("process_set", static_cast<uint64_t>(record.group)), events);
      break;
    case TraceRecord::What::kTuned:
      mark("TUNED", record.at[0],
           field("bucket_bytes", record.bytes) + field("streams", static_cast<uint64_t>(record.stream)) +
               field("why", name),
           events);
      break;
  }
}

void TraceFormat::operation(const TraceRecord& r, const std::string& name, std::string* events) {
  const int64_t submitted = r.at[0], agreed = r.at[1], ended = r.at[2];
  const std::string kind = kind_name(r.kind);
  const std::string outcome = field("outcome", std::string(r.ok ? "done" : "failed"));
  // A rank that has joined gives zeros to what it never submitted.
  const bool joined = submitted == 0;
  Row& row = row_of(r, joined ? agreed : submitted, name, events);
  std::string waiting;
  if (r.last_rank >= 0) waiting += field("last_rank", static_cast<uint64_t>(r.last_rank));
  if (agreed == 0) waiting += outcome;
  if (!joined) span("NEGOTIATE_" + kind, row.pid, 0, submitted, agreed == 0 ? ended : agreed, waiting, events);
  if (agreed != 0) whole(r, name, joined, outcome, &row, events);
  if (!r.transient) return;
  idle_[{r.group, r.kind}].push_back({row.pid, ended});
  rows_.erase(key_of(r, name));
}

// From the agreement to the end, with the events within it.
void TraceFormat::whole(const TraceRecord& r, const std::string& name, bool joined, const std::string& outcome,
                        Row* row, std::string* events) {
  span(kind_name(r.kind), row->pid, 0, r.at[1], r.at[2],
       (r.transient ? field("name", name) : "") + field("dtype", std::string(dtype_name(r.dtype))) +
           field("bytes", r.bytes) + field("tensors", r.count) + field("process_set", static_cast<uint64_t>(r.group)) +
           (joined ? field("joined", uint64_t{1}) : "") + outcome,
       events);
  if (row->inner.empty()) return;
  *events += ",\n" + row->inner;
  row->inner.clear();
  row->busy_until.clear();
}

void TraceFormat::member(const TraceRecord& r, const std::string& name, std::string* events) {
  Row& row = row_of(r, r.at[1] != 0 ? r.at[1] : r.at[0], name, events);
  // Parts that may overlap in time need lines of their own.
  const int line = r.several ? 1 + bucket_.stream : 0;
  const int64_t begun = bucket_.at[0], ended = bucket_.at[2];
  // A large tensor has several parts on one line, one after the other.
  int64_t& busy_until = row.busy_until[line];
  const int64_t queued = std::max(r.at[0], busy_until);
  if (begun > queued) span("QUEUE", row.pid, line, queued, begun, "", &row.inner);
  busy_until = ended;
  span(activity(bucket_.transports, r.kind), row.pid, line, begun, ended,
       field("bucket", bucket_.number) + field("stream", static_cast<uint64_t>(bucket_.stream)) +
           field("transport", transport_text(bucket_.transports)) + field("bytes", r.bytes),
       &row.inner);
  bucket_tensors_ += (bucket_tensors_.size() == 1 ? "" : ", ") + json_string(name);
}

void TraceFormat::bucket_done(std::string* events) {
  const TraceRecord& r = bucket_;
  std::string codec;
  if (r.codec != CodecKind::kNone)
    codec = field("codec", std::string(codec_kind_name(r.codec))) +
            field("codec_us", static_cast<uint64_t>(r.codec_ns / 1000));
  span("bucket " + std::to_string(r.number), kStreams, stream_row(r.group, r.stream, events), r.at[1], r.at[2],
       field("bucket", r.number) + field("kind", std::string(kind_name(r.kind))) + field("bytes", r.bytes) +
           field("ranks", static_cast<uint64_t>(r.ranks)) + field("stream", static_cast<uint64_t>(r.stream)) +
           field("transport", transport_text(r.transports)) + field("process_set", static_cast<uint64_t>(r.group)) +
           codec + "\"tensors\": " + bucket_tensors_ + "], ",
       events);
}

void TraceFormat::dropped(uint64_t records, int64_t now_ns, std::string* events) {
  mark("DROPPED_RECORDS", now_ns, field("count", records), events);
  // What would have ended these may be among them; then what lies within is no later request's.
  for (auto it = rows_.begin(); it != rows_.end();) {
    Row& row = it->second;
    row.inner.clear();
    row.busy_until.clear();
    if (row.transient) idle_[row.shared_by].push_back({row.pid, now_ns});
    it = row.transient ? rows_.erase(it) : std::next(it);
  }
}

}  // namespace perseus
