// The replicated table of names.
#include "control/negotiation.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace perseus {
namespace {

void keep_longest(const std::vector<uint32_t>& times, std::vector<uint32_t>* longest) {
  for (size_t i = 0; i < std::min(times.size(), longest->size()); ++i)
    (*longest)[i] = std::max((*longest)[i], times[i]);
}

}  // namespace

Negotiation::Negotiation(int me, std::vector<int> ranks, std::function<Entry*()> make_entry, Awaited awaited)
    : size_(static_cast<int>(ranks.size())),
      me_(me),
      ranks_(std::move(ranks)),
      make_entry_(std::move(make_entry)),
      awaited_(std::move(awaited)),
      joined_(ranks_.size(), false) {}

Negotiation::Submitted Negotiation::submit(const char* text, Entry* entry) {
  const MutexLock lock(mutex_);
  if (closed_) return Submitted::kClosed;
  lookup_.assign(text);
  Name& name = find_or_make(lookup_);
  if (name.in_flight) return Submitted::kDuplicate;
  submitted_.push_back(entry);
  name.in_flight = true;
  entry->name = &name;
  entry->text = &name.text;
  submitted_bytes_.fetch_add(entry->bytes, std::memory_order_relaxed);
  any_submitted_.store(true, std::memory_order_release);
  return Submitted::kYes;
}

void Negotiation::retire(Entry* entry) {
  const MutexLock lock(mutex_);
  Name* name = entry->name;
  if (entry->stand_in) --name->stand_ins;
  else name->in_flight = false;
  entry->name = nullptr;
  entry->text = nullptr;
  // Forget names that will not come again; others may still be announcing theirs (then somebody erred and it stays).
  if (entry->description.transient && !name->in_flight && name->stand_ins == 0 && name->slot < 0 &&
      name->announced_count == 0 && name->seen_in_step == 0)
    names_.erase(name->text);
}

bool Negotiation::collect() {
  admit_collected();  // what there was no memory for before
  if (!any_submitted_.load(std::memory_order_acquire)) return false;
  {
    const MutexLock lock(mutex_);
    collected_.swap(submitted_);
    any_submitted_.store(false, std::memory_order_relaxed);
    submitted_bytes_.store(0, std::memory_order_relaxed);
  }
  admit_collected();
  return true;
}

void Negotiation::admit_collected() {
  for (Entry* entry : collected_) admit(entry);
  collected_.clear();
}

void Negotiation::admit(Entry* entry) {
  Name* name = entry->name;
  name->entry = entry;
  name->warned_ns = 0;
  entry->admitted_after = snapshots_;
  ++pending_;
  blocked_.clear();
  if (entry->description.kind == Kind::kJoin) join_entry_ = entry;
  if (scheduled() && (name->batch >= 0 || entry->description.kind == Kind::kJoin)) return hold(entry);
  news_ = true;
  news_bytes_ += entry->bytes;
  // A NaN, or a flush, is told by a description; the others' bits become descriptions too, so it delays nobody's
  // answer.
  const Description& d = entry->description;
  const bool bit_will_do = (joined_count_ == 0 || joined_may_miss(d.kind)) && !d.tells();
  // Other ranks may have come to the same.
  const bool stays_from_now_on = d.stays_on_device && !name->stayed;
  if (bit_will_do && name->slot >= 0 && !stays_from_now_on && same_request(name->agreed, d)) {
    bits_[name->slot / 64] |= uint64_t{1} << name->slot % 64;
    name->stayed = d.stays_on_device;
  } else {
    unannounced_.push_back(entry);
  }
}

void Negotiation::snapshot(RoundContent* content) {
  content->bits = bits_;
  if (joined_[me_] && !closing_) set_bits_for_others(&content->bits);
  for (std::string& blob : content->announced) blob.clear();
  std::string& blob = content->announced[me_];
  // Ranks that have submitted the same cut alike. When all have joined, all that is pending is told at once.
  const size_t room = closing_ ? SIZE_MAX : Round::kMostBody / 2 / static_cast<size_t>(size_);
  auto next = unannounced_.begin();
  for (; next != unannounced_.end() && blob.size() < room; ++next) {
    append_request((*next)->name->text, (*next)->description, &blob);
    (*next)->name->stayed = (*next)->description.stays_on_device;
  }
  announced_.assign(unannounced_.begin(), next);
  unannounced_.erase(unannounced_.begin(), next);
  ++snapshots_;
  const size_t requests = blob.size();
  if (has_urgent_news()) announce_leave(&blob);
  announce_blocked(&blob);
  if (blob.size() != requests) announced_.clear();
  news_ = !unannounced_.empty();
  news_bytes_ = 0;
}

Name& Negotiation::name_of(const std::string& text) {
  const MutexLock lock(mutex_);
  return find_or_make(text);
}

// Whole, or not at all.
Name& Negotiation::find_or_make(const std::string& text) {
  const auto found = names_.find(text);
  if (found != names_.end()) return *found->second;
  auto name = std::make_unique<Name>();
  name->text = text;
  return *names_.emplace(text, std::move(name)).first->second;
}

void Negotiation::on_request(int rank, Request&& request) {
  if (request.description.kind == Kind::kJoin) return on_join(rank);
  Name& name = name_of(request.name);
  if (name.batch >= 0)
    fail(ErrorKind::kInternal, "[negotiation] rank " + std::to_string(ranks_[rank]) + " describes " + request.name +
                                   " (" + to_text(request.description) +
                                   "), which is in a schedule, without leaving it");
  // Somebody's request differs from what was agreed (or asks who is missing): all start over with descriptions.
  if (name.slot >= 0) free_slot(&name);
  if (name.announced.empty()) {
    name.announced.resize(size_);
    name.announced_by.assign(size_, false);
  }
  if (!name.announced_by[rank]) {
    ++name.announced_count;
    name.last = name.last_round == applied_ ? -1 : rank;
    name.last_round = applied_;
  }
  name.announced_by[rank] = true;
  name.announced[rank] = std::move(request.description);
  if (name.announced_count == size_) touched_.push_back(&name);
}

void Negotiation::apply(const RoundContent& content, std::vector<Entry*>* ready,
                        std::vector<std::pair<Entry*, std::string>>* failed) {
  // Bits first: announcements may free the slots they speak of.
  for (size_t word = 0; word < content.bits.size(); ++word) {
    for (uint64_t left = content.bits[word]; left != 0; left &= left - 1) {
      take_entry(slots_[word * 64 + static_cast<size_t>(__builtin_ctzll(left))], ready);
    }
  }
  touched_.clear();
  ++applied_;
  if (agree_at_once(content, ready)) {
    put_in_order(ready);
    return;
  }
  const bool closed = closing_;
  std::vector<Blocked> blocked;  // in the order of ranks
  bool quiet = ready->empty();   // the same on all ranks
  for (int rank = 0; rank < size_; ++rank) {
    AnnouncementReader reader(content.announced[rank]);
    bool is_blocked = false;
    while (!reader.at_end()) {
      Message message = reader.next();
      if (Blocked* now = std::get_if<Blocked>(&message)) {
        if (!std::exchange(is_blocked, true)) blocked.push_back(std::move(*now));
        continue;
      }
      quiet = false;
      if (Request* request = std::get_if<Request>(&message)) on_request(rank, std::move(*request));
      else on_leave(rank, std::get<LeaveSchedule>(message));
    }
  }
  if (joined_count_ > 0) touch_what_joins_complete();
  for (Name* name : touched_) decide(name, ready, failed);
  if (closed) finish_join(ready);
  if (static_cast<int>(blocked.size()) == size_) {
    if (quiet && !closed && touched_.empty()) end_deadlock(blocked, failed);
    else news_ = true;  // if that changes nothing for anybody, the next round says so
  }
  if (!failed->empty()) blocked_.clear();
  put_in_order(ready);
}

// What became ready together runs by priority, else in the order in which names were first agreed on.
void Negotiation::put_in_order(Entries* ready) {
  if (!ready->empty()) blocked_.clear();
  const auto higher = [](const Entry* a, const Entry* b) { return a->description.priority > b->description.priority; };
  if (!std::is_sorted(ready->begin(), ready->end(), higher)) std::stable_sort(ready->begin(), ready->end(), higher);
  if (!awaited_) return;
  if (!scheduled()) learn(*ready);
  else if (schedule_.outgrown(*ready)) break_schedule();
}

// Where all ranks announce the same bytes, what this rank has submitted itself is what all agree on: nothing is to be
// read or compared. So it is with requests whose names are used once, in step. False, with nothing changed, where it is
// not so; every rank decides alike, by what all know.
bool Negotiation::agree_at_once(const RoundContent& content, Entries* ready) {
  Entries announced;
  announced.swap(announced_);
  if (announced.empty() || joined_count_ > 0 || size_ == 1) return false;
  for (const std::string& blob : content.announced)
    if (blob != content.announced[me_]) return false;
  for (const Entry* entry : announced) {
    const Name& name = *entry->name;
    const Description& d = entry->description;
    if (name.announced_count > 0 || name.batch >= 0 || d.kind == Kind::kJoin || d.tells() || !check_alone(d).empty())
      return false;
  }
  for (Entry* entry : announced) {
    Name* name = entry->name;
    if (name->slot >= 0) free_slot(name);
    take_entry(name, ready);
    if (entry->description.transient) continue;
    name->agreed = entry->description;
    take_slot(name);
  }
  announced.clear();
  announced_.swap(announced);  // keeps its capacity
  return true;
}

void Negotiation::decide(Name* name, Entries* ready, Failures* failed) {
  const std::string mismatch = name->announced_count == size_ ? find_mismatch(name->text, name->announced, ranks_)
                                                              : find_mismatch_but_joined(*name);
  std::vector<Entry::Nan> nans;
  Flush flush = Flush::kNone;
  bool warms_up = false, new_momenta = false, stay_on_device = true, proportional = true;
  int outdated = 0;
  for (int rank = 0; rank < size_; ++rank) {
    for (uint32_t tensor : name->announced[rank].nans) nans.push_back({ranks_[rank], tensor});
    flush = std::max(flush, name->announced[rank].flush);
    warms_up |= name->announced[rank].warms_up;
    new_momenta |= name->announced[rank].new_momenta;
    if (name->announced_by[rank]) stay_on_device &= name->announced[rank].stays_on_device;
    if (name->announced_by[rank]) proportional &= name->announced[rank].proportional;
    outdated = std::max(outdated, name->announced[rank].outdated);
  }
  if (mismatch.empty()) {
    size_t first = 0;
    while (!name->announced_by[first]) ++first;
    name->agreed = std::move(name->announced[first]);
    name->agreed.nans.clear();
    name->agreed.flush = Flush::kNone;
    name->agreed.warms_up = name->agreed.new_momenta = false;
    name->agreed.stays_on_device = stay_on_device;
    name->agreed.proportional = proportional;
    name->agreed.outdated = 0;
    for (const Description& other : name->announced) keep_longest(other.times, &name->agreed.times);
    Entry* entry = take_entry(name, ready);
    entry->description.times = name->agreed.times;
    if (name->last >= 0 && name->announced_count == size_) entry->last_rank = ranks_[static_cast<size_t>(name->last)];
    entry->nans = std::move(nans);
    entry->description.flush = flush;
    // Those who have joined have neither momenta nor what PowerSGD keeps.
    entry->description.warms_up = warms_up || joined_count_ > 0;
    entry->description.new_momenta = new_momenta || joined_count_ > 0;
    entry->description.stays_on_device = stay_on_device && joined_count_ == 0;
    entry->description.proportional = proportional;
    entry->description.outdated = outdated;
    // The lowest rank's priority goes for all, so that all run in one order.
    entry->description.priority = name->agreed.priority;
    if (!name->agreed.transient) take_slot(name);
  } else if (name->entry != nullptr) {
    failed->emplace_back(name->entry, mismatch);
    detach(name);
  }
  name->announced.clear();
  name->announced_by.clear();
  name->announced_count = 0;
}

Entry* Negotiation::take_entry(Name* name, Entries* ready) {
  if (name->entry == nullptr && joined_[me_]) {
    ready->push_back(stand_in(name));
    return ready->back();
  }
  if (name->entry == nullptr) fail(ErrorKind::kInternal, "[negotiation] " + name->text + " became ready without us");
  ready->push_back(name->entry);
  detach(name);
  return ready->back();
}

void Negotiation::detach(Name* name) {
  Entry* entry = std::exchange(name->entry, nullptr);
  if (name->slot >= 0) {
    uint64_t& word = bits_[name->slot / 64];
    const uint64_t bit = uint64_t{1} << name->slot % 64;
    // Its bit was on its way when a description took the place of it, for which there is no need any more.
    if ((word & bit) == 0)
      unannounced_.erase(std::remove(unannounced_.begin(), unannounced_.end(), entry), unannounced_.end());
    word &= ~bit;
    entry->description.priority = name->agreed.priority;
    entry->description.stays_on_device = name->agreed.stays_on_device && joined_count_ == 0;
    entry->description.warms_up = entry->description.new_momenta = joined_count_ > 0;
  }
  --pending_;
}

void Negotiation::take_slot(Name* name) {
  if (free_slots_.empty()) {
    name->slot = static_cast<int>(slots_.size());
    slots_.push_back(name);
    bits_.resize((slots_.size() + 63) / 64);
  } else {
    name->slot = free_slots_.top();
    free_slots_.pop();
    slots_[name->slot] = name;
  }
}

void Negotiation::free_slot(Name* name) {
  const int slot = name->slot;
  const uint64_t bit = uint64_t{1} << slot % 64;
  if ((bits_[slot / 64] & bit) != 0) {
    bits_[slot / 64] &= ~bit;
    announce(name->entry);
  }
  slots_[slot] = nullptr;
  free_slots_.push(slot);
  name->slot = -1;
}

void Negotiation::announce(Entry* entry) {
  unannounced_.push_back(entry);
  news_ = true;
  news_bytes_ += entry->bytes;
}

void Negotiation::take_pending(bool close, std::vector<Entry*>* entries) {
  {
    const MutexLock lock(mutex_);
    closed_ = closed_ || close;
  }
  collect();
  if (scheduled()) thaw({});  // of what others begin nothing is finished
  const MutexLock lock(mutex_);
  for (auto& [text, name] : names_) {
    if (name->entry == nullptr) continue;
    entries->push_back(name->entry);
    name->entry->executions_left = 0;  // a list of what was rolled back may have it, too
    name->entry = nullptr;
  }
  pending_ = 0;
  join_entry_ = nullptr;
  unannounced_.clear();
  announced_.clear();
  std::fill(bits_.begin(), bits_.end(), 0);
  news_ = false;
  news_bytes_ = 0;
}

void Negotiation::find_stalled(int64_t now, int64_t age_ns, std::vector<Stalled>* stalled, int64_t since_ns) {
  if (pending_ == 0) return;
  const MutexLock lock(mutex_);
  for (auto& [text, name] : names_) {
    Entry* entry = name->entry;
    if (entry == nullptr) continue;
    const int64_t age = now - std::max(entry->submitted_ns, since_ns);
    if (age < age_ns) continue;
    if (entry->description.kind == Kind::kJoin) continue;  // joining is waiting
    if (name->batch >= 0) break_schedule();                // its rounds will tell who is missing
    if (name->slot >= 0) {
      // Bits say that somebody is missing, not who. A description instead makes all ranks start over with descriptions
      // once the round has told them (the slot itself may only change on all ranks together).
      const uint64_t bit = uint64_t{1} << name->slot % 64;
      if ((bits_[name->slot / 64] & bit) == 0) continue;  // announced already, not yet told
      bits_[name->slot / 64] &= ~bit;
      announce(entry);
    } else if (name->announced_count > 0) {
      const auto first = std::find(name->announced_by.begin(), name->announced_by.end(), true);
      Stalled fact{name.get(), age, ranks_[first - name->announced_by.begin()], {}};
      for (int rank = 0; rank < size_; ++rank)
        if (!name->announced_by[rank] && !joined_[rank]) fact.missing.push_back(ranks_[rank]);
      stalled->push_back(std::move(fact));
    }
  }
}

}  // namespace perseus
