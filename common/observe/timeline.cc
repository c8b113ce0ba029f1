// From entries to records, and when there is a recording.
#include "observe/timeline.h"

#include "base/clock.h"
#include "base/error.h"

namespace perseus {
namespace {

constexpr char kDynamic[] = "DYNAMIC";

}  // namespace

std::string timeline_path(const std::string& path, int rank) {
  return rank == 0 ? path : before_suffix(path, ".rank" + std::to_string(rank));
}

Timeline::Timeline(const World& world, const std::string& identity, const Config& config,
                   const std::vector<TransportKind>& transports, const Log& log)
    : log_(log),
      owner_{world.rank, world.size, identity},
      armed_(config.is_set(Var::kTimeline)),
      writes_(world.rank == 0 || config.flag(Var::kTimelineAllRanks)) {
  for (const TransportKind kind : transports) transports_.push_back(transport_bit(kind));
  if (!armed_ || !writes_ || config.text(Var::kTimeline) == kDynamic) return;
  recording_ = open(config.text(Var::kTimeline));
  mark_cycles_ = config.flag(Var::kTimelineMarkCycles);
}

std::unique_ptr<Recording> Timeline::open(const std::string& path) const {
  return std::make_unique<Recording>(timeline_path(path, owner_.rank), owner_, log_);
}

void Timeline::start(const std::string& path, bool mark_cycles, ProgressEngine& progress) {
  if (!armed_)
    fail(ErrorKind::kInvalidArgument,
         "Set HOROVOD_TIMELINE=DYNAMIC (or to a file) before init() to start a timeline at run time.");
  if (path.empty()) fail(ErrorKind::kInvalidArgument, "[timeline] the file's name is empty");
  if (!writes_) return;
  const MutexLock lock(control_mutex_);
  if (recording_ && recording_->wanted() == timeline_path(path, owner_.rank)) return;
  std::unique_ptr<Recording> other = open(path);
  const ProgressLock progress_held(progress);
  recording_.swap(other);
  mark_cycles_ = mark_cycles;
}

void Timeline::stop(ProgressEngine& progress) {
  const MutexLock lock(control_mutex_);
  if (!recording_) return;
  std::unique_ptr<Recording> ended;
  const ProgressLock progress_held(progress);
  recording_.swap(ended);
}

void Timeline::operation(const Entry& entry, bool ok) {
  const std::string& name = *entry.text;
  if (!recording_->has_room(Recording::slots_for(name.size()), 1)) return;
  const Description& d = entry.description;
  TraceRecord record;
  record.what = TraceRecord::What::kOperation;
  record.kind = d.kind;
  record.dtype = d.tensors.empty() ? DType::kUInt8 : d.tensors[0].dtype;
  record.ok = ok;
  record.transient = d.transient;
  record.group = entry.group;
  record.last_rank = entry.last_rank;
  record.count = static_cast<uint32_t>(d.tensors.size());
  record.bytes = entry.bytes;
  record.at[0] = entry.submitted_ns;
  record.at[1] = entry.agreed_ns;
  record.at[2] = now_ns();
  recording_->add(record, name);
}

void Timeline::bucket(const Bucket& bucket, const std::vector<int>& ranks, const std::vector<Entry*>& entries) {
  size_t slots = 1;
  for (const Entry* entry : entries) slots += Recording::slots_for(entry->text->size());
  if (!recording_->has_room(slots, 1 + entries.size())) return;
  TraceRecord record;
  record.what = TraceRecord::What::kBucket;
  record.kind = entries.front()->description.kind;
  for (int rank : ranks) record.transports |= transports_[static_cast<size_t>(rank)];
  record.group = entries.front()->group;
  record.stream = bucket.stream;
  record.ranks = static_cast<int32_t>(ranks.size());
  record.count = static_cast<uint32_t>(entries.size());
  record.number = bucket.number;
  record.bytes = bucket.bytes;
  record.codec = bucket.codec;
  record.codec_ns = bucket.codec_ns;
  record.at[0] = bucket.begun_ns;
  record.at[1] = bucket.first_byte_ns != 0 ? bucket.first_byte_ns : bucket.begun_ns;
  record.at[2] = now_ns();
  recording_->add(record, std::string());
  for (const Entry* entry : entries) {
    TraceRecord member;
    member.what = TraceRecord::What::kMember;
    member.kind = entry->description.kind;
    member.several = entry->description.tensors.size() > 1 || entry->bytes > bucket.bytes;
    member.transient = entry->description.transient;
    member.group = entry->group;
    member.bytes = entry->bytes;
    member.at[0] = entry->agreed_ns;
    member.at[1] = entry->submitted_ns;
    recording_->add(member, *entry->text);
  }
}

void Timeline::round(int group, uint64_t number) {
  if (!recording_->has_room(1, 1)) return;
  TraceRecord record;
  record.what = TraceRecord::What::kRound;
  record.group = group;
  record.number = number;
  record.at[0] = now_ns();
  recording_->add(record, std::string());
}

void Timeline::tuned(size_t bucket_bytes, int streams, const std::string& why) {
  if (!recording_->has_room(Recording::slots_for(why.size()), 1)) return;
  TraceRecord record;
  record.what = TraceRecord::What::kTuned;
  record.stream = streams;
  record.bytes = bucket_bytes;
  record.at[0] = now_ns();
  recording_->add(record, why);
}

}  // namespace perseus
