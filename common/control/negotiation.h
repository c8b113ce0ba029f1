// Which requests every rank of a group has submitted: names, slots, readiness bits, announcements and the order in
// which what is ready is executed. A replica: every rank holds the same slots and applies the same merged rounds in the
// same order. Any thread may call `submit` and `retire`; the rest is called with the progress lock held.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
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
  bool in_flight = false;  // guarded by Negotiation's mutex
  // The rest belongs to the holder of the progress lock:
  Entry* entry = nullptr;  // submitted here and not yet ready
  int slot = -1;           // agreed on; then `agreed` describes it
  Description agreed;
  std::vector<Description> announced;  // by group rank, while not agreed
  std::vector<bool> announced_by;
  int announced_count = 0;
  int last = -1;            // group rank that announced last, where only one did in that round
  uint64_t last_round = 0;  // counted by apply()
  int64_t warned_ns = 0;
  // Of the schedule:
  uint64_t seen_in_step = 0;  // the last one; 0 = never
  bool expected = false;      // in every step
  int batch = -1;             // while the schedule is frozen
};

class Negotiation {
 public:
  // Does a caller wait for this entry?
  using Awaited = std::function<bool(const Entry&)>;
  // `me`: this rank's index in `ranks`. `make_entry` gives an empty entry, for what this rank stands in for. `awaited`:
  // what repeats itself is to be scheduled; else null.
  Negotiation(int me, std::vector<int> ranks, std::function<Entry*()> make_entry, Awaited awaited = nullptr);

  // Registers the entry under `name`, unless that name is in flight already or the group takes no more.
  enum class Submitted { kYes, kDuplicate, kClosed };
  Submitted submit(const char* name, Entry* entry);
  // The entry's handle is about to be done: the name is free again.
  void retire(Entry* entry);

  // Takes over what was submitted since the last call; true when there was anything.
  bool collect();
  size_t submitted_bytes() const { return submitted_bytes_.load(std::memory_order_relaxed); }  // any thread
  bool has_submissions() const { return any_submitted_.load(std::memory_order_seq_cst); }      // any thread
  // Is there something that other ranks do not know yet?
  bool has_news() const { return news_; }
  size_t news_bytes() const { return news_bytes_; }
  bool has_pending() const { return pending_ > 0; }
  // Must other ranks learn of it, whatever else is under way?
  bool has_urgent_news() const { return breaking_ && !leave_announced_; }
  bool joined() const { return joined_[static_cast<size_t>(me_)]; }  // this rank has, as all ranks know

  // This rank's part of the next round.
  void snapshot(RoundContent* content);
  // Applies a finished round: `ready` receives this rank's entries in the agreed order of execution, `failed` those
  // that ranks disagree about, with the reason.
  void apply(const RoundContent& content, std::vector<Entry*>* ready,
             std::vector<std::pair<Entry*, std::string>>* failed);

  // ---- a frozen schedule (scheduling.cc) ----

  // This long after the last submission a caller that waits for something whose turn has not come waits in vain.
  static constexpr int64_t kPatience = 20 * kMillisecond;
  bool scheduled() const { return schedule_.frozen(); }
  // May what becomes ready from now on make a schedule? The same on all ranks for the same round.
  void learn_order(bool on) { learns_ = on; }
  // The next batch, once this rank has submitted all of it: its entries in the order of execution.
  bool begin_batch(Batch* batch, std::vector<Entry*>* entries);
  // Looks for callers that wait in vain.
  void watch_schedule(int64_t now);
  // This rank begins no further batch and tells all others, who do the same.
  void break_schedule();
  // Has every rank said how many batches it has begun? Then begun() has them, by group rank.
  bool broken() const { return left_count_ == size_; }
  const std::vector<uint64_t>& begun() const { return begun_by_; }
  // Once broken: the next batch that others have begun, with entries that stand in for this rank's.
  bool stand_in_batch(Batch* batch, std::vector<Entry*>* entries);
  // The schedule is over. What this rank has submitted and no rank has finished is agreed on in rounds again.
  void thaw(const std::vector<Entry*>& rolled_back);

  // ---- deadlocks (deadlock.cc) ----

  // What this rank's callers wait for, as others are to be told, while none of them can submit anything more; "" when
  // one may. Where all ranks are blocked at once, what they have submitted fails on all.
  void set_blocked(const std::string& waits_for);
  void for_each_pending(const std::function<void(const Entry&)>& look);

  // All entries that are not ready. `close`: no more are taken from now on.
  void take_pending(bool close, std::vector<Entry*>* entries);
  // Appends all requests older than `age_ns`, with the ranks that have not submitted them; announces those known by
  // bits only, so that the next round tells who is missing.
  struct Stalled {
    Name* name;  // whose warned_ns is the caller's
    int64_t age_ns;
    std::vector<int> missing;  // global ranks
  };
  void find_stalled(int64_t now, int64_t age_ns, std::vector<Stalled>* stalled);

 private:
  using Entries = std::vector<Entry*>;
  using Failures = std::vector<std::pair<Entry*, std::string>>;

  Name& name_of(const std::string& text);
  void admit(Entry* entry);
  void announce(Entry* entry);
  void on_request(int rank, Request&& request);
  void decide(Name* name, Entries* ready, Failures* failed);
  void take_slot(Name* name);
  void free_slot(Name* name);
  Entry* take_entry(Name* name);

  // ---- ranks that have joined (joining.cc) ----
  void on_join(int rank);
  void reannounce(bool all);
  void set_bits_for_others(std::vector<uint64_t>* bits) const;
  void touch_what_joins_complete();
  bool all_announced_or_joined(const Name& name) const;
  std::string find_mismatch_but_joined(const Name& name) const;
  Entry* stand_in(Name* name);
  void finish_join(Entries* ready);

  // ---- deadlock.cc ----
  void announce_blocked(std::string* blob) const;
  void end_deadlock(const std::vector<Blocked>& by_rank, Failures* failed);

  // ---- scheduling.cc ----
  void learn(const Entries& ready);
  void begin_schedule();
  void hold(Entry* entry);
  void announce_leave(std::string* blob);
  void on_leave(int rank, const LeaveSchedule& message);

  const int size_;
  const int me_;
  const std::vector<int> ranks_;
  const std::function<Entry*()> make_entry_;
  const Awaited awaited_;
  bool learns_ = true;

  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Name>> names_;  // guarded by mutex_
  std::vector<Entry*> submitted_;                                 // guarded by mutex_
  std::string lookup_;                                            // guarded by mutex_; keeps its capacity
  bool closed_ = false;                                           // guarded by mutex_
  std::atomic<bool> any_submitted_{false};
  std::atomic<size_t> submitted_bytes_{0};  // not yet collected; changed under mutex_

  std::vector<Entry*> collected_;
  std::vector<Name*> slots_;     // null = free
  std::vector<int> free_slots_;  // most recently freed last; the same on all ranks
  std::vector<uint64_t> bits_;   // of this rank's pending entries with a slot
  std::vector<Entry*> unannounced_;
  std::vector<Name*> touched_;
  bool news_ = false;
  size_t news_bytes_ = 0;
  int pending_ = 0;
  uint64_t applied_ = 0;  // rounds
  std::string blocked_;   // see set_blocked()

  // The same on all ranks but for join_entry_:
  std::vector<bool> joined_;
  int joined_count_ = 0;
  int last_joined_ = 0;   // group rank
  bool closing_ = false;  // all have joined: what anybody still has pending is told in one more round
  Entry* join_entry_ = nullptr;

  // What the schedule says has no bit and is not announced: an entry waits at its name until its batch is begun.
  Schedule schedule_;
  std::vector<size_t> missing_;     // of every batch: names not yet submitted here
  uint64_t begun_ = 0;              // batches, by this rank
  bool breaking_ = false;           // no more of them
  bool leave_announced_ = false;    // and the others are told
  int left_count_ = 0;              // ranks that have announced that they leave, and how many they have begun
  std::vector<uint64_t> begun_by_;  // by group rank, of those that have left
  std::vector<bool> left_;
  int64_t looked_ns_ = 0;
};

}  // namespace perseus
