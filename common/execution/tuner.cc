// Steps, trials and the choice.
#include "execution/tuner.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "base/clock.h"
#include "base/error.h"

namespace perseus {
namespace {

// Steps before the first trial: descriptions are exchanged, connections made, buffers touched for the first time.
constexpr uint64_t kWarmUp = 2;
constexpr size_t kTrialsEach = 2;  // the better one counts: what else the machine did meanwhile makes steps longer only
// Where a step has less than this, nothing is to be gained, and a bucket of less costs more than it overlaps.
constexpr size_t kLeastStep = 4 * 1024 * 1024, kLeastBucket = 1024 * 1024;
// What a choice must gain to be more than chance.
constexpr double kWorthChanging = 0.95;

std::string text_of(const Tuning& tuning) {
  std::string text =
      "buckets of " + std::to_string(tuning.bucket_bytes) + " bytes on " + std::to_string(tuning.streams) + " streams";
  if (tuning.nccl_percent > 0) text += ", " + std::to_string(tuning.nccl_percent) + " % of them by NCCL between hosts";
  return text;
}

std::string megabytes_per_second(size_t bytes, uint32_t microseconds) {
  return std::to_string(static_cast<uint64_t>(static_cast<double>(bytes) / std::max(microseconds, 1U))) + " MB/s";
}

}  // namespace

bool operator==(const Tuning& a, const Tuning& b) {
  return a.bucket_bytes == b.bucket_bytes && a.streams == b.streams && a.nccl_percent == b.nccl_percent;
}

std::string TunerSettings::text() const {
  return text_of(start) + ", 1/" + std::to_string(parts) + " up to " + std::to_string(most_bytes) +
         (buckets ? ", tries buckets" : "") + (streams ? ", tries streams" : "") + (nccl ? ", tries NCCL" : "") +
         (shares ? " and shares" : "") + (everywhere ? " everywhere" : "");
}

TunerSettings tuner_settings(const Config& config) {
  TunerSettings settings;
  settings.start.bucket_bytes = static_cast<size_t>(config.integer(Var::kFusionThreshold));
  settings.start.streams = static_cast<int>(config.integer(Var::kStreams));
  settings.parts = config.integer(Var::kFusionParts);
  if (config.given(Var::kFusionThreshold)) settings.most_bytes = settings.start.bucket_bytes;
  bool own_buckets = config.given(Var::kFusionThreshold) || settings.parts > 0;
  bool own_streams = config.given(Var::kStreams), replays = config.is_set(Var::kTunerReplay);
  if (replays) {
    std::error_code none;
    if (std::filesystem::equivalent(config.text(Var::kTunerReplay), config.text(Var::kAutotuneLog), none))
      fail(ErrorKind::kInvalidArgument, "[tuner] PERSEUS_TUNER_REPLAY='" + config.text(Var::kTunerReplay) +
                                            "' is also HOROVOD_AUTOTUNE_LOG, which a new job begins anew: write the "
                                            "log to another file, or none");
    const Tuning replayed = read_tuner_log(config.text(Var::kTunerReplay));
    if (!own_buckets) settings.start.bucket_bytes = replayed.bucket_bytes;
    if (!own_streams) settings.start.streams = replayed.streams;
    settings.start.nccl_percent = replayed.nccl_percent;
    own_buckets = own_streams = true;
  }
  const auto autotune = config.choice<Autotune>();
  settings.buckets = autotune != Autotune::kOff && !own_buckets;
  settings.streams = autotune != Autotune::kOff && !own_streams && !config.flag(Var::kStreamTuningDisable);
  settings.nccl = autotune != Autotune::kOff && !replays && config.choice<GpuOperations>() == GpuOperations::kAuto;
  settings.shares = settings.nccl && config.flag(Var::kNcclEnable);
  settings.everywhere = autotune == Autotune::kOn;
  return settings;
}

int Tuner::most_streams() const { return settings_.streams ? 2 * settings_.start.streams : settings_.start.streams; }

void Tuner::agreed(const std::vector<Entry*>& ready, const Conditions& conditions, int64_t now_ns) {
  for (const Entry* entry : ready) {
    const Description& d = entry->description;
    if (!d.times.empty()) on_times(d.times, conditions);
    // Of an allgather (of a sparse gradient) every rank knows its own rows alone.
    if (!d.gradient || d.kind != Kind::kAllreduce || state_ == State::kSettled) continue;
    if (begins_step(*entry->text)) begin_step(conditions, now_ns);
    for (const TensorDescription& tensor : d.tensors) bytes_ += tensor.bytes();
    if (step_ > 1 && bytes_ > step_bytes_ && (state_ == State::kCounting || state_ == State::kTrying))
      settle(candidates_[0], "steps differ in what they move");
  }
}

// If another gradient comes again before the first one does, what came before it was no step of the training that goes
// on, and the first step begins once more. Where steps differ in their order, it ends there the second time.
bool Tuner::begins_step(const std::string& name) {
  if (step_ > 1) return name == first_;
  const bool again = !names_.insert(name).second;
  if (!again && !first_.empty()) return false;
  if (again && name != first_ && !begun_again_) {
    begun_again_ = true;
    step_ = 0;
    names_ = {name};
  }
  first_ = name;
  return true;
}

void Tuner::begin_step(const Conditions& conditions, int64_t now_ns) {
  ++step_;
  if (step_ == 2) {
    names_.clear();
    step_bytes_ = bytes_;
    in_parts_ = settings_.parts > 0;
    if (in_parts_)
      now_.bucket_bytes = std::min(settings_.most_bytes, step_bytes_ / static_cast<size_t>(settings_.parts) + 1);
    const bool nccl = settings_.nccl && conditions.nccl;
    if (!settings_.buckets && !settings_.streams && !nccl) settle(now_, "nothing is left to choose");
    else if (!settings_.everywhere && !conditions.between_hosts) settle(now_, "all ranks share memory");
    else if (!settings_.everywhere && step_bytes_ < kLeastStep) settle(now_, "a step moves too little");
    else choose_candidates(conditions);
  } else if (step_ > 2 && bytes_ != step_bytes_ && state_ != State::kTelling) {
    settle(candidates_[0], "steps differ in what they move");
  }
  if (step_ > kWarmUp && (state_ == State::kCounting || state_ == State::kTrying)) next_trial(now_ns);
  bytes_ = 0;
}

void Tuner::choose_candidates(const Conditions& conditions) {
  candidates_.push_back(now_);
  if (settings_.streams) {
    if (now_.streams > 1) candidates_.push_back({now_.bucket_bytes, now_.streams / 2});
    candidates_.push_back({now_.bucket_bytes, 2 * now_.streams});
  }
  const size_t most = std::min({now_.bucket_bytes, conditions.largest, step_bytes_});
  for (const size_t bytes : {most / 2, most / 4})
    if (settings_.buckets && bytes >= kLeastBucket) candidates_.push_back({bytes, now_.streams});
  if (settings_.nccl && conditions.nccl) candidates_.push_back({now_.bucket_bytes, now_.streams, 100});
}

// Candidates take turns, so that what slows the machine for a while does not meet one alone. Gradients of this step
// have been submitted with what held before it: as they are left on GPUs for NCCL then, or not, another share of NCCL's
// is measured from the next step on.
void Tuner::next_trial(int64_t now_ns) {
  if (state_ == State::kTrying)
    trials_.back().microseconds =
        static_cast<uint32_t>(std::clamp<int64_t>((done_ns_ - begun_ns_) / kMicrosecond, 1, UINT32_MAX));
  if (candidates_.size() == 1) return settle(now_, "nothing else is worth trying");
  if (trials_.size() == kTrialsEach * candidates_.size()) {
    state_ = State::kTelling;
    now_ = candidates_[0];
    has_times_ = true;
    return;
  }
  const Tuning next = candidates_[trials_.size() % candidates_.size()];
  state_ = next.nccl_percent == now_.nccl_percent ? State::kTrying : State::kCounting;
  now_ = next;
  if (state_ == State::kCounting) return;
  trials_.push_back({step_, now_, 0});
  begun_ns_ = done_ns_ = now_ns;
}

std::vector<uint32_t> Tuner::take_times() {
  has_times_ = false;
  std::vector<uint32_t> times;
  for (const Trial& trial : trials_) times.push_back(trial.microseconds);
  return times;
}

// After a trial of NCCL all ranks know alike whether it has joined them.
void Tuner::on_times(const std::vector<uint32_t>& times, const Conditions& conditions) {
  if (state_ != State::kTelling || times.size() != trials_.size()) return;
  std::vector<uint32_t> best(candidates_.size(), UINT32_MAX);
  for (size_t i = 0; i < times.size(); ++i) {
    trials_[i].microseconds = times[i];
    if (trials_[i].tuning.nccl_percent > 0 && !conditions.nccl) continue;
    uint32_t& mine = best[i % best.size()];
    mine = std::min(mine, times[i]);
  }
  const size_t fastest = static_cast<size_t>(std::min_element(best.begin(), best.end()) - best.begin());
  const bool change = best[fastest] < kWorthChanging * best[0];
  if (try_share(candidates_[change ? fastest : 0], best)) return;
  const std::string began_with = megabytes_per_second(step_bytes_, best[0]);
  if (change)
    settle(candidates_[fastest], megabytes_per_second(step_bytes_, best[fastest]) + " instead of " + began_with);
  else settle(candidates_[0], "nothing that was tried is faster than " + began_with + " by 5 %");
}

// Both kinds of link at once, each with as much as it moves in the same time; once both have been measured alone.
bool Tuner::try_share(const Tuning& found, const std::vector<uint32_t>& best) {
  if (!settings_.shares || !earlier_.empty() || candidates_.back().nccl_percent == 0 || best.back() == UINT32_MAX)
    return false;
  const double without = best[0], with = best.back();
  Tuning both = found;
  both.nccl_percent = std::clamp(static_cast<int>(100 * without / (without + with) + 0.5), 1, 99);
  candidates_ = {found, both};
  earlier_ = std::move(trials_);
  trials_.clear();
  now_ = found;
  state_ = State::kCounting;
  return true;
}

void Tuner::settle(const Tuning& tuning, const std::string& why) {
  state_ = State::kSettled;
  now_ = tuning;
  has_times_ = false;
  has_decision_ = true;
  why_ = text_of(tuning) + ": " + why;
}

Tuner::Decision Tuner::take_decision() {
  has_decision_ = false;
  std::vector<Trial> all = std::move(earlier_);
  all.insert(all.end(), trials_.begin(), trials_.end());
  return Decision{std::move(all), now_, step_bytes_, why_};
}

}  // namespace perseus
