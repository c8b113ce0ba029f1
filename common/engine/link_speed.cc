// Small exchanges for the latency, large ones for the bytes.
#include "engine/link_speed.h"

#include <algorithm>

#include "base/clock.h"

namespace perseus {
namespace {

constexpr size_t kTiny = 64;
constexpr int kTinyTimes = 8;
// Connections are made and TCP's window opens in the first exchange, which does not count.
constexpr size_t kFirst = 512 * 1024;
// So long that what a link passes at once after a pause does not matter, but not for ever on a slow one.
constexpr double kLongEnough = 0.03;
constexpr size_t kLeast = 64 * 1024, kMost = 16 * 1024 * 1024;
constexpr int kTimes = 3;

}  // namespace

LinkProbe::LinkProbe(const Levels& levels, double seconds_per_byte, std::function<std::vector<double>()> also)
    : levels_(levels),
      across_(static_cast<int>(levels.across.size()) == levels.members ? Level::kAll : Level::kAcross),
      known_(seconds_per_byte),
      also_(std::move(also)) {}

// A rank's part of an exchange, sent and received.
double LinkProbe::sent_bytes() const {
  const double members = static_cast<double>(levels_.groups);
  return 2 * (members - 1) / members * static_cast<double>(bytes_);
}

void LinkProbe::plan_across(size_t bytes) {
  bytes_ = bytes;
  if (memory_.size() < bytes) memory_.resize(bytes);  // zeros: their sum is fast everywhere
  plan_.clear();
  plan_.collective = Collective::kAllreduce;
  plan_.fold = kernels::FoldSpec();
  plan_.fold.dtype = DType::kFloat32;
  plan_.pieces.push_back(Piece{memory_.data(), memory_.data(), bytes});
}

void LinkProbe::plan_agreement(std::vector<double>* values) {
  plan_.clear();
  plan_.collective = Collective::kAllreduce;
  plan_.fold = kernels::FoldSpec();
  plan_.fold.dtype = DType::kFloat64;
  plan_.fold.op = ReduceOp::kMax;
  Byte* const memory = reinterpret_cast<Byte*>(values->data());
  plan_.pieces.push_back(Piece{memory, memory, values->size() * sizeof(double)});
}

// The next exchange of this stage; false after so many, when fastest_s_ is known. Ranks that carry no shard have none.
bool LinkProbe::across(Step* step, size_t bytes, int times) {
  const int64_t now = now_ns();
  if (done_ > 0) {
    const double seconds = static_cast<double>(now - begun_ns_) * 1e-9;
    fastest_s_ = done_ == 1 ? seconds : std::min(fastest_s_, seconds);
  }
  if (!levels_.carries() || done_ == times) {
    if (!levels_.carries()) fastest_s_ = 0;
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
  if (stage_ == Stage::kWarmUp) {
    if (across(step, known_ > 0 ? kTiny : kFirst, 1)) return true;
    stage_ = Stage::kLatency;
  }
  if (stage_ == Stage::kLatency) {
    if (across(step, kTiny, kTinyTimes)) return true;
    values_.assign(1, fastest_s_);
    stage_ = known_ > 0 ? Stage::kBytes : Stage::kSize;
  }
  if (stage_ == Stage::kSize) {
    if (across(step, kFirst, 1)) return true;
    values_.push_back(fastest_s_);
    plan_agreement(&values_);
    stage_ = Stage::kAgreeSize;
    return true;
  }
  if (stage_ == Stage::kAgreeSize) {
    const double wanted = kLongEnough / std::max(values_[1], 1e-9) * static_cast<double>(kFirst);
    const double least = kLeast, most = kMost;
    bytes_ = static_cast<size_t>(std::min(std::max(wanted, least), most)) / kLeast * kLeast;
    stage_ = Stage::kBytes;
  }
  if (stage_ == Stage::kBytes) {
    if (known_ <= 0 && across(step, bytes_, kTimes)) return true;
    const double seconds = std::max(fastest_s_ - values_[0], 0.0);
    const double per_byte = known_ > 0 ? known_ : levels_.carries() ? seconds / sent_bytes() : 0.0;
    values_.resize(1);
    values_.push_back(per_byte);
    const std::vector<double> also = also_();
    values_.insert(values_.end(), also.begin(), also.end());
    plan_agreement(&values_);
    stage_ = Stage::kAgree;
    return true;
  }
  speed_.number = 1;
  speed_.latency_s = values_[0];
  speed_.seconds_per_byte = values_[1];
  also_values_.assign(values_.begin() + 2, values_.end());
  return false;
}

// No exchange of ours has sizes that vary.
Byte* LinkProbe::allocate(const std::vector<size_t>&, const std::vector<uint64_t>&) { return memory_.data(); }

}  // namespace perseus
