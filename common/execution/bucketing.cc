// From entries to buckets: what is fused with what, and which exchanges a tensor takes.
#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/huge_pages.h"
#include "execution/execution.h"
#include "transport/messages.h"

namespace perseus {
namespace {

bool same_reduction(const kernels::ReduceSpec& a, const kernels::ReduceSpec& b) {
  return a.dtype == b.dtype && a.op == b.op && a.prescale == b.prescale && a.postscale == b.postscale &&
         a.divisor == b.divisor;
}

// Up to here all ranks send to each other: fewer steps count more than fewer bytes between hosts.
constexpr size_t kFlatBytes = 32 * 1024;
// Of one exchange in stages. A rank that takes no part in the stage between hosts moves nothing meanwhile, and must not
// be taken for one that hangs, though all streams share the link.
constexpr size_t kMostStaged = 64 * 1024 * 1024, kMostStagedForOthers = 4 * 1024 * 1024;

}  // namespace

bool is_flat(const Description& description, size_t bytes) { return !description.gradient && bytes <= kFlatBytes; }

kernels::ReduceSpec reduction_of(const Description& description, DType dtype, size_t ranks) {
  kernels::ReduceSpec reduction;
  reduction.dtype = dtype;
  reduction.op = description.op == ReduceOp::kAverage ? ReduceOp::kSum : description.op;
  reduction.prescale = description.prescale;
  reduction.postscale = description.postscale;
  reduction.divisor = description.op == ReduceOp::kAverage ? static_cast<int>(ranks) : 1;
  return reduction;
}

Byte* Bucket::allocate(const std::vector<size_t>& sizes, const std::vector<uint64_t>& rows) {
  size_t total = 0;
  int64_t total_rows = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    constexpr uint64_t kMost = uint64_t{1} << 48;
    const uint64_t row = static_cast<uint64_t>(row_bytes);
    // Beyond kMost, products and sums could wrap.
    if (rows[i] > kMost || sizes[i] > kMost || (row > 0 && rows[i] > kMost / row) || sizes[i] != rows[i] * row)
      fail(ErrorKind::kIo, "[collective] a peer announced " + std::to_string(sizes[i]) + " bytes for " +
                               std::to_string(rows[i]) + " rows of " + std::to_string(row) + " bytes");
    total += sizes[i];
    total_rows += static_cast<int64_t>(rows[i]);
    output->received_splits.push_back(static_cast<int64_t>(rows[i]));
  }
  output->shape.assign(1, total_rows);
  output->shape.insert(output->shape.end(), tail_shape.begin(), tail_shape.end());
  output->bytes = total;
  if (place != nullptr && total == place_bytes) {
    advise_huge_pages(place, total);
    return place;
  }
  void* memory = nullptr;
  // Frameworks expect tensors on cache lines.
  if (posix_memalign(&memory, 64, total == 0 ? 64 : total) != 0)
    fail(ErrorKind::kIo, "[engine] out of memory for a result of " + std::to_string(total) + " bytes");
  advise_huge_pages(memory, total);
  output->data = static_cast<Byte*>(memory);
  return output->data;
}

void Bucket::reads(const Entry& entry, size_t tensor) {
  if (entry.staging)
    images.push_back({entry.staging.get(), tensor, 0, entry.description.tensors[tensor].bytes(), false});
}

void Bucket::add_piece(const Entry& entry, size_t tensor, size_t begin, size_t size) {
  const Entry::Buffers buffers = entry.buffers[tensor].from(begin);
  if (entry.staging) images.push_back({entry.staging.get(), tensor, begin, size, true});
  if (buffers.in != buffers.out && buffers.device == Device()) advise_huge_pages(buffers.out, size);
  plan.pieces.push_back(Piece{buffers.in, buffers.out, size});
}

bool Bucket::loaded() const {
  return std::all_of(images.begin(), images.end(),
                     [](const Image& image) { return image.staging->loaded(image.tensor, image.begin + image.bytes); });
}

void Bucket::store() {
  if (device != Device()) return;  // it is there
  cuda::Device* target = nullptr;
  const auto give = [&] {
    if (target == nullptr) return;
    const cuda::Device::Current current(*target);
    copies.store(target->to_device());
  };
  encoding.decode();
  for (const Image& image : images) {
    if (!image.stores) continue;
    if (target != &image.staging->of()) give();
    target = &image.staging->of();
    image.staging->store(image.tensor, image.begin, image.bytes, &copies);
  }
  give();
}

void Bucket::clear() {
  plan.clear();
  entries.clear();
  bytes = 0;
  adasum.reset();
  low_rank.reset();
  staged = nullptr;
  stages = -1;
  codec = CodecSpec();
  compressed_inside = false;
  flushes = false;
  residuals.clear();
  images.clear();
  on_device.clear();
  encoding.clear();
  device = Device();
  output = nullptr;
  place = nullptr;
  tail_shape.clear();
  begun_by.clear();
}

void Execution::add(const std::vector<Entry*>& ready, std::vector<Entry*>* finished, const Batch& batch) {
  // The tuner counts steps by rounds, as all ranks do; when a rank has measured its links only that rank knows.
  const bool across = levels(false).groups > 1;
  Tuner::Conditions conditions;
  conditions.between_hosts = across;
  conditions.nccl = across && settings_.nccl_between();
  if (across) conditions.largest = slice_bytes(CodecKind::kNone);
  tuner_.agreed(ready, conditions, now_ns());
  const Tuner::InForce in_force = tuner_.in_force();
  if (waits_for_speeds(ready)) waiting_.push_back({ready, in_force});
  else place_in_buckets(ready, in_force, finished, batch);
}

void Execution::place_in_buckets(const std::vector<Entry*>& ready, const Tuner::InForce& in_force,
                                 std::vector<Entry*>* finished, const Batch& batch) {
  const int64_t now = now_ns();
  in_force_ = in_force;
  for (Entry* entry : ready) {
    entry->agreed_ns = now;
    const Description& d = entry->description;
    switch (d.kind) {
      case Kind::kAllreduce:
        give_up_other_shapes(*entry);
        choose_codecs(*entry);
        place(entry);
        for (size_t i = 0; i < d.tensors.size(); ++i) add_reduction(entry, i, codecs_[i]);
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
        break;  // that all are ready is all there is to it
      case Kind::kJoin:
        if (settings_.residuals != nullptr) settings_.residuals->restart_turns(number_);
        break;
      case Kind::kSend:
      case Kind::kReceive:
        break;  // not of a process set
    }
    end_execution(entry, finished);
  }
  close_all(batch);
}

std::unique_ptr<Bucket> Execution::fresh_bucket() {
  if (free_.empty()) return std::make_unique<Bucket>();
  std::unique_ptr<Bucket> bucket = std::move(free_.back());
  free_.pop_back();
  return bucket;
}

Bucket& Execution::own_bucket(Entry* entry, size_t bytes, Device device) {
  open_.push_back(fresh_bucket());
  Bucket& bucket = *open_.back();
  bucket.bytes = bytes;
  bucket.device = device;
  bucket.entries.push_back(entry);
  ++entry->executions_left;
  return bucket;
}

Bucket& Execution::bucket_for(Entry* entry, size_t bytes, const Fit& fit) {
  const size_t wanted = in_force_.bucket_bytes(fit.most_bytes);
  const size_t most = fit.stages >= 1 ? std::min(wanted, most_staged()) : wanted;
  for (auto& bucket : open_) {
    const ExchangePlan& plan = bucket->plan;
    if (plan.collective != fit.collective || plan.algorithm != fit.algorithm || bucket->bytes + bytes > most ||
        plan.root != fit.root || bucket->stages != fit.stages || !same_reduction(plan.reduction, fit.reduction) ||
        bucket->codec != fit.codec || bucket->compressed_inside != fit.compressed_inside ||
        bucket->flushes != fit.flushes || bucket->device != fit.device)
      continue;
    bucket->bytes += bytes;
    if (bucket->entries.back() != entry) {
      bucket->entries.push_back(entry);
      ++entry->executions_left;
    }
    return *bucket;
  }
  Bucket& bucket = own_bucket(entry, bytes, fit.device);
  bucket.plan.collective = fit.collective;
  bucket.plan.algorithm = fit.algorithm;
  bucket.plan.reduction = fit.reduction;
  bucket.plan.root = fit.root;
  bucket.stages = fit.stages;
  bucket.codec = fit.codec;
  bucket.compressed_inside = fit.compressed_inside;
  bucket.flushes = fit.flushes;
  return bucket;
}

// By what all ranks know of the request. NCCL sums what is exact; where hosts exchange something encoded, it sums what
// they encode, which is float32.
bool Execution::reduces_on_device(const Entry& entry) {
  const Description& d = entry.description;
  if (!d.stays_on_device || d.prescale != 1.0 || d.flush != Flush::kNone) return false;
  const Levels& levels = device_levels();
  // Parts of a collective of NCCL are alike: each rank of each host carries a shard.
  if (levels.groups > 1 && levels.members != levels.groups * levels.shards) return false;
  for (size_t i = 0; i < d.tensors.size(); ++i) {
    const TensorDescription& t = d.tensors[i];
    const CodecSpec& codec = codecs_[i];
    if (levels.groups == 1) {
      const bool average = d.op == ReduceOp::kAverage;
      if (codec.kind != CodecKind::kNone || d.postscale != 1.0 || (average && !dtype_is_float(t.dtype))) return false;
      continue;
    }
    if (!levels.divided() || !settings_.topology->stages(t.bytes()) || is_flat(d, t.bytes())) return false;
    if (codec.kind == CodecKind::kInside || codec.kind == CodecKind::kLowRank) return false;
    if (codec.kind != CodecKind::kNone && (t.dtype != DType::kFloat32 || d.compression.inside)) return false;
  }
  return true;
}

void Execution::place(Entry* entry) {
  const bool on_device = reduces_on_device(*entry);
  for (Entry::Buffers& buffers : entry->buffers) buffers.device = on_device ? Device{Device::Kind::kCuda, 0} : Device();
  if (!entry->staging || (!on_device && !entry->staging->kept())) return;
  cuda::Staging& staging = *entry->staging;
  const bool encodes = encodes_on_device(entry, on_device);
  if (on_device && !encodes) staging.stay(device_levels().groups > 1);
  else if (!encodes) staging.fetch();
  for (size_t i = 0; i < entry->buffers.size(); ++i) {
    entry->buffers[i].in = encodes ? staging.device_in(i) : staging.in(i);
    entry->buffers[i].out = encodes ? staging.device_out(i) : staging.out(i);
  }
}

// Of a tensor that travels encoded.
const Levels& Execution::levels_of_encoded(const Entry& entry, size_t tensor) {
  const Description& d = entry.description;
  const bool alike = levels(false).groups == 1 || !settings_.topology->stages(d.tensors[tensor].bytes()) ||
                     d.flush == Flush::kAmongAll;
  return levels(alike);
}

void Execution::add_reduction(Entry* entry, size_t tensor, const CodecSpec& codec) {
  const Description& d = entry->description;
  const TensorDescription& t = d.tensors[tensor];
  const size_t bytes = t.bytes();
  if (bytes == 0) return;
  const kernels::ReduceSpec reduction = reduction_of(d, t.dtype, ranks_.size());
  const bool on_device = !(entry->buffers[tensor].device == Device());
  const Levels& levels = on_device ? device_levels() : this->levels(false);
  const bool stages = settings_.topology->stages(bytes);
  const bool flushes = d.flush != Flush::kNone && dtype_is_float(t.dtype);
  if (codec.kind == CodecKind::kInside && !flushes) return add_inside(entry, tensor, codec);
  if (flushes || codec.kind != CodecKind::kNone) {
    const Levels& of_encoded = levels_of_encoded(*entry, tensor);
    const bool low_rank = codec.kind == CodecKind::kLowRank && !flushes;
    return low_rank ? add_low_rank(entry, tensor, of_encoded, codec) : add_compressed(entry, tensor, of_encoded, codec);
  }
  if (reduction.op == ReduceOp::kAdasum) return add_adasum(entry, tensor, reduction);
  const bool staged = levels.divided() && stages && !is_flat(d, bytes);
  Fit fit(entry->buffers[tensor].device, Collective::kAllreduce, reduction);
  fit.stages = staged ? 1 : -1;
  fit.algorithm = algorithm_of(fit.stages, bytes);
  // Every element is reduced by itself, so where a tensor is cut changes no bits, but in a ring, where its place
  // counts.
  if (fit.algorithm != Algorithm::kRing) fit.most_bytes = std::min(run_bytes(bytes), staged ? most_staged() : SIZE_MAX);
  for (size_t begin = 0; begin < bytes; begin += fit.most_bytes) {
    const size_t size = std::min(fit.most_bytes, bytes - begin);
    Bucket& bucket = bucket_for(entry, size, fit);
    bucket.add_piece(*entry, tensor, begin, size);
    if (staged) open_stages(&bucket, levels, nullptr).add(bucket.plan.pieces.back());
  }
}

// Ranks of other hosts take no part, in which a sum is as large as one of all ranks.
void Execution::add_inside(Entry* entry, size_t tensor, const CodecSpec& codec) {
  entry->one_of_many = true;
  const Description& d = entry->description;
  const Levels& levels = levels_by_host();
  Fit fit(entry->buffers[tensor].device, Collective::kAllreduce,
          reduction_of(d, d.tensors[tensor].dtype, levels.inner.size()));
  if (d.op == ReduceOp::kSum)
    fit.reduction.postscale *= static_cast<double>(ranks_.size()) / static_cast<double>(levels.inner.size());
  fit.stages = 2;
  fit.codec = codec;
  const size_t bytes = d.tensors[tensor].bytes();
  Bucket& bucket = bucket_for(entry, bytes, fit);
  bucket.add_piece(*entry, tensor, 0, bytes);
  HierarchicalAllreduce& stages = open_stages(&bucket, levels, nullptr);
  stages.inside_only();
  stages.add(bucket.plan.pieces.back());
}

void Execution::add_adasum(Entry* entry, size_t tensor, const kernels::ReduceSpec& reduction) {
  const TensorDescription& t = entry->description.tensors[tensor];
  const Entry::Buffers& buffers = entry->buffers[tensor];
  Bucket& bucket = bucket_for(entry, t.bytes(), Fit(buffers.device, Collective::kAllreduce, reduction));
  bucket.add_piece(*entry, tensor, 0, t.bytes());
  if (!bucket.adasum)
    bucket.adasum = std::make_unique<Adasum>(static_cast<int>(ranks_.size()), me_, t.dtype, reduction.prescale,
                                             reduction.postscale);
  bucket.staged = bucket.adasum.get();
  bucket.adasum->add_tensor(bucket.plan.pieces.back());
}

// Between hosts a tensor goes in runs over several streams: over several interfaces at once, and past what one TCP
// connection gets of a fast network. Of a large one all runs are under way together: between two on one stream the wire
// is idle for a moment. Many peers are many connections already, and more than there are interfaces only get in each
// other's way. In shared memory one exchange has many chunks under way anyway.
size_t Execution::run_bytes(size_t bytes) const {
  const size_t streams = static_cast<size_t>(in_force_.tuning.streams), peers = std::max<size_t>(2, ranks_.size()) - 1;
  if (streams == 1 || !settings_.topology->spans_nodes(ranks_)) return SIZE_MAX;
  const size_t runs = std::max(static_cast<size_t>(settings_.topology->interfaces()), streams / peers);
  if (runs == 1) return SIZE_MAX;
  const size_t share = (bytes / runs / kChunkBytes + 1) * kChunkBytes;
  return std::max({slice_bytes(CodecKind::kNone), ranks_.size() * kChunkBytes, share});
}

const Levels& Execution::levels(bool undivided) {
  if (levels_.empty()) {
    levels_.push_back(perseus::undivided(static_cast<int>(ranks_.size()), me_));
    levels_.push_back(settings_.topology->of(ranks_, me_));
    levels_.push_back(settings_.topology->by_host(ranks_, me_));
    levels_.push_back(together(static_cast<int>(ranks_.size()), me_));
    link_cost_ = settings_.topology->spans_nodes(ranks_) ? kTcpCost : kSharedMemoryCost;
  }
  return levels_[undivided ? 0 : 1];
}

// The same on all ranks.
size_t Execution::most_staged() {
  const Levels& divided = levels(false);
  return divided.members == divided.groups * divided.shards ? kMostStaged : kMostStagedForOthers;
}

const Levels& Execution::device_levels() {
  const Levels& divided = levels(false);
  return between_by_nccl_ ? levels_[3] : divided;
}

const Levels& Execution::levels_by_host() {
  levels(false);
  return levels_[2];
}

// The bucket's stages, begun where this is their first piece.
HierarchicalAllreduce& Execution::open_stages(Bucket* bucket, const Levels& levels, const WireFormat* format,
                                              const WireFormat* inside) {
  std::unique_ptr<HierarchicalAllreduce>& stages = bucket->hierarchical[bucket->stages];
  if (!stages) stages = std::make_unique<HierarchicalAllreduce>(levels);
  if (bucket->staged == nullptr) {
    bucket->staged = stages.get();
    stages->start(bucket->plan.reduction, format, inside);
  }
  return *stages;
}

void Execution::add_broadcast(Entry* entry) {
  const Description& d = entry->description;
  int root = 0;
  while (ranks_[root] != d.root) ++root;
  kernels::ReduceSpec bytes_only;
  bytes_only.dtype = DType::kUInt8;
  for (size_t i = 0; i < d.tensors.size(); ++i) {
    const size_t bytes = d.tensors[i].bytes();
    Fit fit(entry->buffers[i].device, Collective::kBroadcast, bytes_only, root);
    fit.stages = levels(false).divided() && bytes > kFlatBytes ? 1 : -1;
    fit.most_bytes = std::min(run_bytes(bytes), fit.stages < 0 ? SIZE_MAX : most_staged());
    for (size_t begin = 0; begin < bytes; begin += fit.most_bytes) {
      const size_t size = std::min(fit.most_bytes, bytes - begin);
      Bucket& bucket = bucket_for(entry, size, fit);
      bucket.add_piece(*entry, i, begin, size);
      if (fit.stages < 0) continue;
      if (!bucket.broadcast) bucket.broadcast = std::make_unique<HierarchicalBroadcast>(levels(false));
      if (bucket.staged == nullptr) bucket.broadcast->start(root);
      bucket.staged = bucket.broadcast.get();
      bucket.broadcast->add(bucket.plan.pieces.back());
    }
  }
}

void Execution::add_reducescatter(Entry* entry) {
  const Description& d = entry->description;
  const int64_t ranks = static_cast<int64_t>(ranks_.size());
  for (size_t i = 0; i < d.tensors.size(); ++i) {
    const TensorDescription& t = d.tensors[i];
    if (t.bytes() == 0) continue;
    Bucket& bucket = own_bucket(entry, t.bytes(), entry->buffers[i].device);
    bucket.reads(*entry, i);
    ExchangePlan& plan = bucket.plan;
    plan.collective = Collective::kReduceScatter;
    plan.reduction = reduction_of(d, t.dtype, ranks_.size());
    const int64_t rows = t.shape[0], row_bytes = t.row_count() * static_cast<int64_t>(dtype_size(t.dtype));
    for (int64_t r = 0; r < ranks; ++r)
      plan.parts.push_back(static_cast<size_t>(scattered_rows(rows, ranks, r) * row_bytes));
    plan.pieces.push_back(Piece{entry->buffers[i].in, nullptr, t.bytes()});
    advise_huge_pages(entry->buffers[i].out, plan.parts[me_]);
    plan.result.push_back(Piece{nullptr, entry->buffers[i].out, plan.parts[me_]});
  }
}

void Execution::add_gather(Entry* entry, size_t tensor) {
  const Description& d = entry->description;
  const TensorDescription& t = d.tensors[tensor];
  Bucket& bucket = own_bucket(entry, t.bytes(), entry->buffers[tensor].device);
  bucket.reads(*entry, tensor);
  bucket.output = &outputs_of_(entry)[tensor];
  bucket.row_bytes = t.row_count() * static_cast<int64_t>(dtype_size(t.dtype));
  bucket.tail_shape.assign(t.shape.begin() + 1, t.shape.end());
  ExchangePlan& plan = bucket.plan;
  plan.reduction = kernels::ReduceSpec();
  plan.reduction.dtype = t.dtype;
  plan.pieces.push_back(Piece{entry->buffers[tensor].in, nullptr, t.bytes()});
  if (d.kind == Kind::kAllgather) {
    plan.collective = Collective::kAllgather;
    if (d.tensors.size() == 1) bucket.place = entry->buffers[tensor].out;
    bucket.place_bytes = t.bytes() * ranks_.size();
    plan.send_rows.push_back(static_cast<uint64_t>(t.shape[0]));
  } else {
    plan.collective = Collective::kAlltoall;
    for (int64_t rows : entry->splits) {
      plan.send_rows.push_back(static_cast<uint64_t>(rows));
      plan.send_bytes.push_back(static_cast<size_t>(rows * bucket.row_bytes));
    }
  }
}

// Of a tensor: by its size alone, never by what it shares a bucket with.
Algorithm Execution::algorithm_of(int stages, size_t bytes) {
  if (stages < 0) return settings_.algorithm.of_tensor(static_cast<int>(ranks_.size()), bytes, link_cost_);
  const Levels& levels = this->levels(false);
  return settings_.algorithm.of_tensor(levels.groups, bytes / static_cast<size_t>(levels.shards), link_cost_);
}

// Of a bucket that is full: one that gives the same bits.
void Execution::settle_algorithm(Bucket* bucket) {
  Algorithm& algorithm = bucket->plan.algorithm;
  if (algorithm == Algorithm::kPairwise) return;
  const Levels& levels = this->levels(false);
  if (bucket->stages < 0) {
    algorithm = settings_.algorithm.of_bucket(algorithm, static_cast<int>(ranks_.size()), bucket->bytes, link_cost_);
  } else {
    const size_t bytes = bucket->bytes / static_cast<size_t>(levels.shards);
    algorithm = settings_.algorithm.of_bucket(algorithm, levels.groups, bytes, link_cost_);
    bucket->hierarchical[bucket->stages]->use(algorithm);
  }
}

void Execution::close_all(const Batch& batch) {
  // The counter is the same on all ranks, and so is the stream.
  for (auto& bucket : open_) {
    settle_algorithm(bucket.get());
    bucket->number = buckets_started_;
    bucket->batch = batch;
    Stream& stream = streams_[buckets_started_++ % static_cast<size_t>(in_force_.tuning.streams)];
    stream.queue.push_back(std::move(bucket));
    ++in_flight_;
  }
  open_.clear();
}

}  // namespace perseus
