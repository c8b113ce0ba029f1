// Buckets and streams.
#include "engine/execution.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/huge_pages.h"
#include "engine/negotiation.h"

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

// Up to here all ranks send to each other: fewer steps count more than fewer bytes between hosts.
constexpr size_t kFlatBytes = 32 * 1024;
// What is encoded goes in slices of whole chunks: while one is on the wire the next is encoded on another stream. Each
// stream holds what it sends and what it receives of one.
size_t slice_bytes(int streams) {
  constexpr size_t kUnderWay = 16 * 1024 * 1024, kChunk = kWireChunk * sizeof(float);
  return kUnderWay / static_cast<size_t>(streams) / kChunk * kChunk;
}

// FNV-1a: spreads the owners of small tensors over the ranks, the same way everywhere.
uint64_t salt_of(const std::string& name) {
  uint64_t hash = 14695981039346656037U;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return hash >> 1;  // so that a number can be added
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
  staged = nullptr;
  stages = -1;
  codec = CodecSpec();
  residuals.clear();
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
      slice_bytes_(slice_bytes(settings.streams)),
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

Bucket& Execution::bucket_for(Entry* entry, size_t bytes, const Fit& fit) {
  const size_t most = std::min(settings_.fusion_bytes, fit.most_bytes);
  for (auto& bucket : open_) {
    const ExchangePlan& plan = bucket->plan;
    if (plan.collective != fit.collective || bucket->bytes + bytes > most || plan.root != fit.root ||
        bucket->stages != fit.stages || !same_fold(plan.fold, fit.fold) || !(bucket->codec == fit.codec))
      continue;
    bucket->bytes += bytes;
    if (bucket->entries.back() != entry) {
      bucket->entries.push_back(entry);
      ++entry->executions_left;
    }
    return *bucket;
  }
  Bucket& bucket = own_bucket(entry, bytes);
  bucket.plan.collective = fit.collective;
  bucket.plan.fold = fit.fold;
  bucket.plan.root = fit.root;
  bucket.stages = fit.stages;
  bucket.codec = fit.codec;
  return bucket;
}

void Execution::add_reduction(Entry* entry, size_t tensor) {
  const Description& d = entry->description;
  const TensorDescription& t = d.tensors[tensor];
  const size_t bytes = t.bytes();
  if (bytes == 0) return;
  const kernels::FoldSpec fold = fold_of(d, t.dtype, ranks_.size());
  const Levels& levels = this->levels(d.coded_inside);
  const CodecSpec codec = codec_of(d, t);
  if (codec.kind != CodecKind::kNone && levels.groups > 1) return add_coded(entry, tensor, levels, codec);
  const bool worth_stages = (d.gradient || bytes > kFlatBytes) && bytes <= settings_.hierarchical_bytes;
  if (levels.divided() && worth_stages && fold.op != ReduceOp::kAdasum) return add_leveled(entry, tensor, levels);
  Bucket& bucket = bucket_for(entry, bytes, Fit(Collective::kAllreduce, fold));
  bucket.add_piece(entry->buffers[tensor], bytes);
  if (fold.op != ReduceOp::kAdasum) return;
  if (!bucket.adasum)
    bucket.adasum =
        std::make_unique<Adasum>(static_cast<int>(ranks_.size()), me_, t.dtype, fold.prescale, fold.postscale);
  bucket.staged = bucket.adasum.get();
  bucket.adasum->add_tensor(bucket.plan.pieces.back());
}

void Execution::add_leveled(Entry* entry, size_t tensor, const Levels& levels) {
  const TensorDescription& t = entry->description.tensors[tensor];
  Fit fit(Collective::kAllreduce, fold_of(entry->description, t.dtype, ranks_.size()));
  fit.stages = 1;
  Bucket& bucket = bucket_for(entry, t.bytes(), fit);
  bucket.add_piece(entry->buffers[tensor], t.bytes());
  open_stages(&bucket, levels, nullptr).add(bucket.plan.pieces.back());
}

void Execution::add_coded(Entry* entry, size_t tensor, const Levels& levels, const CodecSpec& codec) {
  const Description& d = entry->description;
  const TensorDescription& t = d.tensors[tensor];
  const WireFormat* format = format_of(codec);
  Fit fit(Collective::kAllreduce, fold_of(d, t.dtype, ranks_.size()));
  fit.stages = &levels == &levels_[1] ? 1 : 0;
  fit.codec = codec;
  fit.most_bytes = slice_bytes_;
  if (entry->residuals == nullptr && format->keeps_residual() && settings_.residuals != nullptr && !entry->stand_in) {
    sizes_.clear();
    for (const TensorDescription& each : d.tensors) sizes_.push_back(static_cast<size_t>(each.count()));
    entry->residuals =
        settings_.residuals->take(entry->gradient_of, static_cast<int>(group_), entry->name->text, sizes_);
  }
  LeveledAllreduce::Run run;
  run.salt = salt_of(entry->name->text) + tensor;
  const size_t bytes = t.bytes();
  for (size_t begin = 0; begin < bytes; begin += slice_bytes_) {
    const size_t size = std::min(slice_bytes_, bytes - begin);
    Bucket& bucket = bucket_for(entry, size, fit);
    bucket.add_piece({entry->buffers[tensor].in + begin, entry->buffers[tensor].out + begin}, size);
    run.piece = bucket.plan.pieces.back();
    run.number = begin / sizeof(float) / kWireChunk;
    if (entry->residuals != nullptr) {
      run.residual = entry->residuals->sent(tensor) + begin / sizeof(float);
      run.result_residual = entry->residuals->result(tensor) + begin / sizeof(float);
      run.step = entry->residuals->steps;
      if (bucket.residuals.empty() || bucket.residuals.back() != entry->residuals)
        bucket.residuals.push_back(entry->residuals);
    }
    open_stages(&bucket, levels, format).add(run);
  }
}

// By what all ranks know of the tensor, never by what it shares a bucket with.
CodecSpec Execution::codec_of(const Description& d, const TensorDescription& t) const {
  if (t.dtype != DType::kFloat32) return CodecSpec();
  return t.bytes() >= d.codec_from ? d.codec : settings_.small_codec;
}

const WireFormat* Execution::format_of(const CodecSpec& codec) {
  for (auto& [spec, format] : formats_)
    if (spec == codec) return format.get();
  formats_.emplace_back(codec, make_codec(codec));
  return formats_.back().second.get();
}

const Levels& Execution::levels(bool undivided) {
  if (levels_.empty()) {
    levels_.push_back(perseus::undivided(static_cast<int>(ranks_.size()), me_));
    levels_.push_back(settings_.division->of(ranks_, me_));
  }
  return levels_[undivided ? 0 : 1];
}

// The bucket's stages, begun where this is their first piece.
LeveledAllreduce& Execution::open_stages(Bucket* bucket, const Levels& levels, const WireFormat* format) {
  std::unique_ptr<LeveledAllreduce>& stages = bucket->leveled[bucket->stages];
  if (!stages) stages = std::make_unique<LeveledAllreduce>(levels);
  if (bucket->staged == nullptr) {
    bucket->staged = stages.get();
    stages->start(bucket->plan.fold, format);
  }
  return *stages;
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
    Bucket& bucket = bucket_for(entry, bytes, Fit(Collective::kBroadcast, bytes_only, root));
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

Exchange& Execution::exchange_of(Stream* stream, uint32_t index, Level level) {
  std::unique_ptr<Exchange>& exchange = stream->exchanges[static_cast<int>(level)];
  if (!exchange) {
    const std::vector<Link*> all = make_links_(index);
    std::vector<Link*> links;
    int me = me_;
    if (level == Level::kAll) {
      links = all;
    } else {
      const Levels& levels = this->levels(false);
      me = level == Level::kInner ? levels.inner_me : levels.across_me;
      for (int member : level == Level::kInner ? levels.inner : levels.across)
        links.push_back(all[static_cast<size_t>(member)]);
    }
    exchange = std::make_unique<Exchange>(std::move(links), me, epoch_, Channel{group_, index});
  }
  stream->level = static_cast<int>(level);
  return *exchange;
}

void Execution::begin(Stream* stream, uint32_t index) {
  Bucket& bucket = *stream->queue.front();
  const int64_t now = now_ns();
  stream->begun_ns = now;
  for (Entry* entry : bucket.entries)
    if (entry->started_ns == 0) entry->started_ns = now;
  if (bucket.stages >= 0) bucket.leveled[bucket.stages]->use(&stream->coded);
  if (bucket.staged != nullptr) begin_next(stream, index);
  else
    exchange_of(stream, index, Level::kAll)
        .start(bucket.plan, stream->sequence[0]++, bucket.output != nullptr ? &bucket : nullptr);
  stream->moved_ns = 0;
  stream->first_byte_ns = 0;
}

// The next exchange of a bucket that takes several; false when there is none.
bool Execution::begin_next(Stream* stream, uint32_t index) {
  Staged* staged = stream->queue.front()->staged;
  Staged::Step step;
  if (staged == nullptr || !staged->next(&step)) return false;
  Exchange& exchange = exchange_of(stream, index, step.level);
  exchange.start(*step.plan, stream->sequence[stream->level]++, step.sizes_vary ? staged : nullptr);
  return true;
}

bool Execution::step(std::vector<Entry*>* finished) {
  if (in_flight_ == 0) return false;
  bool moved = false;
  for (size_t i = 0; i < streams_.size(); ++i) {
    Stream& stream = streams_[i];
    if (stream.queue.empty()) continue;
    if (stream.exchange() == nullptr || stream.exchange()->done()) begin(&stream, static_cast<uint32_t>(i));
    const int64_t before = traced() && stream.first_byte_ns == 0 ? now_ns() : 0;
    if (stream.exchange()->step()) {
      moved = true;
      if (before != 0) stream.first_byte_ns = before;
      stream.moved_ns = 0;
    } else if (settings_.timeout_ns > 0) {
      const int64_t now = now_ns();
      if (stream.moved_ns == 0) stream.moved_ns = now;
      if (now - stream.moved_ns > settings_.timeout_ns) report_silence(stream);
    }
    if (!stream.exchange()->done() || begin_next(&stream, static_cast<uint32_t>(i))) continue;
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

size_t Execution::staging_bytes() const {
  size_t bytes = 0;
  for (const Stream& stream : streams_) bytes += stream.coded.bytes();
  return bytes;
}

void Execution::trace(const Stream& stream, size_t index) const {
  const Bucket& bucket = *stream.queue.front();
  settings_.timeline->bucket(
      Timeline::Bucket{bucket.number, static_cast<int>(index), bucket.bytes, stream.begun_ns, stream.first_byte_ns,
                       bucket.codec.kind, bucket.staged == nullptr ? 0 : bucket.staged->codec_ns()},
      ranks_, bucket.entries);
}

int Execution::rank_at(Level level, int member) const {
  if (level == Level::kInner) member = levels_[1].inner[static_cast<size_t>(member)];
  if (level == Level::kAcross) member = levels_[1].across[static_cast<size_t>(member)];
  return ranks_[static_cast<size_t>(member)];
}

void Execution::report_silence(const Stream& stream) const {
  const std::vector<int> waiting_for = stream.exchange()->waiting_for();
  // A rank that is alive may itself only wait for the one that is not.
  std::string who, dead;
  for (int member : waiting_for) {
    const int rank = rank_at(static_cast<Level>(stream.level), member);
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
