// Steps, trials and the choice.
#include "execution/tuner.h"

#include <algorithm>
#include <cstdio>

#include "base/clock.h"

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
  return "buckets of " + std::to_string(tuning.bucket_bytes) + " bytes on " + std::to_string(tuning.streams) +
         " streams";
}

std::string megabytes_per_second(size_t bytes, uint32_t microseconds) {
  return std::to_string(static_cast<uint64_t>(static_cast<double>(bytes) / std::max(microseconds, 1U))) + " MB/s";
}

}  // namespace

bool operator==(const Tuning& a, const Tuning& b) { return a.bucket_bytes == b.bucket_bytes && a.streams == b.streams; }

std::string TunerSettings::text() const {
  return text_of(start) + ", 1/" + std::to_string(parts) + " up to " + std::to_string(most_bytes) +
         (buckets ? ", tries buckets" : "") + (streams ? ", tries streams" : "") + (everywhere ? " everywhere" : "");
}

TunerSettings tuner_settings(const Config& config) {
  TunerSettings settings;
  settings.start.bucket_bytes = static_cast<size_t>(config.integer(Var::kFusionThreshold));
  settings.start.streams = static_cast<int>(config.integer(Var::kStreams));
  settings.parts = config.integer(Var::kFusionParts);
  if (config.given(Var::kFusionThreshold)) settings.most_bytes = settings.start.bucket_bytes;
  bool own_buckets = config.given(Var::kFusionThreshold) || settings.parts > 0;
  bool own_streams = config.given(Var::kStreams);
  if (config.is_set(Var::kTunerReplay)) {
    const Tuning replayed = read_tuner_log(config.text(Var::kTunerReplay));
    if (!own_buckets) settings.start.bucket_bytes = replayed.bucket_bytes;
    if (!own_streams) settings.start.streams = replayed.streams;
    own_buckets = own_streams = true;
  }
  const auto autotune = config.choice<Autotune>();
  settings.buckets = autotune != Autotune::kOff && !own_buckets;
  settings.streams = autotune != Autotune::kOff && !own_streams && !config.flag(Var::kStreamTuningDisable);
  settings.everywhere = autotune == Autotune::kOn;
  return settings;
}

int Tuner::most_streams() const { return settings_.streams ? 2 * settings_.start.streams : settings_.start.streams; }

void Tuner::agreed(const std::vector<Entry*>& ready, bool worth_it, size_t largest, int64_t now_ns) {
  for (const Entry* entry : ready) {
    const Description& d = entry->description;
    if (!d.times.empty()) on_times(d.times);
    if (!d.gradient || state_ == State::kSettled) continue;
    if (first_.empty()) first_ = *entry->text;
    if (*entry->text == first_) begin_step(worth_it, largest, now_ns);
    for (const TensorDescription& tensor : d.tensors) bytes_ += tensor.bytes();
  }
}

void Tuner::begin_step(bool worth_it, size_t largest, int64_t now_ns) {
  ++step_;
  if (step_ == 2) {
    step_bytes_ = bytes_;
    in_parts_ = settings_.parts > 0;
    if (in_parts_)
      now_.bucket_bytes = std::min(settings_.most_bytes, step_bytes_ / static_cast<size_t>(settings_.parts) + 1);
    if (!settings_.buckets && !settings_.streams) settle(now_, "nothing is left to choose");
    else if (!settings_.everywhere && !worth_it) settle(now_, "all ranks share memory");
    else if (!settings_.everywhere && step_bytes_ < kLeastStep) settle(now_, "a step moves too little");
    else choose_candidates(largest);
  } else if (step_ > 2 && bytes_ != step_bytes_ && state_ != State::kTelling) {
    settle(candidates_[0], "steps differ in what they move");
  }
  if (step_ > kWarmUp && (state_ == State::kCounting || state_ == State::kTrying)) next_trial(now_ns);
  bytes_ = 0;
}

void Tuner::choose_candidates(size_t largest) {
  candidates_.push_back(now_);
  if (settings_.streams) {
    if (now_.streams > 1) candidates_.push_back({now_.bucket_bytes, now_.streams / 2});
    candidates_.push_back({now_.bucket_bytes, 2 * now_.streams});
  }
  const size_t most = std::min({now_.bucket_bytes, largest, step_bytes_});
  for (const size_t bytes : {most / 2, most / 4})
    if (settings_.buckets && bytes >= kLeastBucket) candidates_.push_back({bytes, now_.streams});
}

// Candidates take turns, so that what slows the machine for a while does not meet one alone.
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
  state_ = State::kTrying;
  now_ = candidates_[trials_.size() % candidates_.size()];
  trials_.push_back({step_, now_, 0});
  begun_ns_ = done_ns_ = now_ns;
}

std::vector<uint32_t> Tuner::take_times() {
  has_times_ = false;
  std::vector<uint32_t> times;
  for (const Trial& trial : trials_) times.push_back(trial.microseconds);
  return times;
}

void Tuner::on_times(const std::vector<uint32_t>& times) {
  if (state_ != State::kTelling || times.size() != trials_.size()) return;
  std::vector<uint32_t> best(candidates_.size(), UINT32_MAX);
  for (size_t i = 0; i < times.size(); ++i) {
    trials_[i].microseconds = times[i];
    uint32_t& mine = best[i % best.size()];
    mine = std::min(mine, times[i]);
  }
  const size_t fastest = static_cast<size_t>(std::min_element(best.begin(), best.end()) - best.begin());
  const bool change = best[fastest] < kWorthChanging * best[0];
  const std::string began_with = megabytes_per_second(step_bytes_, best[0]);
  if (change)
    settle(candidates_[fastest], megabytes_per_second(step_bytes_, best[fastest]) + " instead of " + began_with);
  else settle(candidates_[0], "nothing that was tried is faster than " + began_with + " by 5 %");
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
  return Decision{trials_, now_, step_bytes_, why_};
}

}  // namespace perseus
