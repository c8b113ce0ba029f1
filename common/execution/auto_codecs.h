// What auto goes by in a group: how fast its links and its ranks' codecs are, and which tensors have something held
// back by which codec. It changes with the entries that are executed, so it is the same on all ranks at the same entry;
// both executions of a process set share it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/progress_lock.h"
#include "compression/codec_choice.h"

namespace perseus {

class AutoCodecs {
 public:
  // Links whose speed differs by less than this factor from the one that choices are made by count as unchanged: a
  // codec that is chosen for either is nearly as fast with the other, and other work disturbs measurements.
  static constexpr double kChange = 1.5;

  // interval_ns: a measurement is outdated after this time; 0 = never.
  AutoCodecs(const std::array<CodecSpec, kAutoCodecs>& specs, int64_t interval_ns);

  const Speeds& speeds() const PERSEUS_REQUIRES(progress_lock) { return speeds_; }
  // Goes by a first measurement, or by a later one if the links have changed. Returns whether it does.
  bool adopt(const Speeds& measured, int64_t now_ns) PERSEUS_REQUIRES(progress_lock);
  struct Choice {
    int codec = 0;        // its place in kAutoKinds
    bool yields = false;  // an exact one would be chosen, were nothing held back: so the next reduction should flush
  };
  // Gradients of several owners may have one name. It knows what the last one of them holds back, so the caller sees to
  // the others'.
  // For a request's tensor of so many bytes. One that has something held back keeps its codec, until a reduction that
  // flushes, if the next one would have no use for that. `least`: see choose_codec(). `staged`: only shards cross the
  // links.
  Choice choose(const std::string& name, size_t tensor, uint64_t bytes, int least, bool staged, bool flushes)
      PERSEUS_REQUIRES(progress_lock);

  // The number of the measurement that choices are made by, if it is outdated; else 0. Any thread.
  int outdated(int64_t now_ns) const;

 private:
  struct Held {
    uint64_t bytes = 0;
    int codec = 0;  // 0 = nothing is held back
  };

  int preferred(uint64_t bytes, int least, bool staged) const PERSEUS_REQUIRES(progress_lock);

  std::array<bool, kAutoCodecs> keeps_{};  // something back
  const int64_t interval_ns_;
  Speeds speeds_ PERSEUS_GUARDED_BY(progress_lock);
  std::unordered_map<std::string, std::vector<Held>> held_ PERSEUS_GUARDED_BY(progress_lock);  // by request and tensor
  std::atomic<int> number_{0};
  std::atomic<int64_t> measured_ns_{0};
};

}  // namespace perseus
