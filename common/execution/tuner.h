// How large buckets are, on how many streams they go, and how much NCCL sums between hosts, for the gradients of one
// group. Within its first steps a few settings near the start values are tried, each in two steps; all ranks then tell
// each other how long theirs took, in one negotiation round, and keep the best. A replica: steps are counted by what
// rounds make ready, so all ranks change settings in the same place, and all decide from the same numbers. Results
// depend on it only where NCCL is tried, which sums in an order of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/config.h"
#include "base/progress_lock.h"
#include "request/request.h"

namespace perseus {

struct Tuning {
  size_t bucket_bytes = 128 * 1024 * 1024;
  int streams = 4;
  int nccl_percent = 0;  // of the gradients that are on GPUs, by their bytes
};
bool operator==(const Tuning& a, const Tuning& b);

struct TunerSettings {
  Tuning start;
  int64_t parts = 0;  // PERSEUS_ALLREDUCE_FUSION: a bucket holds 1/parts of a step's gradients; 0 = as `start`
  size_t most_bytes = SIZE_MAX;  // of such a bucket: HOROVOD_FUSION_THRESHOLD, where that is given, too
  bool buckets = false, streams = false, nccl = false;  // what may be tried
  bool shares = false;                                  // NCCL and our own exchange at once, too
  bool everywhere = false;                              // also where all ranks share memory, and for little data

  // All ranks must have the same.
  std::string text() const;
};
// Throws Error(kInvalidArgument) when PERSEUS_TUNER_REPLAY names a file that says nothing.
TunerSettings tuner_settings(const Config& config);

class Tuner {
 public:
  static constexpr const char* kName = "perseus.tuner";  // of the request that tells
  struct Trial {
    uint64_t step;  // from 1
    Tuning tuning;
    uint32_t microseconds;  // of the slowest rank; 0 = not measured
  };
  struct Decision {
    std::vector<Trial> trials;
    Tuning chosen;
    uint64_t step_bytes;
    std::string why;
  };

  explicit Tuner(const TunerSettings& settings) : settings_(settings), now_(settings.start) {}

  // What all ranks know of their group.
  struct Conditions {
    bool between_hosts = true;  // else settings hardly matter
    bool nccl = false;          // may sum between them, or has been tried and does
    size_t largest = SIZE_MAX;  // no bucket is larger anyway
  };

  // What holds for what a round has made ready, whenever that is put into buckets.
  struct InForce {
    Tuning tuning;  // the streams in use are the first ones
    bool in_parts;  // a bucket holds 1/parts of a step
    // Of a bucket whose parts would be fused up to `usual`, were nothing asked for.
    size_t bucket_bytes(size_t usual) const {
      return in_parts ? tuning.bucket_bytes : std::min(tuning.bucket_bytes, usual);
    }
  };

  InForce in_force() const PERSEUS_REQUIRES(progress_lock) { return {now_, in_parts_}; }
  int most_streams() const;
  // What a round has made ready, as soon as the round is over: then in_force() is what holds for it.
  void agreed(const std::vector<Entry*>& ready, const Conditions& conditions, int64_t now_ns)
      PERSEUS_REQUIRES(progress_lock);
  // Between its first step and its decision? The same on all ranks after the same round.
  bool trying() const PERSEUS_REQUIRES(progress_lock) { return !first_.empty() && state_ != State::kSettled; }
  // All gradients of a step are ready: those of the next one may be submitted otherwise. (What changes within a step
  // could become ready in another order, and the step would seem to begin elsewhere.)
  bool between_steps() const PERSEUS_REQUIRES(progress_lock) {
    return state_ == State::kSettled || bytes_ == step_bytes_;
  }
  // Some of a step's gradients are done.
  bool measuring() const PERSEUS_REQUIRES(progress_lock) { return state_ == State::kTrying; }
  void done(int64_t now_ns) PERSEUS_REQUIRES(progress_lock) { done_ns_ = now_ns; }

  // This rank's times, once they are due: to be submitted as a request of the name above.
  bool has_times() const PERSEUS_REQUIRES(progress_lock) { return has_times_; }
  std::vector<uint32_t> take_times() PERSEUS_REQUIRES(progress_lock);
  // Once, when it is settled.
  bool has_decision() const PERSEUS_REQUIRES(progress_lock) { return has_decision_; }
  Decision take_decision() PERSEUS_REQUIRES(progress_lock);

 private:
  enum class State { kCounting, kTrying, kTelling, kSettled };

  bool begins_step(const std::string& name) PERSEUS_REQUIRES(progress_lock);
  void begin_step(const Conditions& conditions, int64_t now_ns) PERSEUS_REQUIRES(progress_lock);
  void choose_candidates(const Conditions& conditions) PERSEUS_REQUIRES(progress_lock);
  void next_trial(int64_t now_ns) PERSEUS_REQUIRES(progress_lock);
  void on_times(const std::vector<uint32_t>& times, const Conditions& conditions) PERSEUS_REQUIRES(progress_lock);
  bool try_share(const Tuning& found, const std::vector<uint32_t>& best) PERSEUS_REQUIRES(progress_lock);
  void settle(const Tuning& tuning, const std::string& why) PERSEUS_REQUIRES(progress_lock);

  const TunerSettings settings_;
  Tuning now_ PERSEUS_GUARDED_BY(progress_lock);
  State state_ PERSEUS_GUARDED_BY(progress_lock) = State::kCounting;
  std::string first_ PERSEUS_GUARDED_BY(progress_lock);  // the gradient that became ready first: with it a step begins
  std::unordered_set<std::string> names_ PERSEUS_GUARDED_BY(progress_lock);  // of the first step so far
  bool begun_again_ PERSEUS_GUARDED_BY(progress_lock) = false;               // the first step
  uint64_t step_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  bool in_parts_ PERSEUS_GUARDED_BY(progress_lock) = false;           // see InForce
  size_t bytes_ PERSEUS_GUARDED_BY(progress_lock) = 0;                // of this step so far
  size_t step_bytes_ PERSEUS_GUARDED_BY(progress_lock) = 0;           // of the first one
  std::vector<Tuning> candidates_ PERSEUS_GUARDED_BY(progress_lock);  // [0] is what the group began with
  std::vector<Trial> trials_ PERSEUS_GUARDED_BY(progress_lock);       // of these candidates
  std::vector<Trial> earlier_ PERSEUS_GUARDED_BY(progress_lock);      // of candidates before them
  int64_t begun_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;            // of the step under way
  int64_t done_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;             // likewise
  bool has_times_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool has_decision_ PERSEUS_GUARDED_BY(progress_lock) = false;
  std::string why_ PERSEUS_GUARDED_BY(progress_lock);
};

// Lines of PERSEUS_AUTOTUNE_LOG, with those of the header first, and what PERSEUS_TUNER_REPLAY finds in them.
std::string tuner_log_header();
std::string tuner_log_lines(const Tuner::Decision& decision);
// Throws Error(kInvalidArgument) with the file's name, the line and what was expected.
Tuning read_tuner_log(const std::string& path);

}  // namespace perseus
