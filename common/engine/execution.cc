// Buckets and streams.
#include "engine/execution.h"

#include <cstdlib>

#include "base/error.h"
#include "base/huge_pages.h"

namespace perseus {
namespace {

kernels::FoldSpec fold_of(const Description& description, DType dtype, size_t ranks) {
  kernels::FoldSpec fold;
  fold.dtype = dtype;
  fold.op = description.op == ReduceOp::kAverage ? ReduceOp::kSum : description.op;
  fold.prescale = description.prescale;
  fold.postscale = description.postscale;
  fold.divisor = description.op == ReduceOp::kAverage ? static_cast<int>(ranks) : 1;
  return fold;
}

bool same_fold(const kernels::FoldSpec& a, const kernels::FoldSpec& b) {
  return a.dtype == b.dtype && a.op == b.op && a.prescale == b.prescale && a.postscale == b.postscale &&
         a.divisor == b.divisor;
}

}  // namespace

Byte* Bucket::allocate(const std::vector<size_t>& sizes, const std::vector<uint64_t>& rows) {
  size_t total = 0;
  int64_t total_rows = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const uint64_t row = static_cast<uint64_t>(row_bytes);
    if (rows[i] > (uint64_t{1} << 48) || sizes[i] != rows[i] * row)
      fail(ErrorKind::kIo, "[collective] a peer announced " + std::to_string(sizes[i]) + " bytes for " +
                               std::to_string(rows[i]) + " rows of " + std::to_string(row) + " bytes");
    total += sizes[i];
    total_rows += static_cast<int64_t>(rows[i]);
    output->received_splits.push_back(static_cast<int64_t>(rows[i]));
  }
  output->shape.assign(1, total_rows);
  output->shape.insert(output->shape.end(), tail_shape.begin(), tail_shape.end());
  output->bytes = total;
  void* memory = nullptr;
  // Frameworks expect tensors on cache lines.
  if (posix_memalign(&memory, 64, total == 0 ? 64 : total) != 0)
    fail(ErrorKind::kIo, "[engine] out of memory for a result of " + std::to_string(total) + " bytes");
  advise_huge_pages(memory, total);
  output->data = static_cast<Byte*>(memory);
  return output->data;
}

void Bucket::add_piece(const Entry::Buffers& buffers, size_t size) {
  if (buffers.in != buffers.out) advise_huge_pages(buffers.out, size);
  plan.pieces.push_back(Piece{buffers.in, buffers.out, size});
}

void Bucket::clear() {
  plan.clear();
  entries.clear();
  bytes = 0;
  adasum.reset();
  output = nullptr;
  tail_shape.clear();
}

Execution::Execution(const ExecutionSettings& settings, std::vector<int> ranks, int me, uint32_t epoch, uint32_t group,
                     MakeLinks make_links, OutputsOf outputs_of)
    : settings_(settings),
      ranks_(std::move(ranks)),
      me_(me),
      epoch_(epoch),
      group_(group),
      make_links_(std::move(make_links)),
      outputs_of_(std::move(outputs_of)),
      streams_(static_cast<size_t>(settings.streams)) {}

// ---- from entries to buckets ----

void Execution::add(const std::vector<Entry*>& ready, std::vector<Entry*>* finished) {
  const int64_t now = now_ns();
  for (Entry* entry : ready) {
    entry->agreed_ns = now;
    entry->executions_left = 0;
    const Description& d = entry->description;
    switch (d.kind) {
      case Kind::kAllreduce:
        for (size_t i = 0; i < d.tensors.size(); ++i) add_reduction(entry, i);
        break;
      case Kind::kBroadcast:
        add_broadcast(entry);
        break;
      case Kind::kReduceScatter:
        add_reducescatter(entry);
        break;
      case Kind::kAllgather:
      case Kind::kAlltoall:
        outputs_of_(entry).resize(d.tensors.size());
        for (size_t i = 0; i < d.tensors.size(); ++i) add_gather(entry, i);
        break;
      case Kind::kBarrier:
      case Kind::kAddGroup:
      case Kind::kRemoveGroup:
      case Kind::kJoin:
        break;  // that all are ready is all there is to it
    }
    if (entry->executions_left == 0) finished->push_back(entry);
  }
  close_all();
}

std::unique_ptr<Bucket> Execution::fresh_bucket() {
  if (free_.empty()) return std::make_unique<Bucket>();
  std::unique_ptr<Bucket> bucket = std::move(free_.back());
  free_.pop_back();
  return bucket;
}

Bucket& Execution::own_bucket(Entry* entry, size_t bytes) {
  open_.push_back(fresh_bucket());
  Bucket& bucket = *open_.back();
  bucket.bytes = bytes;
  bucket.entries.push_back(entry);
  ++entry->executions_left;
  return bucket;
}

Bucket& Execution::bucket_for(Entry* entry, size_t bytes, Collective collective, const kernels::FoldSpec& fold,
                              int root) {
  for (auto& bucket : open_) {
    const ExchangePlan& plan = bucket->plan;
    if (plan.collective != collective || bucket->bytes + bytes > settings_.fusion_bytes || plan.root != root ||
        !same_fold(plan.fold, fold))
      continue;
    bucket->bytes += bytes;
    if (bucket->entries.back() != entry) {
      bucket->entries.push_back(entry);
      ++entry->executions_left;
    }
    return *bucket;
  }
  Bucket& bucket = own_bucket(entry, bytes);
  bucket.plan.collective = collective;
  bucket.plan.fold = fold;
  bucket.plan.root = root;
  return bucket;
}

void Execution::add_reduction(Entry* entry, size_t tensor) {
  const TensorDescription& t = entry->description.tensors[tensor];
  const size_t bytes = t.bytes();
  if (bytes == 0) return;
  const kernels::FoldSpec fold = fold_of(entry->description, t.dtype, ranks_.size());
  Bucket& bucket = bucket_for(entry, bytes, Collective::kAllreduce, fold, 0);
  bucket.add_piece(entry->buffers[tensor], bytes);
  if (fold.op != ReduceOp::kAdasum) return;
  if (!bucket.adasum)
    bucket.adasum =
        std::make_unique<Adasum>(static_cast<int>(ranks_.size()), me_, t.dtype, fold.prescale, fold.postscale);
  bucket.adasum->add_tensor(bucket.plan.pieces.back());
}

void Execution::add_broadcast(Entry* entry) {
  const Description& d = entry->description;
  int root = 0;
  while (ranks_[root] != d.root) ++root;
  kernels::FoldSpec bytes_only;
  bytes_only.dtype = DType::kUInt8;
  for (size_t i = 0; i < d.tensors.size(); ++i) {
    const size_t bytes = d.tensors[i].bytes();
    if (bytes == 0) continue;
    Bucket& bucket = bucket_for(entry, bytes, Collective::kBroadcast, bytes_only, root);
    bucket.add_piece(entry->buffers[i], bytes);
  }
}

void Execution::add_reducescatter(Entry* entry) {
  const Description& d = entry->description;
  const int64_t ranks = static_cast<int64_t>(ranks_.size());
  for (size_t i = 0; i < d.tensors.size(); ++i) {
    const TensorDescription& t = d.tensors[i];
    if (t.bytes() == 0) continue;
    ExchangePlan& plan = own_bucket(entry, t.bytes()).plan;
    plan.collective = Collective::kReduceScatter;
    plan.fold = fold_of(d, t.dtype, ranks_.size());
    const int64_t rows = t.shape[0], row_bytes = t.row_count() * static_cast<int64_t>(dtype_size(t.dtype));
    // Horovod's layout: the first rows % ranks ranks get one more.
    for (int64_t r = 0; r < ranks; ++r)
      plan.parts.push_back(static_cast<size_t>((rows / ranks + (r < rows % ranks ? 1 : 0)) * row_bytes));
    plan.pieces.push_back(Piece{entry->buffers[i].in, nullptr, t.bytes()});
    advise_huge_pages(entry->buffers[i].out, plan.parts[me_]);
    plan.result.push_back(Piece{nullptr, entry->buffers[i].out, plan.parts[me_]});
  }
}

void Execution::add_gather(Entry* entry, size_t tensor) {
  const Description& d = entry->description;
  const TensorDescription& t = d.tensors[tensor];
  Bucket& bucket = own_bucket(entry, t.bytes());
  bucket.output = &outputs_of_(entry)[tensor];
  bucket.row_bytes = t.row_count() * static_cast<int64_t>(dtype_size(t.dtype));
  bucket.tail_shape.assign(t.shape.begin() + 1, t.shape.end());
  ExchangePlan& plan = bucket.plan;
  plan.fold = kernels::FoldSpec();
  plan.fold.dtype = t.dtype;
  plan.pieces.push_back(Piece{entry->buffers[tensor].in, nullptr, t.bytes()});
  if (d.kind == Kind::kAllgather) {
    plan.collective = Collective::kAllgather;
    plan.send_rows.push_back(static_cast<uint64_t>(t.shape[0]));
  } else {
    plan.collective = Collective::kAlltoall;
    for (int64_t rows : entry->splits) {
      plan.send_rows.push_back(static_cast<uint64_t>(rows));
      plan.send_bytes.push_back(static_cast<size_t>(rows * bucket.row_bytes));
    }
  }
}

void Execution::close_all() {
  // The counter is the same on all ranks, and so is the stream.
  for (auto& bucket : open_) {
    bucket->number = buckets_started_;
    Stream& stream = streams_[buckets_started_++ % streams_.size()];
    stream.queue.push_back(std::move(bucket));
    ++in_flight_;
  }
  open_.clear();
}

// ---- from buckets to bytes ----

void Execution::begin(Stream* stream, uint32_t index) {
  if (!stream->exchange) {
    stream->exchange = std::make_unique<Exchange>(make_links_(index), me_, epoch_, Channel{group_, index});
    links_made_ += ranks_.size() - 1;
  }
  Bucket& bucket = *stream->queue.front();
  if (bucket.adasum) begin_next(stream);
  else stream->exchange->start(bucket.plan, stream->sequence++, bucket.output != nullptr ? &bucket : nullptr);
  stream->moved_ns = 0;
  const int64_t now = now_ns();
  stream->begun_ns = now;
  stream->first_byte_ns = 0;
  for (Entry* entry : bucket.entries)
    if (entry->started_ns == 0) entry->started_ns = now;
}

// The next exchange of a bucket that takes several; false when there is none.
bool Execution::begin_next(Stream* stream) {
  Adasum* adasum = stream->queue.front()->adasum.get();
  const ExchangePlan* plan = adasum == nullptr ? nullptr : adasum->next();
  if (plan == nullptr) return false;
  const bool sizes_differ = plan->collective != Collective::kAllreduce;
  stream->exchange->start(*plan, stream->sequence++, sizes_differ ? adasum : nullptr);
  return true;
}

bool Execution::step(std::vector<Entry*>* finished) {
  if (in_flight_ == 0) return false;
  bool moved = false;
  for (size_t i = 0; i < streams_.size(); ++i) {
    Stream& stream = streams_[i];
    if (stream.queue.empty()) continue;
    if (!stream.exchange || stream.exchange->done()) begin(&stream, static_cast<uint32_t>(i));
    const int64_t before = traced() && stream.first_byte_ns == 0 ? now_ns() : 0;
    if (stream.exchange->step()) {
      moved = true;
      if (before != 0) stream.first_byte_ns = before;
      stream.moved_ns = 0;
    } else if (settings_.timeout_ns > 0) {
      const int64_t now = now_ns();
      if (stream.moved_ns == 0) stream.moved_ns = now;
      if (now - stream.moved_ns > settings_.timeout_ns) report_silence(stream);
    }
    if (!stream.exchange->done() || begin_next(&stream)) continue;
    if (traced()) trace(stream, i);
    std::unique_ptr<Bucket> bucket = std::move(stream.queue.front());
    stream.queue.erase(stream.queue.begin());
    --in_flight_;
    ++buckets_done_;
    for (Entry* entry : bucket->entries)
      if (--entry->executions_left == 0) finished->push_back(entry);
    bucket->clear();
    free_.push_back(std::move(bucket));
  }
  return moved;
}

void Execution::trace(const Stream& stream, size_t index) const {
  const Bucket& bucket = *stream.queue.front();
  settings_.timeline->bucket(
      Timeline::Bucket{bucket.number, static_cast<int>(index), bucket.bytes, stream.begun_ns, stream.first_byte_ns},
      ranks_, bucket.entries);
}

void Execution::report_silence(const Stream& stream) const {
  const std::vector<int> waiting_for = stream.exchange->waiting_for();
  // A rank that is alive may itself only wait for the one that is not.
  std::string who, dead;
  for (int member : waiting_for) {
    const int rank = ranks_[static_cast<size_t>(member)];
    who += (who.empty() ? "" : ", ") + std::to_string(rank);
    if (settings_.silent_ns(rank) > settings_.timeout_ns / 2) dead += (dead.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (!dead.empty()) who = dead;
  const Entry& entry = *stream.queue.front()->entries.front();
  fail(ErrorKind::kTimeout, std::string("[collective] ") + kind_name(entry.description.kind) +
                                ": no data to or from rank " + who + " for " +
                                std::to_string(settings_.timeout_ns / kSecond) + " s (GLOO_TIMEOUT_SECONDS)");
}

void Execution::abandon(std::vector<Entry*>* entries) {
  for (Stream& stream : streams_) {
    for (auto& bucket : stream.queue)
      for (Entry* entry : bucket->entries)
        if (--entry->executions_left == 0) entries->push_back(entry);
    stream.queue.clear();
  }
  in_flight_ = 0;
}

}  // namespace perseus
