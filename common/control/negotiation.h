// Which requests every rank of a group has submitted: names, slots, readiness bits, announcements and the order in
// which what is ready is executed. A replica: every rank holds the same slots and applies the same merged rounds in the
// same order.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/progress_lock.h"
#include "control/announcement.h"
#include "control/round.h"
#include "control/schedule.h"
#include "request/request.h"

namespace perseus {

// Can a rank that has joined be done without?
bool joined_may_miss(Kind kind);

// A tensor's name within a group, remembered as long as the group lives (unless transient).
struct Name {
  std::string text;
  bool in_flight = false;                                    // guarded by Negotiation::mutex_
  Entry* entry PERSEUS_GUARDED_BY(progress_lock) = nullptr;  // submitted here and not yet ready
  int slot PERSEUS_GUARDED_BY(progress_lock) = -1;           // agreed on; then `agreed` describes it
  Description agreed PERSEUS_GUARDED_BY(progress_lock);
  bool stayed PERSEUS_GUARDED_BY(progress_lock) = false;  // on its device, as this rank has last told the others
  std::vector<Description> announced PERSEUS_GUARDED_BY(progress_lock);  // by group rank, while not agreed
  std::vector<bool> announced_by PERSEUS_GUARDED_BY(progress_lock);
  int announced_count PERSEUS_GUARDED_BY(progress_lock) = 0;
  // Group rank that announced last, where only one did in that round.
  int last PERSEUS_GUARDED_BY(progress_lock) = -1;
  uint64_t last_round PERSEUS_GUARDED_BY(progress_lock) = 0;  // counted by apply()
  int stand_ins PERSEUS_GUARDED_BY(progress_lock) = 0;        // entries that this rank, having joined, still gives
  int64_t warned_ns PERSEUS_GUARDED_BY(progress_lock) = 0;
  // Of the schedule:
  uint64_t seen_in_step PERSEUS_GUARDED_BY(progress_lock) = 0;  // the last one; 0 = never
  bool expected PERSEUS_GUARDED_BY(progress_lock) = false;      // in every step
  int batch PERSEUS_GUARDED_BY(progress_lock) = -1;             // while the schedule is frozen
};

class Negotiation {
 public:
  // Does a caller wait for this entry?
  using Awaited = std::function<bool(const Entry&)>;
  // `me`: this rank's index in `ranks`. `make_entry` gives an empty entry, for what this rank stands in for. `awaited`:
  // what repeats itself is to be scheduled; else null.
  Negotiation(int me, std::vector<int> ranks, std::function<Entry*()> make_entry, Awaited awaited = nullptr);

  // Any thread. Registers the entry under `name`, unless that name is in flight already or the group takes no more.
  enum class Submitted { kYes, kDuplicate, kClosed };
  Submitted submit(const char* name, Entry* entry);
  // The entry's handle is about to be done: the name is free again.
  void retire(Entry* entry) PERSEUS_REQUIRES(progress_lock);

  // Takes over what was submitted since the last call; true when there was anything.
  bool collect() PERSEUS_REQUIRES(progress_lock);
  size_t submitted_bytes() const { return submitted_bytes_.load(std::memory_order_relaxed); }  // any thread
  bool has_submissions() const { return any_submitted_.load(std::memory_order_seq_cst); }      // any thread
  // Is there something that other ranks do not know yet?
  bool has_news() const PERSEUS_REQUIRES(progress_lock) { return news_; }
  size_t news_bytes() const PERSEUS_REQUIRES(progress_lock) { return news_bytes_; }
  bool has_pending() const PERSEUS_REQUIRES(progress_lock) { return pending_ > 0; }
  // Must other ranks learn of it, whatever else is under way?
  bool has_urgent_news() const PERSEUS_REQUIRES(progress_lock) { return breaking_ && !leave_announced_; }
  // This rank has, as all ranks know.
  bool joined() const PERSEUS_REQUIRES(progress_lock) { return joined_[static_cast<size_t>(me_)]; }

  // This rank's part of the next round.
  void snapshot(RoundContent* content) PERSEUS_REQUIRES(progress_lock);
  // Applies a finished round: `ready` receives this rank's entries in the agreed order of execution, `failed` those
  // that ranks disagree about, with the reason.
  void apply(const RoundContent& content, std::vector<Entry*>* ready,
             std::vector<std::pair<Entry*, std::string>>* failed) PERSEUS_REQUIRES(progress_lock);

  // ---- a frozen schedule (scheduling.cc) ----

  // This long after the last submission a caller that waits for something whose turn has not come waits in vain.
  static constexpr int64_t kPatience = 20 * kMillisecond;
  bool scheduled() const PERSEUS_REQUIRES(progress_lock) { return schedule_.frozen(); }
  // May what becomes ready from now on make a schedule? The same on all ranks for the same round.
  void learn_order(bool on) PERSEUS_REQUIRES(progress_lock) { learns_ = on; }
  // The next batch, once this rank has submitted all of it: its entries in the order of execution.
  bool begin_batch(Batch* batch, std::vector<Entry*>* entries) PERSEUS_REQUIRES(progress_lock);
  // Looks for callers that wait in vain.
  void watch_schedule(int64_t now) PERSEUS_REQUIRES(progress_lock);
  // This rank begins no further batch and tells all others, who do the same.
  void break_schedule() PERSEUS_REQUIRES(progress_lock);
  // Has every rank said how many batches it has begun? Then begun() has them, by group rank.
  bool broken() const PERSEUS_REQUIRES(progress_lock) { return left_count_ == size_; }
  const std::vector<uint64_t>& begun() const PERSEUS_REQUIRES(progress_lock) { return begun_by_; }
  // Once broken: the next batch that others have begun, with entries that stand in for this rank's.
  bool stand_in_batch(Batch* batch, std::vector<Entry*>* entries) PERSEUS_REQUIRES(progress_lock);
  // The schedule is over. What this rank has submitted and no rank has finished is agreed on in rounds again.
  void thaw(const std::vector<Entry*>& rolled_back) PERSEUS_REQUIRES(progress_lock);

  // ---- deadlocks (deadlock.cc) ----

  // What this rank's callers wait for, as others are to be told, while none of them can submit anything more; "" when
  // one may. Where all ranks are blocked at once, what they have submitted fails on all.
  void set_blocked(const std::string& waits_for) PERSEUS_REQUIRES(progress_lock);
  void for_each_pending(const std::function<void(const Entry&)>& look) PERSEUS_REQUIRES(progress_lock);

  // All entries that are not ready. `close`: no more are taken from now on.
  void take_pending(bool close, std::vector<Entry*>* entries) PERSEUS_REQUIRES(progress_lock);
  // Appends all requests older than `age_ns`, with the ranks that have not submitted them; announces those known by
  // bits only, so that the next round tells who is missing. Ages count from `since_ns` at the earliest.
  struct Stalled {
    Name* name;  // whose warned_ns is the caller's
    int64_t age_ns;
    int first;                 // global rank: the lowest that has submitted it
    std::vector<int> missing;  // global ranks
  };
  void find_stalled(int64_t now, int64_t age_ns, std::vector<Stalled>* stalled, int64_t since_ns = 0)
      PERSEUS_REQUIRES(progress_lock);

 private:
  using Entries = std::vector<Entry*>;
  using Failures = std::vector<std::pair<Entry*, std::string>>;

  Name& name_of(const std::string& text) PERSEUS_REQUIRES(progress_lock);
  Name& find_or_make(const std::string& text) PERSEUS_REQUIRES(mutex_);
  void admit_collected() PERSEUS_REQUIRES(progress_lock);
  void admit(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  void announce(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  void on_request(int rank, Request&& request) PERSEUS_REQUIRES(progress_lock);
  void decide(Name* name, Entries* ready, Failures* failed) PERSEUS_REQUIRES(progress_lock);
  void put_in_order(Entries* ready) PERSEUS_REQUIRES(progress_lock);
  bool agree_at_once(const RoundContent& content, Entries* ready) PERSEUS_REQUIRES(progress_lock);
  void take_slot(Name* name) PERSEUS_REQUIRES(progress_lock);
  void free_slot(Name* name) PERSEUS_REQUIRES(progress_lock);
  // Appends what this rank gives to an operation that has become ready: its entry, or a stand-in.
  Entry* take_entry(Name* name, Entries* ready) PERSEUS_REQUIRES(progress_lock);
  void detach(Name* name) PERSEUS_REQUIRES(progress_lock);

  // ---- ranks that have joined (joining.cc) ----
  void on_join(int rank) PERSEUS_REQUIRES(progress_lock);
  void reannounce(bool all) PERSEUS_REQUIRES(progress_lock);
  void set_bits_for_others(std::vector<uint64_t>* bits) const PERSEUS_REQUIRES(progress_lock);
  void touch_what_joins_complete() PERSEUS_REQUIRES(progress_lock);
  bool all_announced_or_joined(const Name& name) const PERSEUS_REQUIRES(progress_lock);
  std::string find_mismatch_but_joined(const Name& name) const PERSEUS_REQUIRES(progress_lock);
  Entry* stand_in(Name* name) PERSEUS_REQUIRES(progress_lock);
  void finish_join(Entries* ready) PERSEUS_REQUIRES(progress_lock);

  // ---- deadlock.cc ----
  void announce_blocked(std::string* blob) const PERSEUS_REQUIRES(progress_lock);
  void end_deadlock(const std::vector<Blocked>& by_rank, Failures* failed) PERSEUS_REQUIRES(progress_lock);

  // ---- scheduling.cc ----
  void learn(const Entries& ready) PERSEUS_REQUIRES(progress_lock);
  void begin_schedule() PERSEUS_REQUIRES(progress_lock);
  void hold(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  void announce_leave(std::string* blob) PERSEUS_REQUIRES(progress_lock);
  void on_leave(int rank, const LeaveSchedule& message) PERSEUS_REQUIRES(progress_lock);

  const int size_;
  const int me_;
  const std::vector<int> ranks_;
  const std::function<Entry*()> make_entry_;
  const Awaited awaited_;
  bool learns_ PERSEUS_GUARDED_BY(progress_lock) = true;

  Mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Name>> names_ PERSEUS_GUARDED_BY(mutex_);
  std::vector<Entry*> submitted_ PERSEUS_GUARDED_BY(mutex_);
  std::string lookup_ PERSEUS_GUARDED_BY(mutex_);  // keeps its capacity
  bool closed_ PERSEUS_GUARDED_BY(mutex_) = false;
  std::atomic<bool> any_submitted_{false};
  std::atomic<size_t> submitted_bytes_{0};  // not yet collected; changed under mutex_

  std::vector<Entry*> collected_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Name*> slots_ PERSEUS_GUARDED_BY(progress_lock);  // null = free
  // The lowest one first, so that what is described anew in its old order keeps that order; the same on all ranks.
  std::priority_queue<int, std::vector<int>, std::greater<int>> free_slots_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<uint64_t> bits_ PERSEUS_GUARDED_BY(progress_lock);  // of this rank's pending entries with a slot
  std::vector<Entry*> unannounced_ PERSEUS_GUARDED_BY(progress_lock);
  // All that this rank has announced in the round in flight; empty if that was not requests alone.
  std::vector<Entry*> announced_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Name*> touched_ PERSEUS_GUARDED_BY(progress_lock);
  bool news_ PERSEUS_GUARDED_BY(progress_lock) = false;
  size_t news_bytes_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int pending_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  uint64_t applied_ PERSEUS_GUARDED_BY(progress_lock) = 0;    // rounds
  uint64_t snapshots_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // likewise, begun
  std::string blocked_ PERSEUS_GUARDED_BY(progress_lock);     // see set_blocked()

  // The same on all ranks but for join_entry_:
  std::vector<bool> joined_ PERSEUS_GUARDED_BY(progress_lock);
  int joined_count_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int last_joined_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // group rank
  // All have joined: what anybody still has pending is told in one more round.
  bool closing_ PERSEUS_GUARDED_BY(progress_lock) = false;
  Entry* join_entry_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;

  // What the schedule says has no bit and is not announced: an entry waits at its name until its batch is begun.
  Schedule schedule_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<size_t> missing_ PERSEUS_GUARDED_BY(progress_lock);   // of every batch: names not yet submitted here
  uint64_t begun_ PERSEUS_GUARDED_BY(progress_lock) = 0;            // batches, by this rank
  bool breaking_ PERSEUS_GUARDED_BY(progress_lock) = false;         // no more of them
  bool leave_announced_ PERSEUS_GUARDED_BY(progress_lock) = false;  // and the others are told
  // Ranks that have announced that they leave, and how many batches each of them has begun.
  int left_count_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  std::vector<uint64_t> begun_by_ PERSEUS_GUARDED_BY(progress_lock);  // by group rank, of those that have left
  std::vector<bool> left_ PERSEUS_GUARDED_BY(progress_lock);
  int64_t looked_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;
};

}  // namespace perseus
