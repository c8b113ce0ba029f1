// Deadlocks: every rank waits for requests that not all ranks have submitted, and none will submit anything else.
//
// A rank whose callers all wait announces it in every round that it takes part in, with what they wait for. If all
// ranks announce it in the same round, and nothing else is announced in it, nothing can become ready: what was
// submitted by then fails on all ranks with the same error, as if they had disagreed about it. A rank that submits
// something before its part of a round is composed does not announce it, so the verdict cannot come too early; nor can
// it differ, since all ranks read the same round. What is submitted after that stays: others do not know of it.
#include <algorithm>

#include "control/negotiation.h"

namespace perseus {

void Negotiation::set_blocked(const std::string& waits_for) {
  if (blocked_.empty() && !waits_for.empty()) news_ = true;
  blocked_ = waits_for;
}

void Negotiation::for_each_pending(const std::function<void(const Entry&)>& look) {
  if (pending_ == 0) return;
  const MutexLock lock(mutex_);
  for (const auto& [text, name] : names_)
    if (name->entry != nullptr) look(*name->entry);
}

void Negotiation::announce_blocked(std::string* blob) const {
  if (!blocked_.empty()) append_message(Blocked{blocked_}, blob);
}

void Negotiation::end_deadlock(const std::vector<Blocked>& by_rank, Failures* failed) {
  std::string error =
      "Deadlock: every rank waits for tensors that not all ranks have submitted (and has submitted nothing since, for "
      "HOROVOD_STALL_CHECK_TIME_SECONDS). Call the same operations with the same names on all ranks; where ranks have "
      "different numbers of batches, use hvd.join() or drop the last ones.\nWaiting ranks:";
  for (size_t i = 0; i < by_rank.size(); ++i)
    error += "\n" + std::to_string(ranks_[i]) + ": [" + by_rank[i].waits_for + "]";
  blocked_.clear();
  const MutexLock lock(mutex_);
  // A rank that has joined goes on waiting for the others to do so; the tuner's request is for no caller.
  const auto stays = [](const Description& d) { return d.kind == Kind::kJoin || !d.times.empty(); };
  const auto ends = [&](const Entry& entry) PERSEUS_REQUIRES(progress_lock) {
    return !stays(entry.description) && entry.admitted_after < snapshots_;
  };
  for (auto at = names_.begin(); at != names_.end();) {
    Name& name = *at->second;
    Entry* entry = name.entry;
    const bool told = name.announced_count > 0;
    bool passing = false;
    if (told) {
      const auto first = std::find(name.announced_by.begin(), name.announced_by.end(), true);
      const Description& description = name.announced[static_cast<size_t>(first - name.announced_by.begin())];
      passing = description.transient;
      if (!stays(description)) {
        name.announced.clear();
        name.announced_by.clear();
        name.announced_count = 0;
      }
    }
    if (entry != nullptr && ends(*entry)) {
      if (name.slot >= 0) bits_[static_cast<size_t>(name.slot / 64)] &= ~(uint64_t{1} << name.slot % 64);
      failed->emplace_back(entry, error);
      name.entry = nullptr;
      --pending_;
    }
    // Nobody will announce again a name that this rank has never submitted.
    const bool forget =
        passing && name.announced_count == 0 && !name.in_flight && name.slot < 0 && name.seen_in_step == 0;
    at = forget ? names_.erase(at) : std::next(at);
  }
  const auto over = [&](const Entry* entry) PERSEUS_REQUIRES(progress_lock) { return ends(*entry); };
  unannounced_.erase(std::remove_if(unannounced_.begin(), unannounced_.end(), over), unannounced_.end());
}

}  // namespace perseus
