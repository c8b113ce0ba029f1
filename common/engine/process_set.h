// A set of ranks that does collectives together: its negotiation, its rounds and its execution, on channels of its own,
// so that process sets never wait for each other.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/progress_lock.h"
#include "collective/nccl/communicator.h"
#include "control/negotiation.h"
#include "control/round.h"
#include "execution/execution.h"

namespace perseus {

class ProcessSet {
 public:
  // A peer's round is joined no later than this, whether or not we have anything to offer.
  static constexpr int64_t kJoinWithin = 5 * kMillisecond;
  using LinkTo = std::function<Link&(int rank, Channel channel)>;
  using MakeEntry = std::function<Entry*()>;
  // A group of all members that is preferred to one over links, for one stream; null = there is none.
  using Preferred = std::function<std::unique_ptr<Group>(uint32_t stream)>;

  ProcessSet(uint32_t id, std::vector<int> ranks, int my_rank, uint32_t epoch, const ExecutionSettings& settings,
             int64_t cycle_ns, LinkTo link_to, Preferred preferred, NcclOrder* nccl_order, MakeEntry make_entry,
             Execution::OutputsOf outputs_of, Negotiation::Awaited awaited);
  ~ProcessSet();

  // How many streams a process set with these settings may use.
  static int streams(const ExecutionSettings& settings);

  uint32_t id() const { return id_; }
  const std::vector<int>& ranks() const { return ranks_; }
  int index() const { return me_; }  // of this rank in ranks()
  // May this rank leave tensors on this GPU until they are reduced? What all ranks say decides. Any thread.
  bool keeps_on(int device, bool gradients);
  // Any thread, once something is submitted.
  bool spans_hosts() const { return levels().groups > 1; }
  Negotiation& negotiation() { return negotiation_; }
  const Negotiation& negotiation() const { return negotiation_; }
  Tuner& tuner() PERSEUS_REQUIRES(progress_lock) { return execution_.tuner(); }

  // One pass, at `now`. `eager`: somebody is waiting, so begin a round for whatever is new; else only for
  // `enough_bytes`, or when nothing is under way. Appends what finished and what failed.
  bool step(int64_t now, bool eager, size_t enough_bytes, std::vector<Entry*>* finished,
            std::vector<std::pair<Entry*, std::string>>* failed) PERSEUS_REQUIRES(progress_lock);
  // The transfer clock: throws Error(kTimeout), naming a rank, when the round or an operation under way has moved no
  // byte for the time limit. Every living rank answers rounds, whatever its script does, so waiting for a rank to
  // submit never gets here. Silence before `since_ns` proves nothing: this process itself did not run then.
  // `round_ends`: no rank that it needs has left.
  void check_progress(int64_t now, int64_t since_ns, bool round_ends) const PERSEUS_REQUIRES(progress_lock);
  // Work that needs driving, or news for the other members?
  bool busy() const PERSEUS_REQUIRES(progress_lock) { return moving() || negotiation_.has_news(); }
  // Has this rank submitted something that waits for its turn in a schedule?
  bool holds() const PERSEUS_REQUIRES(progress_lock) { return negotiation_.scheduled() && negotiation_.has_pending(); }
  // Does a peer wait for us to join its round?
  bool called() const PERSEUS_REQUIRES(progress_lock) { return called_ns_ != 0; }
  bool moving() const PERSEUS_REQUIRES(progress_lock) { return executing() || !round_.idle(); }
  bool executing() const PERSEUS_REQUIRES(progress_lock) { return execution_.busy() || aside_.busy(); }
  void find_under_way(std::vector<Execution::UnderWay>* found) const PERSEUS_REQUIRES(progress_lock) {
    execution_.find_under_way(found);
    aside_.find_under_way(found);
  }
  // Is something under way that no event of the Waker announces?
  bool polls() const PERSEUS_REQUIRES(progress_lock) { return execution_.polls() || aside_.polls(); }
  // Gives up everything queued and under way; each entry once.
  void abandon(std::vector<Entry*>* entries) PERSEUS_REQUIRES(progress_lock);
  // Joins no round any more, nor goes on with one that never ends: some rank has left, and what is pending has failed.
  // False if that was so already.
  bool end_rounds() PERSEUS_REQUIRES(progress_lock) { return !std::exchange(rounds_over_, true); }
  // Ranks whose part of the round under way is missing.
  std::vector<int> round_waits_for() const PERSEUS_REQUIRES(progress_lock) {
    std::vector<int> ranks;
    if (round_.idle()) return ranks;
    for (const int member : round_.waiting_for()) ranks.push_back(ranks_[static_cast<size_t>(member)]);
    return ranks;
  }
  bool round_idle() const PERSEUS_REQUIRES(progress_lock) { return round_.idle(); }
  // 1, 2, …; any thread.
  int64_t next_number() { return numbers_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void restart_numbers() { numbers_.store(0, std::memory_order_relaxed); }
  // What auto goes by; number 0 before it was needed.
  const Speeds& speeds() const PERSEUS_REQUIRES(progress_lock) { return automatic_.speeds(); }
  int outdated_measurement(int64_t now) const { return automatic_.outdated(now); }  // see AutoCodecs; any thread
  uint64_t rounds() const PERSEUS_REQUIRES(progress_lock) { return round_.number(); }
  uint64_t messages() const PERSEUS_REQUIRES(progress_lock) { return round_.messages(); }
  uint64_t buckets() const PERSEUS_REQUIRES(progress_lock) { return execution_.buckets() + aside_.buckets(); }
  size_t staging_bytes() const PERSEUS_REQUIRES(progress_lock) {
    return execution_.staging_bytes() + aside_.staging_bytes();
  }
  // No more rounds from now on but what peers have begun, or what ends a schedule (shutting down).
  void close() PERSEUS_REQUIRES(progress_lock) { closed_ = true; }

 private:
  Execution::MakeGroup groups_over(const Preferred& preferred);
  bool may_begin(int64_t now, bool eager, size_t enough_bytes) const PERSEUS_REQUIRES(progress_lock);
  bool joins(int64_t now) PERSEUS_REQUIRES(progress_lock);
  void check_round(int64_t now, int64_t since_ns) const PERSEUS_REQUIRES(progress_lock);
  void apply(std::vector<Entry*>* finished, std::vector<std::pair<Entry*, std::string>>* failed)
      PERSEUS_REQUIRES(progress_lock);
  void add_ready(Execution* execution, const Batch& batch, std::vector<Entry*>* finished)
      PERSEUS_REQUIRES(progress_lock);
  void keep_schedule(std::vector<Entry*>* finished) PERSEUS_REQUIRES(progress_lock);
  const Levels& levels() const;  // any thread, once something is submitted
  void end_schedule(std::vector<Entry*>* finished, std::vector<std::pair<Entry*, std::string>>* failed)
      PERSEUS_REQUIRES(progress_lock);

  // ---- whom NCCL joins ----
  struct Joined;
  ExecutionSettings with_nccl(ExecutionSettings settings) const;
  std::unique_ptr<Joined> joined(Level level, const ExecutionSettings& settings);
  Joined* joined_at(Level level);

  const uint32_t id_;
  const std::vector<int> ranks_;
  const int me_;
  const uint32_t epoch_;
  const int64_t cycle_ns_, timeout_ns_;
  const std::function<int64_t(int rank)> silent_ns_;
  const LinkTo link_to_;
  const Topology* const topology_;
  const GpuOperations gpu_operations_;
  mutable std::once_flag levels_known_;
  mutable Levels levels_;
  NcclOrder& nccl_order_;
  // Those of this host, and all. They outlive groups, which use them.
  std::unique_ptr<Joined> inside_, everywhere_;
  std::atomic<int> nccl_percent_;  // see Tuning
  Negotiation negotiation_;
  Round round_ PERSEUS_GUARDED_BY(progress_lock);
  AutoCodecs automatic_;
  Execution execution_ PERSEUS_GUARDED_BY(progress_lock);
  // While a schedule has execution_: what is agreed on in rounds, on a stream of its own.
  Execution aside_ PERSEUS_GUARDED_BY(progress_lock);
  bool closed_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool rounds_over_ PERSEUS_GUARDED_BY(progress_lock) = false;
  int64_t begun_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int64_t round_moved_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // when the round in flight last moved a byte
  int64_t called_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // since when a peer's round waits for us; 0 = none does
  std::vector<Entry*> ready_ PERSEUS_GUARDED_BY(progress_lock);
  std::atomic<int64_t> numbers_{0};
};

}  // namespace perseus
