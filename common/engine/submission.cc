// From a caller's request to an entry: everything one rank alone can see to be wrong is refused here.
#include <algorithm>

#include "base/clock.h"
#include "engine/engine.h"

namespace perseus {
namespace {

[[noreturn]] void refuse(const std::string& text) { fail(ErrorKind::kInvalidArgument, text); }

std::string capitalised(Kind kind) {
  constexpr const char* kNames[kKindCount] = {"Allreduce",     "Allgather", "Broadcast", "Alltoall",
                                              "Reducescatter", "Barrier",   "Add group", "Remove group",
                                              "Join",          "Send",      "Receive"};
  return kNames[static_cast<int>(kind)];
}

// Beyond any memory, and far from where products of sizes overflow.
constexpr int64_t kMostElements = int64_t{1} << 48;

[[noreturn]] void refuse_null(const char* name) {
  refuse("[engine] '" + std::string(name) + "' has elements but no memory: its pointer is null");
}

void check_tensor(const Engine::Submission& s, const char* name, const Engine::Submission::Tensor& t) {
  int64_t count = 1, without_zeros = 1;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] < 0) refuse("[engine] negative dimension in the shape of '" + std::string(name) + "'");
    if (t.shape[d] > kMostElements / without_zeros)
      refuse("[engine] '" + std::string(name) + "' is too large: more than 2^48 elements");
    without_zeros *= std::max<int64_t>(t.shape[d], 1);
    count *= t.shape[d];
  }
  const bool writes = s.kind == Kind::kAllreduce || s.kind == Kind::kBroadcast || s.kind == Kind::kReceive;
  const bool reads = s.kind != Kind::kReceive;
  if (count > 0 && ((reads && t.in == nullptr) || (writes && t.out == nullptr))) refuse_null(name);
}

void check_dtype(DType dtype) {
  if (static_cast<int>(dtype) >= kDTypeCount)
    refuse("[engine] unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

void check_tensors(const Engine::Submission& s) {
  const bool needs_tensors = s.kind <= Kind::kReduceScatter;
  if (needs_tensors && s.tensor_count <= 0) refuse(capitalised(s.kind) + " needs at least one tensor.");
  if (!needs_tensors && s.tensor_count != 0) refuse(capitalised(s.kind) + " takes no tensors.");
  const bool reduces = s.kind == Kind::kAllreduce || s.kind == Kind::kReduceScatter;
  const bool adasum = s.kind == Kind::kAllreduce && s.op == ReduceOp::kAdasum;
  if (reduces && s.op == ReduceOp::kAdasum && !adasum)
    refuse("Reducescatter does not do Adasum: use op=Average or op=Sum.");
  for (int i = 0; i < s.tensor_count; ++i) {
    const Engine::Submission::Tensor& t = s.tensors[i];
    check_dtype(t.dtype);
    if (reduces && t.dtype == DType::kBool && s.op == ReduceOp::kAverage)
      refuse("Average is not defined for bool tensors: use op=Max (or), op=Min (and) or op=Sum (or).");
    if (adasum && !dtype_is_float(t.dtype))
      refuse(std::string("Adasum needs floating point tensors, got ") + dtype_name(t.dtype) + ": use op=Sum.");
    check_tensor(s, s.name, t);
  }
}

// The results of an allreduce are written while others are still read.
void check_outputs_are_apart(const Engine::Submission& s) {
  if (s.tensor_count < 2) return;
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;  // beginnings and ends
  ranges.reserve(static_cast<size_t>(s.tensor_count));
  for (int i = 0; i < s.tensor_count; ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(s.tensors[i].out);
    const size_t bytes = s.tensors[i].count() * dtype_size(s.tensors[i].dtype);
    if (bytes > 0) ranges.emplace_back(begin, begin + bytes);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].second)
      refuse("Results of an allreduce would overlap in memory: pass every tensor once (" + std::string(s.name) + ").");
}

void check_splits(const Engine::Submission& s, int ranks) {
  if (s.tensor_count != 1) refuse("Alltoall takes one tensor.");
  const Engine::Submission::Tensor& t = s.tensors[0];
  if (t.ndim == 0) return;  // an error that every rank gets in negotiation
  if (s.splits == nullptr) {
    if (t.shape[0] % ranks != 0)
      refuse("alltoall: the first dimension (" + std::to_string(t.shape[0]) +
             ") is not an even multiple of the number of workers (" + std::to_string(ranks) + "): pass splits.");
    return;
  }
  if (s.split_count != ranks)
    refuse("Number of entries in splits does not equal number of workers (" + std::to_string(s.split_count) +
           " against " + std::to_string(ranks) + ").");
  int64_t sum = 0;
  for (int i = 0; i < s.split_count; ++i) {
    if (s.splits[i] < 0) refuse("alltoall: negative entry in splits.");
    sum += std::min(s.splits[i], kMostElements);  // cannot overflow
  }
  if (sum > t.shape[0])
    refuse("Sum of splits entries is greater than the first dimension of tensor (" + std::to_string(sum) + " against " +
           std::to_string(t.shape[0]) + ").");
}

// Of a reduce-scatter every rank gets some rows, which may be none.
void check_part(const Engine::Submission& s, const ProcessSet& group) {
  const int64_t ranks = static_cast<int64_t>(group.ranks().size());
  for (int i = 0; i < s.tensor_count; ++i) {
    const Engine::Submission::Tensor& t = s.tensors[i];
    const bool empty = std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim;
    if (t.out == nullptr && !empty && t.ndim > 0 && scattered_rows(t.shape[0], ranks, group.index()) > 0)
      refuse_null(s.name);
  }
}

void check_operation(const Engine::Submission& s, const ProcessSet& group) {
  const std::vector<int>& ranks = group.ranks();
  check_tensors(s);
  if (s.kind == Kind::kAllreduce && ranks.size() > 1) check_outputs_are_apart(s);
  if (s.kind == Kind::kReduceScatter) check_part(s, group);
  if (s.kind == Kind::kBroadcast && std::find(ranks.begin(), ranks.end(), s.root) == ranks.end())
    refuse("broadcast received invalid root rank " + std::to_string(s.root) + " for provided process set");
  if (s.kind == Kind::kAlltoall) check_splits(s, static_cast<int>(ranks.size()));
}

std::string point_to_point_name(const Engine::Submission& s) {
  const bool any = s.kind == Kind::kReceive && s.root == kAnySource;
  return (s.kind == Kind::kSend ? "send." : "receive.") + (any ? "any" : std::to_string(s.root)) + "." +
         std::to_string(s.tag);
}

void check_point_to_point(const Engine::Submission& s, const World& world) {
  const auto refuse_because = [&s](const std::string& why) {
    refuse(capitalised(s.kind) + (s.kind == Kind::kSend ? " to" : " from") + " rank " + std::to_string(s.root) +
           " with tag " + std::to_string(s.tag) + ": " + why);
  };
  const bool any = s.kind == Kind::kReceive && s.root == kAnySource;
  if (s.group != 0) refuse_because("sends and receives name ranks of the world, so the process set must be 0.");
  if (s.tag < 0) refuse_because("a tag must not be negative.");
  if (s.root == world.rank) refuse_because("that is this rank itself. Copy the tensor instead.");
  if (!any && (s.root < 0 || s.root >= world.size))
    refuse_because("the world has ranks 0 to " + std::to_string(world.size - 1) + ".");
  if (any && world.size == 1) refuse_because("the world has no other rank.");
  if (s.tensor_count != 1) refuse_because("expected one tensor, got " + std::to_string(s.tensor_count) + ".");
  check_dtype(s.tensors[0].dtype);
  check_tensor(s, s.kind == Kind::kSend ? "send" : "receive", s.tensors[0]);
}

void check_group_change(const Engine::Submission& s, int world_size) {
  if (s.kind != Kind::kAddGroup && s.kind != Kind::kRemoveGroup) return;
  if (s.group != 0) refuse("[engine] the world adds and removes process sets: group 0");
  if (s.kind == Kind::kRemoveGroup) return;
  if (s.rank_count == 0) refuse("[engine] a process set needs at least one member");
  for (int i = 0; i < s.rank_count; ++i)
    if (s.ranks[i] < 0 || s.ranks[i] >= world_size || (i > 0 && s.ranks[i] <= s.ranks[i - 1]))
      refuse("[engine] members of a process set are different ranks of the world, in ascending order");
}

// Compression.fp16 and bf16 leave integers as they are, as Horovod's does; others were meant for this very tensor.
void check_codec_suits(const Engine::Submission& s) {
  const int kind = s.codec.kind;
  constexpr int kFloatsOnly[] = {CodecWish::kInt8, CodecWish::kInt4,   CodecWish::kInt2,
                                 CodecWish::kTopK, CodecWish::kRotate, CodecWish::kLowRank};
  if (std::find(std::begin(kFloatsOnly), std::end(kFloatsOnly), kind) == std::end(kFloatsOnly)) return;
  for (int i = 0; i < s.tensor_count; ++i)
    if (!dtype_is_float(s.tensors[i].dtype))
      refuse("[engine] '" + std::string(s.name) + "' is " + dtype_name(s.tensors[i].dtype) +
             ": int8, int4, int2, top-k, rotate and PowerSGD compress floating-point tensors. Reduce it without "
             "compression=.");
}

void describe(const Engine::Submission& s, Description* d) {
  d->kind = s.kind;
  d->op = s.op;
  d->prescale = s.prescale;
  d->postscale = s.postscale;
  d->root = s.root;
  d->priority = s.priority;
  d->transient = s.transient;
  d->tensors.resize(static_cast<size_t>(s.tensor_count));
  for (int i = 0; i < s.tensor_count; ++i) {
    d->tensors[i].dtype = s.tensors[i].dtype;
    d->tensors[i].shape.assign(s.tensors[i].shape, s.tensors[i].shape + s.tensors[i].ndim);
  }
  d->ranks.assign(s.ranks, s.ranks + s.rank_count);
  d->nans.clear();
  d->flush = Flush::kNone;
  d->warms_up = d->new_momenta = d->stays_on_device = d->proportional = false;
  d->outdated = 0;
  d->times = s.times;
  d->refusal = s.refusal == nullptr ? "" : s.refusal;
}

// Of tensors on one.
int device_of(const Engine::Submission& s) {
  return s.device == Engine::kAnyDevice ? cuda::Driver::get().device_of(s.tensors[0].in) : s.device;
}

}  // namespace

std::shared_ptr<ProcessSet> Engine::find_group(const Submission& s) const {
  const MutexLock lock(groups_mutex_);
  const auto group = groups_.find(s.group);
  if (group != groups_.end()) return group->second;
  if (members_.count(s.group) != 0)
    refuse(capitalised(s.kind) + ": Rank " + std::to_string(world_.rank) +
           " is not a member of the provided process set.");
  refuse("Process set provided does not exist, or has not been registered.");
}

Entry* Engine::take_entry() {
  const MutexLock lock(entries_mutex_);
  if (free_entries_.empty()) {
    if (entries_.size() == entries_.capacity()) entries_.reserve(2 * entries_.size() + 16);
    free_entries_.reserve(entries_.capacity());  // giving one back must not fail
    entries_.push_back(std::make_unique<Entry>());
    return entries_.back().get();
  }
  Entry* entry = free_entries_.back();
  free_entries_.pop_back();
  return entry;
}

void Engine::recycle(Entry* entry) {
  entry->residuals.reset();
  entry->staging.reset();
  const MutexLock lock(entries_mutex_);
  entry->executions_left = 0;  // a list that could not be given up in full may still name it
  free_entries_.push_back(entry);
}

// What the tensors are and where they lie, and what comes of them.
void Engine::fill(const Submission& s, Entry* entry) {
  describe(s, &entry->description);
  entry->gradient_of = s.gradient_of;
  entry->learning_rate = s.learning_rate;
  entry->done = s.done;
  entry->group = s.group;
  entry->submitted_ns = now_ns();
  entry->agreed_ns = entry->started_ns = 0;
  entry->last_rank = -1;
  entry->executions_left = 1;
  entry->bytes = 0;
  entry->buffers.clear();
  entry->nans.clear();
  entry->one_of_many = false;
  // Then the sum is where the result goes.
  const bool summed = s.gradient_of != 0 && !is_point_to_point(s.kind) && accumulation_.on();
  for (int i = 0; i < s.tensor_count; ++i) {
    const void* in = summed ? s.tensors[i].out : s.tensors[i].in;
    entry->buffers.push_back({static_cast<const Byte*>(in), static_cast<Byte*>(s.tensors[i].out)});
    entry->bytes += entry->description.tensors[i].bytes();
  }
}

void Engine::fill_collective(const Submission& s, const ProcessSet& group, const CompressionTerms& compression,
                             Entry* entry) {
  fill(s, entry);
  entry->description.gradient = s.gradient_of != 0;
  entry->description.compression = compression;
  if (s.gradient_of != 0) nan_check_.scan(entry);
  if (residuals_.bytes() > 0) ask_for_flush(s, group, &entry->description);
  entry->description.warms_up = warms_up(s, group, entry->description);
  entry->description.new_momenta = lacks_momenta(s, group, entry->description);
  if (compression.automatic) {
    entry->description.outdated = group.outdated_measurement(entry->submitted_ns);
    entry->description.proportional = in_proportion(s.learning_rate);
  }
  entry->splits.assign(s.splits, s.splits + s.split_count);
  const size_t ranks = group.ranks().size();
  if (s.kind == Kind::kAlltoall && s.refusal == nullptr && s.splits == nullptr && s.tensors[0].ndim > 0)
    entry->splits.assign(ranks, s.tensors[0].shape[0] / static_cast<int64_t>(ranks));
}

Error Engine::ended() const {
  const Status cause = failure();
  return Error(ErrorKind::kAborted, !cause.ok  ? cause.message
                                    : closing_ ? shutdown_text()
                                               : "The process set was removed.");
}

Error Engine::not_taken(Negotiation::Submitted submitted, const std::string& name) const {
  if (submitted == Negotiation::Submitted::kClosed) return ended();
  return Error(ErrorKind::kInvalidArgument,
               "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
               "currently being processed. If you want to request another tensor, use a different tensor name. (" +
                   name + ")");
}

template <class Give>
int64_t Engine::announce(Taken entry, const Give& give) {
  const int64_t handle = handles_.open();
  entry->handle = HandleTable::index_of(handle);
  const bool last = entry->done.call != nullptr && silent_batch_.submitted();
  bool enough = false;
  try {
    enough = give(entry.get());
  } catch (...) {
    if (entry->done.call != nullptr) silent_batch_.refused();
    HandleTable::complete(handles_.at(entry->handle));
    handles_.release(handle);
    throw;
  }
  entry.release();
  progress_.submitted(last || enough);
  return handle;
}

int64_t Engine::submit_point_to_point(const Submission& s) {
  check_point_to_point(s, world_);
  if (!s.on_cuda) return submit_point_to_point(s, nullptr);
  Submission staged = s;
  std::vector<Submission::Tensor> images;
  std::unique_ptr<cuda::Staging> staging = stage(nullptr, CompressionTerms(), &staged, &images);
  return submit_point_to_point(staged, std::move(staging));
}

int64_t Engine::submit_point_to_point(const Submission& s, std::unique_ptr<cuda::Staging> staging) {
  callers_.submits();
  Taken entry = take();
  fill(s, entry.get());
  entry->staging = std::move(staging);
  entry->tag = s.tag;
  entry->own_text = s.name != nullptr && *s.name != '\0' ? s.name : point_to_point_name(s);
  entry->text = &entry->own_text;
  return announce(std::move(entry), [this](Entry* given) {
    const bool large = given->bytes >= kBucketsWorth;
    if (!(loading_.holds(*given) ? loading_.add({"", nullptr, given}) : point_to_point_.submit(given))) throw ended();
    return large;
  });
}

// By the host, before it is reduced.
bool Engine::looks_at(const Submission& s) const {
  return s.gradient_of != 0 && (accumulation_.on() || nan_check_.on());
}

// Whoever is called back gets even this from the engine's thread, in its turn.
bool Engine::is_result(const Submission& s, const ProcessSet& group) const {
  const bool unchanged = s.kind == Kind::kBroadcast ||
                         (s.kind == Kind::kAllreduce && s.prescale == 1.0 && s.postscale == 1.0 && !looks_at(s));
  return unchanged && group.ranks().size() == 1 && s.refusal == nullptr && s.done.call == nullptr;
}

int64_t Engine::pass_on(const Submission& s) {
  if (s.gradient_of != 0) holds(s);  // which refuses what is no gradient
  auto staging = std::make_unique<cuda::Staging>(&devices_.at(device_of(s)));
  for (int i = 0; i < s.tensor_count; ++i) {
    const Submission::Tensor& t = s.tensors[i];
    const size_t bytes = t.count() * dtype_size(t.dtype);
    staging->add(t.in, bytes, t.out, bytes, false);
  }
  staging->pass_on(s.stream);
  return done_handle(GradientOutcome::kReduced, s.done, std::move(staging));
}

// What the host need not see before it is a sum. Of what this rank knows: whether all ranks say so decides.
bool Engine::may_stay(const Submission& s, const CompressionTerms& compression, int device, ProcessSet* group) const {
  const bool sums = s.kind == Kind::kAllreduce && (s.op == ReduceOp::kSum || s.op == ReduceOp::kAverage);
  const auto known = [](const Submission::Tensor& tensor) { return nccl::type_of(tensor.dtype) >= 0; };
  const bool encoded_here = compression.inside || compression.codec.kind == CodecKind::kLowRank;
  return sums && !looks_at(s) && !encoded_here && s.prescale == 1.0 && s.refusal == nullptr &&
         std::all_of(s.tensors, s.tensors + s.tensor_count, known) && group->keeps_on(device, s.gradient_of != 0);
}

// What a GPU may encode before the host sees it. Other ranks need not know: the bytes that travel are the same.
bool Engine::may_be_encoded(const Submission& s, const CompressionTerms& compression, int device, ProcessSet* group) {
  if (!execution_settings_.gpu_codecs || s.kind != Kind::kAllreduce || looks_at(s) || compression.inside) return false;
  if (compression.corrects(compression.codec.kind)) return false;
  const auto floats = [](const Submission::Tensor& tensor) { return tensor.dtype == DType::kFloat32; };
  return encoded_by_gpus(compression.codec.kind) && s.prescale == 1.0 && s.refusal == nullptr && group->spans_hosts() &&
         std::all_of(s.tensors, s.tensors + s.tensor_count, floats) && devices_.at(device).encodes();
}

// An image is reduced, spread or sent like any tensor of a CPU. NaN checks and sums over steps read it now, so they
// wait for it; nothing else does.
std::unique_ptr<cuda::Staging> Engine::stage(ProcessSet* group, const CompressionTerms& compression, Submission* s,
                                             std::vector<Submission::Tensor>* images) {
  if (s->tensor_count == 0) return nullptr;
  const int device = device_of(*s);
  auto staging = std::make_unique<cuda::Staging>(&devices_.at(device));
  const int64_t ranks = group == nullptr ? 1 : static_cast<int64_t>(group->ranks().size());
  s->stays_on_device = group != nullptr && may_stay(*s, compression, device, group);
  if (s->stays_on_device || (group != nullptr && may_be_encoded(*s, compression, device, group))) staging->keep();
  for (int i = 0; i < s->tensor_count; ++i) {
    const Submission::Tensor& t = s->tensors[i];
    int64_t row = static_cast<int64_t>(dtype_size(t.dtype));
    for (int d = 1; d < t.ndim; ++d) row *= t.shape[d];
    const int64_t rows = t.ndim == 0 ? 1 : t.shape[0];
    const size_t bytes = static_cast<size_t>(rows * row);
    // A broadcast reads the root's tensor and writes to the others'.
    const bool root = s->kind == Kind::kBroadcast && s->root == world_.rank;
    const bool reads = s->kind != Kind::kReceive && (s->kind != Kind::kBroadcast || root);
    const bool writes = s->kind != Kind::kAlltoall && s->kind != Kind::kSend && !(root && t.out == t.in);
    const void* in = reads ? t.in : nullptr;
    void* out = writes ? t.out : nullptr;
    size_t out_bytes = bytes;
    if (s->kind == Kind::kAllgather) out_bytes = bytes * static_cast<size_t>(ranks);
    if (s->kind == Kind::kReduceScatter)
      out_bytes = static_cast<size_t>(scattered_rows(rows, ranks, group->index()) * row);
    staging->add(in, bytes, out, out_bytes, s->kind == Kind::kAllgather || s->kind == Kind::kReduceScatter);
  }
  // What is no gradient may be awaited before the stream gets more to do.
  staging->load(s->stream, s->gradient_of != 0 && !is_point_to_point(s->kind));
  for (int i = 0; i < s->tensor_count; ++i) {
    images->push_back(s->tensors[i]);
    const size_t index = static_cast<size_t>(i);
    images->back().in = staging->in(index);
    const bool given = s->tensors[i].out != nullptr && s->kind != Kind::kAlltoall;
    images->back().out = given ? staging->out(index) : nullptr;
  }
  s->tensors = images->data();
  if (looks_at(*s)) staging->wait_until_loaded();
  return staging;
}

int64_t Engine::submit(const Submission& s) {
  if (failed_.load(std::memory_order_acquire) || closing_.load(std::memory_order_acquire))
    fail(ErrorKind::kAborted, failed_ ? failure().message : shutdown_text());
  if (is_point_to_point(s.kind)) return submit_point_to_point(s);
  if (s.name == nullptr || *s.name == '\0') refuse("[engine] a request needs a name");
  const std::shared_ptr<ProcessSet> group = find_group(s);
  if (s.refusal == nullptr) check_operation(s, *group);
  check_group_change(s, world_.size);
  const bool sums = s.kind == Kind::kAllreduce && (s.op == ReduceOp::kSum || s.op == ReduceOp::kAverage);
  const CompressionTerms compression = gradient_codecs_.choose(sums, s.gradient_of != 0, s.codec, s.momentum);
  check_codec_suits(s);
  if (!s.on_cuda) return submit_checked(s, group, compression, nullptr);
  if (is_result(s, *group)) return pass_on(s);
  Submission staged = s;
  std::vector<Submission::Tensor> images;
  std::unique_ptr<cuda::Staging> staging = stage(group.get(), compression, &staged, &images);
  return submit_checked(staged, group, compression, std::move(staging));
}

int64_t Engine::submit_checked(const Submission& s, const std::shared_ptr<ProcessSet>& group,
                               const CompressionTerms& compression, std::unique_ptr<cuda::Staging> staging) {
  if (s.gradient_of != 0 && holds(s)) return done_handle(GradientOutcome::kHeld, s.done, nullptr);

  if (s.times.empty()) callers_.submits();  // else it is the tuner, on whatever thread
  const bool for_nccl = execution_settings_.gpu_operations == GpuOperations::kNccl && s.stays_on_device;
  if (s.gradient_of != 0 && s.codec.kind == CodecWish::kSettings && !for_nccl && !warned_about_precision_)
    warn_about_precision(group->ranks());
  if (s.gradient_of != 0 && !warned_about_accuracy_) warn_about_accuracy(s, compression, group->ranks());
  if (s.kind == Kind::kJoin) {
    residuals_.spoil_momenta();  // others step while this rank does not
    accumulation_.forget_group(s.group);
  }
  Taken entry = take();
  fill_collective(s, *group, compression, entry.get());
  entry->description.stays_on_device = s.stays_on_device;
  entry->staging = std::move(staging);
  return announce(std::move(entry), [&](Entry* given) {
    if (loading_.holds(*given)) {
      given->own_text = s.name;
      given->text = &given->own_text;
      if (!loading_.add({s.name, group, given})) throw ended();
      return false;
    }
    Negotiation& negotiation = group->negotiation();
    const Negotiation::Submitted submitted = negotiation.submit(s.name, given);
    if (submitted != Negotiation::Submitted::kYes) throw not_taken(submitted, s.name);
    return negotiation.submitted_bytes() >= kBucketsWorth;
  });
}

}  // namespace perseus
