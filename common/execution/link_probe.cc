// Small exchanges for the latency, large ones for the bytes.
#include "execution/link_probe.h"

#include <algorithm>

#include "base/clock.h"

namespace perseus {
namespace {

constexpr size_t kTiny = 64;
constexpr int kTinyTimes = 9;
// The first one, in which connections are made and TCP's window opens, does not count.
constexpr size_t kFirst = 512 * 1024;
// So long that what a link passes at once after a pause does not matter, but not for ever on a slow one.
constexpr double kLongEnough = 0.03;
constexpr size_t kLeast = 64 * 1024, kMost = 16 * 1024 * 1024;
constexpr int kTimes = 4;

}  // namespace

LinkProbe::LinkProbe(const Levels& levels, double seconds_per_byte, std::function<std::vector<double>()> also)
    : levels_(levels),
      across_(static_cast<int>(levels.across.size()) == levels.members ? Level::kAll : Level::kAcross),
      known_(seconds_per_byte),
      also_(std::move(also)) {}

// By a rank in one of the large exchanges.
double LinkProbe::sent_bytes() const {
  const double members = static_cast<double>(levels_.groups);
  return 2 * (members - 1) / members * static_cast<double>(large_);
}

void LinkProbe::plan_across(size_t bytes) {
  if (memory_.size() < bytes) memory_.resize(bytes);  // zeros: their sum is fast everywhere
  plan_.clear();
  plan_.collective = Collective::kAllreduce;
  plan_.reduction = kernels::ReduceSpec();
  plan_.reduction.dtype = DType::kFloat32;
  plan_.pieces.push_back(Piece{memory_.data(), memory_.data(), bytes});
}

void LinkProbe::plan_agreement() {
  plan_.clear();
  plan_.collective = Collective::kAllreduce;
  plan_.reduction = kernels::ReduceSpec();
  plan_.reduction.dtype = DType::kFloat64;
  plan_.reduction.op = ReduceOp::kMax;
  Byte* const memory = reinterpret_cast<Byte*>(values_.data());
  plan_.pieces.push_back(Piece{memory, memory, values_.size() * sizeof(double)});
}

void LinkProbe::choose_size(double seconds_of_first) {
  const double wanted = kLongEnough / std::max(seconds_of_first, 1e-9) * static_cast<double>(kFirst);
  const double least = kLeast, most = kMost;
  large_ = static_cast<size_t>(std::min(std::max(wanted, least), most)) / kLeast * kLeast;
}

// The next exchange of this stage; false after so many, when each one's seconds are among the values. They are zero
// where a rank carries no shard.
bool LinkProbe::across(Step* step, size_t bytes, int times) {
  const int64_t now = now_ns();
  if (!levels_.carries()) {
    values_.insert(values_.end(), static_cast<size_t>(times), 0.0);
    return false;
  }
  if (done_ > 0) values_.push_back(static_cast<double>(now - begun_ns_) * 1e-9);
  if (done_ == times) {
    done_ = 0;
    return false;
  }
  ++done_;
  plan_across(bytes);
  step->level = across_;
  begun_ns_ = now;
  return true;
}

bool LinkProbe::next(Step* step) {
  step->plan = &plan_;
  step->level = Level::kAll;
  step->sizes_vary = false;
  if (stage_ == Stage::kSize) {
    if (known_ <= 0 && across(step, kFirst, 2)) return true;
    stage_ = Stage::kLatency;
    if (known_ <= 0) {
      plan_agreement();
      return true;
    }
  }
  if (stage_ == Stage::kLatency && done_ == 0) {
    if (known_ <= 0) choose_size(values_[1]);
    values_.clear();
  }
  if (stage_ == Stage::kLatency) {
    if (across(step, kTiny, kTinyTimes)) return true;
    stage_ = Stage::kBytes;
  }
  if (stage_ == Stage::kBytes) {
    if (known_ <= 0 && across(step, large_, kTimes)) return true;
    const std::vector<double> also = also_();
    values_.insert(values_.end(), also.begin(), also.end());
    plan_agreement();
    stage_ = Stage::kAgree;
    return true;
  }
  // Of each exchange we have the time of the rank that began it first; the fastest one was disturbed least. The first
  // of either kind may have found connections not yet made, or have been favoured by the pause before it.
  const auto tiny = values_.begin(), large = tiny + kTinyTimes, others = large + (known_ > 0 ? 0 : kTimes);
  speed_.latency_s = *std::min_element(tiny + 1, large);
  speed_.seconds_per_byte =
      known_ > 0 ? known_ : std::max(*std::min_element(large + 1, others) - speed_.latency_s, 1e-9) / sent_bytes();
  also_values_.assign(others, values_.end());
  return false;
}

// No exchange of ours has sizes that vary.
Byte* LinkProbe::allocate(const std::vector<size_t>&, const std::vector<uint64_t>&) { return memory_.data(); }

}  // namespace perseus
