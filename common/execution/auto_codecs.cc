// Choices by the speeds that hold now, but for what is held back.
#include "execution/auto_codecs.h"

namespace perseus {

AutoCodecs::AutoCodecs(const std::array<CodecSpec, kAutoCodecs>& specs, int64_t interval_ns)
    : interval_ns_(interval_ns) {
  for (size_t i = 0; i < specs.size(); ++i) keeps_[i] = keeps_residual(specs[i]);
}

int AutoCodecs::preferred(uint64_t bytes, int least, bool staged) const {
  if (staged || speeds_.shards == 1) return choose_codec(speeds_, bytes, least);
  Speeds whole = speeds_;  // as many bytes from each rank, whoever gets them
  whole.shards = 1;
  return choose_codec(whole, bytes, least);
}

AutoCodecs::Choice AutoCodecs::choose(const std::string& name, size_t tensor, uint64_t bytes, int least, bool staged,
                                      bool flushes) {
  const int codec = preferred(bytes, least, staged);
  const auto found = held_.find(name);
  if (flushes) {
    if (found != held_.end()) held_.erase(found);
    return {codec};
  }
  // Those that hold something back go on with what another one has held back.
  if (!keeps_[static_cast<size_t>(codec)]) {
    if (found == held_.end() || tensor >= found->second.size()) return {codec};
    const Held& held = found->second[tensor];
    return held.codec > 0 && held.bytes == bytes ? Choice{held.codec, true} : Choice{codec};
  }
  std::vector<Held>& of_name = found == held_.end() ? held_[name] : found->second;
  if (of_name.size() <= tensor) of_name.resize(tensor + 1);
  of_name[tensor] = Held{bytes, codec};
  return {codec};
}

bool AutoCodecs::adopt(const Speeds& measured, int64_t now_ns) {
  const double slower = measured.link.seconds_per_byte / speeds_.link.seconds_per_byte;
  const bool changes = speeds_.link.number == 0 || slower > kChange || slower * kChange < 1;
  if (changes) speeds_ = measured;
  speeds_.link.number = measured.link.number;
  number_.store(measured.link.number, std::memory_order_relaxed);
  measured_ns_.store(now_ns, std::memory_order_relaxed);
  return changes;
}

int AutoCodecs::outdated(int64_t now_ns) const {
  const bool old = interval_ns_ > 0 && now_ns - measured_ns_.load(std::memory_order_relaxed) > interval_ns_;
  return old ? number_.load(std::memory_order_relaxed) : 0;
}

}  // namespace perseus
