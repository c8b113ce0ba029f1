// What the engine does for gradients beyond reducing them: sums over steps, what codecs
// hold back, and the comparison of the ranks' speed.
#include <algorithm>

#include "base/clock.h"
#include "codec/low_rank.h"
#include "engine/engine.h"

namespace perseus {

bool Engine::holds(const Submission& s) {
  bool floating = s.kind == Kind::kAllreduce || s.kind == Kind::kAllgather;
  for (int i = 0; i < s.tensor_count; ++i) floating &= dtype_is_float(s.tensors[i].dtype);
  if (!floating)
    fail(ErrorKind::kInvalidArgument,
         "[engine] '" + std::string(s.name) +
             "' is submitted as a gradient: expected an allreduce or allgather of float16, "
             "bfloat16, float32 or float64");
  if (perf_check_.on() && !s.transient) check_speed(s);  // names that come again tell steps apart
  if (!accumulation_.on()) return false;
  if (s.kind == Kind::kAllgather)
    fail(ErrorKind::kInvalidArgument, "[engine] '" + std::string(s.name) +
                                          "' is a gradient that is gathered, but PERSEUS_ACCUMULATE_N_STEPS sums those "
                                          "that are reduced: make it dense");
  std::vector<Accumulation::Tensor> tensors;
  for (int i = 0; i < s.tensor_count; ++i) {
    const Submission::Tensor& t = s.tensors[i];
    tensors.push_back({t.in, t.out, t.dtype, t.count()});
  }
  return accumulation_.hold(s.gradient_of, s.group, s.name, tensors);
}

int64_t Engine::done_handle(GradientOutcome outcome, const Completion& done, std::unique_ptr<cuda::Staging> staging) {
  const int64_t handle = handles_.open();
  HandleTable::Slot* slot = handles_.at(HandleTable::index_of(handle));
  slot->gradient = outcome;
  slot->staging = std::move(staging);
  HandleTable::complete(slot);
  if (done.call != nullptr) done.call(done.arg, handle);
  return handle;
}

// A warm-up may begin with a rate of 0, which counts as not known. So one step tells nothing, but two in a row do.
bool Engine::steps_otherwise(const Submission& s) {
  const MutexLock lock(steps_mutex_);
  auto& [owner, name] = steps_otherwise_;
  if (in_proportion(s.learning_rate)) {
    if (owner == s.gradient_of) owner = 0;
    return false;
  }
  if (owner != 0) return owner == s.gradient_of && name == s.name;
  owner = s.gradient_of;
  name = s.name;
  return false;
}

void Engine::warn_about_accuracy(const Submission& s, const CompressionTerms& terms, const std::vector<int>& ranks) {
  const bool for_sgd = !terms.automatic && suits_only_sgd(terms.codec);
  if (for_sgd ? !steps_otherwise(s) : !may_cost_accuracy(terms.codec)) return;
  if (warned_about_accuracy_.exchange(true) || world_.rank != 0 || topology_.of(ranks, 0).groups == 1) return;
  const bool inside = terms.codec.kind == CodecKind::kInside;
  log_.warning("[codec] training with " + std::string(inside ? "gradients averaged " : "") + codec_name(terms.codec) +
               " may end with a higher loss than with exact gradients" +
               (for_sgd ? ", unless the optimizer is SGD: see docs/accuracy.md" : ": see docs/accuracy.md"));
}

void Engine::warn_about_precision(const std::vector<int>& ranks) {
  if (warned_about_precision_.exchange(true) || world_.rank != 0) return;
  const std::string news = gradient_codecs_.news(topology_.spans_nodes(ranks));
  if (!news.empty() && topology_.of(ranks, 0).groups > 1) log_.warning(news);
}

void Engine::ask_for_flush(const Submission& s, const ProcessSet& group, Description* d) {
  if (d->kind != Kind::kAllreduce || (d->op != ReduceOp::kSum && d->op != ReduceOp::kAverage)) return;
  Residuals::Tensors tensors;
  describe_tensors(*d, &tensors);
  const auto layout = [&] {
    const int size = static_cast<int>(group.ranks().size());
    return topology_.layout(tensor_bytes(*d), undivided(size, group.index()),
                            topology_.of(group.ranks(), group.index()));
  };
  bool dropped = false;
  const std::string name = s.name;
  d->flush = residuals_.due({s.gradient_of, group.id(), name}, tensors, d->compression, layout, &dropped);
  if (dropped && !warned_about_dropped_.exchange(true))
    log_.warning("[codec] '" + name +
                 "' has another shape or memory order than before: what was held back of it is given up. (Of others "
                 "that change, too; this is said once.)");
}

// A rank that has not had all of the first steps keeps the others from PowerSGD, too.
bool Engine::warms_up(const Submission& s, const ProcessSet& group, const Description& d) {
  const CompressionTerms& terms = d.compression;
  const auto serves = [&](const TensorDescription& t) {
    return terms.serves(t.dtype) && narrow_bytes(t.shape, terms.codec.matrix_rank) > 0;
  };
  return terms.codec.kind == CodecKind::kLowRank && std::any_of(d.tensors.begin(), d.tensors.end(), serves) &&
         topology_.of(group.ranks(), group.index()).groups > 1 &&
         first_steps_.count(s.gradient_of, group.id(), s.name) < static_cast<uint64_t>(terms.codec.warm_up);
}

// Of names that have no momenta only because nothing of theirs is corrected there is nothing to tell.
bool Engine::lacks_momenta(const Submission& s, const ProcessSet& group, const Description& d) {
  const CompressionTerms& terms = d.compression;
  const auto corrected = [&](const TensorDescription& t) { return terms.serves(t.dtype) && t.bytes() >= terms.from; };
  return terms.corrects(terms.codec.kind) && std::any_of(d.tensors.begin(), d.tensors.end(), corrected) &&
         !residuals_.has_momenta({s.gradient_of, group.id(), s.name}) &&
         topology_.of(group.ranks(), group.index()).groups > 1;
}

uint32_t Engine::channel_of(int group) const {
  const MutexLock lock(groups_mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end())
    fail(ErrorKind::kInvalidArgument, "[codec] this rank is not in process set " + std::to_string(group));
  return found->second->id();
}

size_t Engine::read_residual(uint64_t owner, int group, const std::string& name, float* data, size_t room,
                             Residuals::Place* place) {
  return residuals_.read({owner, channel_of(group), name}, data, room, place);
}

void Engine::write_residual(uint64_t owner, int group, const std::string& name, const float* data, size_t room,
                            const Residuals::Place& place) {
  residuals_.write({owner, channel_of(group), name}, data, room, place);
}

void Engine::forget_gradients(uint64_t owner) {
  accumulation_.forget(owner);
  residuals_.forget(owner);
  first_steps_.forget(owner);
  perf_check_.forget(owner);
}

// The comparison is an allreduce like any other, for which nobody waits: ranks that have joined give zeros, and what
// is not done when it is wanted again is left out.
void Engine::check_speed(const Submission& s) {
  const double mine = perf_check_.submitted(s.gradient_of, s.group, s.name, now_ns());
  const MutexLock lock(perf_check_.comparison_mutex);
  PerfCheck::Comparison& comparison = perf_check_.comparisons[s.group];
  if (comparison.handle != 0) {
    HandleTable::Slot* slot = handles_.find(comparison.handle);
    if (!HandleTable::is_done(*slot)) return;
    if (slot->status.ok && comparison.ranks[0] == world_.rank) {
      const std::string slow = describe_slow(comparison.seconds, comparison.ranks, perf_check_.steps());
      if (!slow.empty()) log_.warning(slow);
    }
    handles_.release(comparison.handle);
    comparison.handle = 0;
  }
  if (mine < 0) return;
  const std::vector<int>& ranks = comparison.ranks = group_ranks(s.group);
  if (ranks.size() < 2) return;
  comparison.seconds.assign(ranks.size(), 0.0);
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i] == world_.rank) comparison.seconds[i] = mine;
  const int64_t count = static_cast<int64_t>(ranks.size());
  const Submission::Tensor tensor{comparison.seconds.data(), comparison.seconds.data(), &count, 1, DType::kFloat64};
  Submission request;
  request.group = s.group;
  request.name = "perseus.perf_check";
  request.tensors = &tensor;
  request.tensor_count = 1;
  comparison.handle = submit(request);
}

}  // namespace perseus
