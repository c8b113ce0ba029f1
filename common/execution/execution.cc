// From buckets to bytes: streams, and the exchanges under way on them.
#include "execution/execution.h"

#include <algorithm>

#include "base/error.h"

namespace perseus {
Execution::Execution(const ExecutionSettings& settings, std::vector<int> ranks, int me, uint32_t number,
                     MakeGroup make_group, OutputsOf outputs_of, AutoCodecs* automatic)
    : settings_(settings),
      ranks_(std::move(ranks)),
      me_(me),
      number_(number),
      make_group_(std::move(make_group)),
      outputs_of_(std::move(outputs_of)),
      automatic_(automatic),
      tuner_(settings.tuner),
      in_force_(tuner_.in_force()),
      streams_(static_cast<size_t>(tuner_.most_streams())) {}

// What is encoded goes in slices of whole chunks: while one is on the wire the next is encoded on another stream. Each
// stream holds what it sends and what it receives of one. Short slices fill and drain the wire sooner; of what hardly
// uses it (or is not encoded, and needs no working on) every exchange costs more than that gains.
size_t Execution::slice_bytes(CodecKind codec) const {
  constexpr size_t kMiB = 1024 * 1024, kChunk = kWireChunk * sizeof(float);
  if (codec == CodecKind::kTopK) return 4 * kMiB;  // what it sends of a slice must not depend on the streams
  const size_t under_way = codec == CodecKind::kNone ? 16 * kMiB : 8 * kMiB;
  return under_way / static_cast<size_t>(in_force_.tuning.streams) / kChunk * kChunk;
}

void Execution::begin(Stream* stream, uint32_t index) {
  Bucket& bucket = *stream->queue.front();
  const int64_t now = now_ns();
  stream->begun_ns = now;
  for (Entry* entry : bucket.entries)
    if (entry->started_ns == 0) entry->started_ns = now;
  const bool rolled_back = !bucket.begun_by.empty();  // then its tensors may be gone
  if (!rolled_back && bucket.stages >= 0 && bucket.staged == bucket.hierarchical[bucket.stages].get())
    bucket.hierarchical[bucket.stages]->use(&stream->compressed, settings_.threads);
  // Where all ranks are treated alike, only gradients that stay inside hosts have more than one level.
  if (!stream->group) stream->group = make_group_(settings_.first_stream + index, levels_by_host());
  Work work;
  work.plan = &bucket.plan;
  work.sink = bucket.output != nullptr ? &bucket : nullptr;
  work.staged = bucket.staged;
  work.schedule = bucket.batch.schedule;
  work.device = bucket.device;
  if (bucket.device != Device()) {
    for (const Bucket::Image& image : bucket.images)
      bucket.on_device.add(*image.staging, image.tensor, image.begin, image.bytes);
    bucket.on_device.sort();
    work.images = &bucket.on_device;
  }
  if (!stream->group->serves(work)) fail(ErrorKind::kInternal, "[execution] nothing moves tensors of this device");
  stream->operation = &stream->group->plan(work);
  if (rolled_back) stream->operation->roll_back(bucket.begun_by);
  stream->open = bucket.batch.schedule != 0 && !rolled_back;
  stream->moved_ns = 0;
  stream->first_byte_ns = 0;
}

bool Execution::step(std::vector<Entry*>* finished) {
  if (in_flight_ == 0 && !waiting_.empty()) begin_probe();
  if (in_flight_ == 0) return false;
  bool moved = false;
  for (size_t i = 0; i < streams_.size(); ++i) {
    Stream& stream = streams_[i];
    if (stream.queue.empty()) continue;
    if (stream.operation == nullptr) {
      if (!stream.queue.front()->loaded()) continue;
      begin(&stream, static_cast<uint32_t>(i));
    }
    const int64_t before = traced() && stream.first_byte_ns == 0 ? now_ns() : 0;
    if (stream.operation->step()) {
      moved = true;
      if (before != 0) stream.first_byte_ns = before;
      stream.moved_ns = 0;
      stream.open = stream.open && !stream.operation->agreed();
    } else if (!stream.open && stream.moved_ns == 0) {
      stream.moved_ns = now_ns();
    }
    if (!stream.operation->done()) continue;
    const bool probed = probe_ && stream.queue.front()->staged == probe_.get();
    if (traced() && !probed && stream.queue.front()->begun_by.empty()) trace(stream, i);
    stream.queue.front()->store();
    for (Entry* entry : stream.queue.front()->entries) end_execution(entry, finished);
    std::unique_ptr<Bucket> bucket = end(&stream);
    bucket->clear();
    free_.push_back(std::move(bucket));
    if (probed) finish_probe(finished);
  }
  return moved;
}

// Of the bucket under way.
std::unique_ptr<Bucket> Execution::end(Stream* stream) {
  std::unique_ptr<Bucket> bucket = std::move(stream->queue.front());
  stream->queue.erase(stream->queue.begin());
  stream->operation = nullptr;
  stream->moved_ns = 0;
  --in_flight_;
  ++buckets_done_;
  if (tuner_.measuring() && !bucket->entries.empty() && bucket->entries.front()->description.gradient)
    tuner_.done(now_ns());
  return bucket;
}

bool Execution::polls() const {
  for (const Stream& stream : streams_) {
    if (stream.operation != nullptr && !stream.operation->wakes()) return true;
    if (stream.operation == nullptr && !stream.queue.empty() && !stream.queue.front()->images.empty()) return true;
  }
  return false;
}

void Execution::check_progress(int64_t now, int64_t since_ns) const {
  if (settings_.timeout_ns == 0) return;
  for (const Stream& stream : streams_)
    if (!stream.queue.empty() && !stream.open && stream.moved_ns != 0 &&
        now - std::max(stream.moved_ns, since_ns) > settings_.timeout_ns)
      report_silence(stream);
}

void Execution::roll_back(const std::vector<uint64_t>& begun, std::vector<Entry*>* entries) {
  const uint64_t finished = *std::min_element(begun.begin(), begun.end());
  for (Stream& stream : streams_) {
    for (size_t i = 0; i < stream.queue.size(); ++i) {
      Bucket& bucket = *stream.queue[i];
      if (bucket.batch.schedule == 0 || bucket.batch.number < finished || !bucket.begun_by.empty()) continue;
      for (uint64_t batches : begun) bucket.begun_by.push_back(batches > bucket.batch.number);
      for (Entry* entry : bucket.entries) {
        end_execution(entry, entries);
        if (entry->executions_left > 0) continue;
        // Ranks that had not begun it have not taken it either, and all count alike.
        if (entry->residuals) settings_.residuals->give_back(entry->residuals);
        entry->residuals.reset();
        entry->started_ns = 0;
        entry->executions_left = 1;
      }
      bucket.entries.clear();
      bucket.residuals.clear();
      bucket.images.clear();
      bucket.encoding.clear();
      if (i > 0 || stream.operation == nullptr) continue;
      stream.operation->roll_back(bucket.begun_by);
      stream.open = false;
    }
  }
}

bool Execution::waits_since(int64_t since_ns) const {
  for (const Stream& stream : streams_)
    if (!stream.queue.empty() && stream.open && stream.begun_ns < since_ns) return true;
  return false;
}

size_t Execution::staging_bytes() const {
  size_t bytes = 0;
  for (const Stream& stream : streams_)
    bytes += stream.compressed.bytes() + (stream.group ? stream.group->staging_bytes() : 0);
  return bytes;
}

void Execution::trace(const Stream& stream, size_t index) const {
  const Bucket& bucket = *stream.queue.front();
  settings_.observer->bucket(
      BucketObserver::Bucket{bucket.number, static_cast<int>(settings_.first_stream + index), bucket.bytes,
                             stream.begun_ns, stream.first_byte_ns, bucket.codec.kind,
                             bucket.staged == nullptr ? 0 : bucket.staged->codec_ns()},
      ranks_, bucket.entries);
}

void Execution::find_under_way(std::vector<UnderWay>* found) const {
  for (const Stream& stream : streams_) {
    if (stream.operation == nullptr || stream.queue.front()->entries.empty()) continue;
    UnderWay under_way{stream.queue.front()->entries, stream.begun_ns, {}};
    for (const int member : stream.operation->waiting_for())
      under_way.ranks.push_back(ranks_[static_cast<size_t>(member)]);
    found->push_back(std::move(under_way));
  }
}

void Execution::report_silence(const Stream& stream) const {
  const std::vector<int> waiting_for = stream.operation->waiting_for();
  // A rank that is alive may itself only wait for the one that is not.
  std::string who, dead;
  for (int member : waiting_for) {
    const int rank = ranks_[static_cast<size_t>(member)];
    who += (who.empty() ? "" : ", ") + std::to_string(rank);
    if (settings_.silent_ns(rank) > settings_.timeout_ns / 2) dead += (dead.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (!dead.empty()) who = dead;
  if (stream.operation->computes())
    fail(ErrorKind::kTimeout, "[cuda] this rank's GPU has not encoded gradients for " +
                                  std::to_string(settings_.timeout_ns / kSecond) + " s (GLOO_TIMEOUT_SECONDS)");
  const std::vector<Entry*>& entries = stream.queue.front()->entries;
  const Kind kind = entries.empty() ? Kind::kAllreduce : entries.front()->description.kind;
  fail(ErrorKind::kTimeout, std::string("[collective] ") + kind_name(kind) + ": no data to or from rank " + who +
                                " for " + std::to_string(settings_.timeout_ns / kSecond) + " s (GLOO_TIMEOUT_SECONDS)");
}

void Execution::abandon(std::vector<Entry*>* entries) {
  for (Stream& stream : streams_) {
    if (stream.operation != nullptr) stream.operation->abort();
    stream.operation = nullptr;
    for (auto& bucket : stream.queue) give_up(&bucket->entries, entries);
    stream.queue.clear();
  }
  for (auto& bucket : open_)  // some may be in streams already
    if (bucket) give_up(&bucket->entries, entries);
  open_.clear();
  for (Waiting& waiting : waiting_) give_up(&waiting.ready, entries);
  waiting_.clear();
  in_flight_ = 0;
}

}  // namespace perseus
