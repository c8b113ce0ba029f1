// Steps end where every expected name has been seen, or one is seen again.
#include "control/schedule.h"

#include <algorithm>

#include "base/hash.h"
#include "control/negotiation.h"

namespace perseus {
namespace {

constexpr int kFirstNeeded = 3, kMostNeeded = 96;  // identical steps before an order is frozen
constexpr int kMostPatience = 1 << 20;
constexpr size_t kWorthLearning = 8;   // what comes beside an order has this part of the order's bytes in a step
constexpr uint64_t kLongEnough = 100;  // steps that a schedule lasted: what broke it comes seldom
// Of a batch: enough to be worth an exchange, and little enough for the rest of the step to overlap with it.
constexpr size_t kBatchBytes = 4 * 1024 * 1024;

size_t bytes_of(const Description& description) {
  size_t bytes = 0;
  for (const TensorDescription& tensor : description.tensors) bytes += tensor.bytes();
  return bytes;
}

// A name without a slot is described every time, or just now by some rank. A request without bytes is done as soon as
// it is begun, so it could not be rolled back.
bool can_be_scheduled(const Name& name) PERSEUS_REQUIRES(progress_lock) {
  return name.slot >= 0 && name.agreed.kind == Kind::kAllreduce && bytes_of(name.agreed) > 0;
}

}  // namespace

void Schedule::learn(const std::vector<Entry*>& ready) {
  ++round_;
  bool any = false;
  for (const Entry* entry : ready) {
    // It may make the group measure: that is over some steps later, on all ranks, and so before an order is frozen.
    const Description& d = entry->description;
    if (d.compression.automatic && (!entry->name->expected || d.outdated != 0)) same_ = 0;
    // It broke the schedule: what ranks do has not changed.
    if (d.outdated != 0 && step_ == thawed_in_) needed_ = std::min(needed_, needed_before_);
    if (!can_be_scheduled(*entry->name)) continue;
    see(entry->name);
    any = true;
  }
  if (!any || same_ < std::max(needed_, kFirstNeeded) || !steady()) return;
  // Only between two steps, so that the schedule begins with its first batch. Where steps have been told apart in the
  // middle of what is now one round, the next one begins with the next round.
  if (seen_.empty()) return freeze();
  seen_.clear();
  extra_.clear();
  expected_seen_ = 0;
  ++step_;
}

void Schedule::see(Name* name) {
  if (name->seen_in_step == step_) end_step(false);
  if (name->expected) ++expected_seen_;
  else if (name->seen_in_step + 1 == step_) extra_.push_back(name);
  name->seen_in_step = step_;
  seen_.push_back({name, round_});
  if (!expected_.empty() && expected_seen_ == expected_.size()) end_step(true);
}

// A step without all that was expected: from now on what it had is expected. One with more: what comes every time is
// expected too, what comes now and then is not.
void Schedule::end_step(bool complete) {
  if (!complete) {
    for (Name* name : expected_) name->expected = false;
    expected_.clear();
    extra_.clear();
    for (const Seen& seen : seen_) extra_.push_back(seen.name);
  }
  same_ = extra_.empty() ? same_ + 1 : 0;
  for (Name* name : extra_) {
    name->expected = true;
    expected_.push_back(name);
  }
  extra_.clear();
  last_.swap(seen_);
  seen_.clear();
  expected_seen_ = 0;
  ++step_;
}

bool Schedule::steady() const {
  const auto can = [](const Name* name) PERSEUS_REQUIRES(progress_lock) { return can_be_scheduled(*name); };
  return std::all_of(expected_.begin(), expected_.end(), can);
}

// As the last step's rounds had it: what became ready in one round had been submitted on all ranks together, so no rank
// that does the same again waits for one part of a batch before it submits another.
void Schedule::freeze() {
  fingerprint_ = kFnvBasis + ++frozen_;
  uint64_t round = 0;
  size_t bytes = 0;
  std::string text;
  for (const Seen& seen : last_) {
    if (!seen.name->expected) continue;
    if (seen.round != round || bytes >= kBatchBytes) {
      batches_.emplace_back();
      round = seen.round;
      bytes = 0;
      text.push_back('|');
    }
    batches_.back().push_back(seen.name);
    seen.name->batch = static_cast<int>(batches_.size()) - 1;
    const size_t more = bytes_of(seen.name->agreed);
    bytes += more;
    pass_bytes_ += more;
    append_request(seen.name->text, seen.name->agreed, &text);
  }
  fingerprint_ = std::max<uint64_t>(fnv1a(text, fingerprint_), 1);
}

bool Schedule::outgrown(const std::vector<Entry*>& ready) {
  bool outgrown = false;
  for (const Entry* entry : ready) {
    if (!can_be_scheduled(*entry->name)) continue;
    if (entry->name->seen_in_step == step_) {
      ++step_;
      if (++beside_ == patience_) {
        outgrown |= kWorthLearning * beside_bytes_ >= pass_bytes_ * static_cast<size_t>(beside_);
        beside_ = 0;
        beside_bytes_ = 0;
      }
    }
    entry->name->seen_in_step = step_;
    beside_bytes_ += bytes_of(entry->name->agreed);
  }
  outgrown_ |= outgrown;
  return outgrown;
}

void Schedule::forget() {
  for (Name* name : expected_) name->expected = false;
  expected_.clear();
  extra_.clear();
  seen_.clear();
  last_.clear();
  expected_seen_ = 0;
  same_ = 0;
  step_ += 2;  // nothing was seen in the step before
}

void Schedule::thaw(uint64_t batches) {
  const bool lasted = batches / batches_.size() >= kLongEnough;
  needed_before_ = needed_;
  needed_ = lasted ? kFirstNeeded : std::min(2 * std::max(needed_, kFirstNeeded), kMostNeeded);
  for (const std::vector<Name*>& batch : batches_)
    for (Name* name : batch) name->batch = -1;
  batches_.clear();
  if (outgrown_) patience_ = std::min(2 * patience_, kMostPatience);
  outgrown_ = false;
  beside_ = 0;
  beside_bytes_ = pass_bytes_ = 0;
  forget();
  thawed_in_ = step_;
}

}  // namespace perseus
