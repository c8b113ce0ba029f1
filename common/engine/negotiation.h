// Which requests every rank of a group has submitted: names, slots, readiness bits, announcements and the order in
// which what is ready is executed. A replica: every rank holds the same slots and applies the same merged rounds in the
// same order. `submit` and `retire` may be called by any thread; the rest by the driver.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/request.h"
#include "engine/round.h"

namespace perseus {

// Can a rank that has joined be done without?
bool joined_may_miss(Kind kind);

// A tensor's name within a group, remembered as long as the group lives (unless transient).
struct Name {
  std::string text;
  bool in_flight = false;  // guarded by Negotiation's mutex
  // The driver's:
  Entry* entry = nullptr;  // submitted here and not yet ready
  int slot = -1;           // agreed on; then `agreed` describes it
  Description agreed;
  std::vector<Description> announced;  // by group rank, while not agreed
  std::vector<bool> announced_by;
  int announced_count = 0;
  int last = -1;            // group rank that announced last, where only one did in that round
  uint64_t last_round = 0;  // counted by apply()
  int64_t warned_ns = 0;
};

class Negotiation {
 public:
  // `me`: this rank's index in `ranks`. `make_entry` gives an empty entry, for what this rank stands in for.
  Negotiation(int me, std::vector<int> ranks, std::function<Entry*()> make_entry);

  // Registers the entry under `name`, unless that name is in flight already or the group takes no more.
  enum class Submitted { kYes, kDuplicate, kClosed };
  Submitted submit(const char* name, Entry* entry);
  // The entry's handle is about to be done: the name is free again.
  void retire(Entry* entry);

  // Takes over what was submitted since the last call; true when there was anything.
  bool collect();
  size_t submitted_bytes() const { return submitted_bytes_.load(std::memory_order_relaxed); }  // any thread
  bool has_submissions() const { return any_submitted_.load(std::memory_order_seq_cst); }      // any thread
  // Is there something that other ranks have not heard of?
  bool has_news() const { return news_; }
  size_t news_bytes() const { return news_bytes_; }
  bool has_pending() const { return pending_ > 0; }
  bool joined() const { return joined_[static_cast<size_t>(me_)]; }  // this rank has, as all ranks know

  // This rank's part of the next round.
  void snapshot(RoundContent* content);
  // Applies a finished round: `ready` receives this rank's entries in the agreed order of execution, `failed` those
  // that ranks disagree about, with the reason.
  void apply(const RoundContent& content, std::vector<Entry*>* ready,
             std::vector<std::pair<Entry*, std::string>>* failed);

  // All entries that are not ready. `close`: no more are taken from now on.
  void take_pending(bool close, std::vector<Entry*>* entries);
  // Appends "missing rank → names" facts of requests older than `age_ns` that were not reported since; announces
  // requests known by bits only, so that the next round tells who is missing. True when a round is needed for that.
  struct Stalled {
    std::string name;
    int64_t age_ns;
    std::vector<int> missing;  // global ranks
  };
  bool find_stalled(int64_t now, int64_t age_ns, int64_t again_ns, std::vector<Stalled>* stalled);

 private:
  using Entries = std::vector<Entry*>;
  using Failures = std::vector<std::pair<Entry*, std::string>>;

  Name& name_of(const std::string& text);
  void admit(Entry* entry);
  void announce(Entry* entry);
  void hear(int rank, const std::string& text, Description&& description);
  void decide(Name* name, Entries* ready, Failures* failed);
  void take_slot(Name* name);
  void free_slot(Name* name);
  Entry* take_entry(Name* name);

  // ---- ranks that have joined (joining.cc) ----
  void hear_join(int rank);
  void reannounce(bool all);
  void say_ready_for_others(std::vector<uint64_t>* bits) const;
  void touch_what_joins_complete();
  bool all_announced_or_joined(const Name& name) const;
  std::string find_mismatch_but_joined(const Name& name) const;
  Entry* stand_in(Name* name);
  void finish_join(Entries* ready);

  const int size_;
  const int me_;
  const std::vector<int> ranks_;
  const std::function<Entry*()> make_entry_;

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

  // The same on all ranks but for join_entry_:
  std::vector<bool> joined_;
  int joined_count_ = 0;
  int last_joined_ = 0;   // group rank
  bool closing_ = false;  // all have joined: what anybody still has pending is told in one more round
  Entry* join_entry_ = nullptr;
};

}  // namespace perseus
