// Keeping to a frozen schedule, and leaving it.
//
// While a schedule is frozen a rank begins its batches one after the other, each as soon as it has submitted all of it:
// the exchanges' headers tell the others. A rank that deviates begins no further batch and announces in the next round
// that it leaves the schedule and how many batches it has begun; a rank that learns of it does the same, so one more
// round later all ranks know how many batches each has begun. They finish what all have begun. Of the rest nothing has
// been finished anywhere, since an exchange writes nothing before every rank has begun it: all ranks roll it back and
// agree on it in rounds again.
//
// No rank waits for ever that would not do so without a schedule: one that waits for something whose turn does not come
// breaks the schedule, and so does one that has waited long for others to begin what it has begun.
#include <algorithm>

#include "base/error.h"
#include "control/negotiation.h"

namespace perseus {

void Negotiation::learn(const Entries& ready) {
  // While some have joined, what becomes ready is not what every rank submits.
  if (joined_count_ > 0 || !learns_) schedule_.forget();
  else schedule_.learn(ready);
  if (scheduled()) begin_schedule();
}

void Negotiation::begin_schedule() {
  missing_.clear();
  for (const std::vector<Name*>& batch : schedule_.batches()) missing_.push_back(batch.size());
  begun_ = 0;
  breaking_ = leave_announced_ = false;
  left_count_ = 0;
  begun_by_.assign(static_cast<size_t>(size_), 0);
  left_.assign(static_cast<size_t>(size_), false);
  // What this rank has already submitted of the next step, which is unknown to all others or which all have forgotten.
  Entries again;
  again.swap(unannounced_);
  for (const std::vector<Name*>& batch : schedule_.batches()) {
    for (const Name* name : batch) {
      uint64_t& word = bits_[static_cast<size_t>(name->slot / 64)];
      const uint64_t bit = uint64_t{1} << name->slot % 64;
      if ((word & bit) != 0) again.push_back(name->entry);
      word &= ~bit;
    }
  }
  pending_ -= static_cast<int>(again.size());
  for (Entry* entry : again) admit(entry);
}

// Until its batch is begun, or the schedule is over.
void Negotiation::hold(Entry* entry) {
  const Name& name = *entry->name;
  looked_ns_ = std::max(looked_ns_, entry->submitted_ns);
  const bool as_agreed =
      name.batch >= 0 && !entry->description.tells() && same_request(name.agreed, entry->description);
  if (as_agreed) --missing_[static_cast<size_t>(name.batch)];
  else break_schedule();
}

bool Negotiation::begin_batch(Batch* batch, Entries* entries) {
  if (!scheduled() || breaking_) return false;
  const size_t index = begun_ % missing_.size();
  if (missing_[index] > 0) return false;
  const std::vector<Name*>& names = schedule_.batches()[index];
  for (Name* name : names) take_entry(name, entries);
  missing_[index] = names.size();
  *batch = Batch{schedule_.fingerprint(), begun_++};
  return true;
}

void Negotiation::watch_schedule(int64_t now) {
  if (breaking_ || pending_ == 0 || now - looked_ns_ < kPatience) return;
  looked_ns_ = now;
  for (const std::vector<Name*>& batch : schedule_.batches()) {
    for (const Name* name : batch) {
      // Whoever waits has submitted before: what we do not know of yet may be what is missing.
      if (name->entry != nullptr && awaited_(*name->entry) && !has_submissions()) return break_schedule();
    }
  }
}

void Negotiation::break_schedule() {
  if (breaking_) return;
  breaking_ = true;
  news_ = true;
}

void Negotiation::announce_leave(std::string* blob) {
  append_message(LeaveSchedule{schedule_.fingerprint(), begun_}, blob);
  leave_announced_ = true;
}

void Negotiation::on_leave(int rank, const LeaveSchedule& message) {
  if (!scheduled()) return;  // given up meanwhile: the world ends
  // A rank begins a batch again only after all have begun it: ranks are at most one pass over the schedule apart.
  const uint64_t apart = std::max(message.begun, begun_) - std::min(message.begun, begun_);
  if (message.schedule != schedule_.fingerprint() || apart > missing_.size() || left_[rank])
    fail(ErrorKind::kInternal,
         "[negotiation] rank " + std::to_string(ranks_[rank]) + " leaves a schedule that is not the one in force");
  left_[rank] = true;
  begun_by_[rank] = message.begun;
  ++left_count_;
  break_schedule();
}

bool Negotiation::stand_in_batch(Batch* batch, Entries* entries) {
  if (begun_ >= *std::max_element(begun_by_.begin(), begun_by_.end())) return false;
  for (Name* name : schedule_.batches()[begun_ % missing_.size()]) entries->push_back(stand_in(name));
  *batch = Batch{schedule_.fingerprint(), begun_++};
  return true;
}

void Negotiation::thaw(const Entries& rolled_back) {
  Entries again = rolled_back;
  pending_ += static_cast<int>(rolled_back.size());
  for (const std::vector<Name*>& batch : schedule_.batches())
    for (const Name* name : batch)
      if (name->entry != nullptr) again.push_back(name->entry);
  if (join_entry_ != nullptr) again.push_back(join_entry_);
  schedule_.thaw(*std::min_element(begun_by_.begin(), begun_by_.end()));
  breaking_ = leave_announced_ = false;
  left_count_ = 0;
  pending_ -= static_cast<int>(again.size());
  for (Entry* entry : again) admit(entry);
}

}  // namespace perseus
