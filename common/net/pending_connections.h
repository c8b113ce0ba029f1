// Connections that have not yet proved that they belong to the job: how many a listener keeps, for how long, and which
// one makes way for another. Used by one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace perseus {

struct PendingLimits {
  size_t most = 0;  // at once
  // How long a connection may take to prove itself.
  int64_t patience_ns = std::numeric_limits<int64_t>::max();
  // When there is no room, the oldest keeps its place for this long.
  int64_t grace_ns = 0;
};

// `share` of the descriptors that this process may open, but at least `least` and at most `most`: the others belong to
// the job.
size_t descriptors_for_pending(size_t share, size_t least, size_t most);

// Keeps what stands for a connection (its socket, an object, a number), oldest first. All times are now_ns().
template <class Connection>
class PendingConnections {
 public:
  // What has to happen before another connection is added.
  enum class Room { kFree, kOldestMakesWay, kNone };
  // A listener whose queue stays readable would keep its thread spinning: it is left alone for this long.
  static constexpr int64_t kPause = 100 * kMillisecond;

  explicit PendingConnections(PendingLimits limits) : limits_(limits) {}

  void set_most(size_t most) { limits_.most = most; }
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }

  Room room(int64_t now) const {
    if (entries_.size() < limits_.most) return Room::kFree;
    return empty() || now - entries_.front().since_ns < limits_.grace_ns ? Room::kNone : Room::kOldestMakesWay;
  }
  void add(Connection connection, int64_t now) { entries_.push_back(Entry{std::move(connection), now}); }

  const Connection& oldest() const { return entries_.front().connection; }
  // The oldest has used up its time.
  bool oldest_is_late(int64_t now) const { return !empty() && now - entries_.front().since_ns >= limits_.patience_ns; }

  // Takes out the oldest connection, or the one for which `matches`; nothing when there is none.
  std::optional<Connection> take_oldest() {
    return take([](const Connection&) { return true; });
  }
  template <class Matches>
  std::optional<Connection> take(const Matches& matches) {
    const auto found =
        std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return matches(entry.connection); });
    if (found == entries_.end()) return std::nullopt;
    std::optional<Connection> taken(std::move(found->connection));
    entries_.erase(found);
    return taken;
  }
  // Calls keep(connection) on each, oldest first, and forgets those for which it is false.
  template <class Keep>
  void keep_if(const Keep& keep) {
    entries_.remove_if([&](Entry& entry) { return !keep(entry.connection); });
  }
  void clear() { entries_.clear(); }

  // Accepting stops for kPause; the owner stops watching its listeners until may_resume() is true, which it is once.
  void pause(int64_t now) { resume_ns_ = now + kPause; }
  bool may_resume(int64_t now) {
    if (resume_ns_ == 0 || now < resume_ns_) return false;
    resume_ns_ = 0;
    return true;
  }
  // When oldest_is_late() or may_resume() will next be true; 0 = never.
  int64_t next_event_ns() const {
    if (empty() || limits_.patience_ns == std::numeric_limits<int64_t>::max()) return resume_ns_;
    const int64_t late_ns = entries_.front().since_ns + limits_.patience_ns;
    return resume_ns_ == 0 ? late_ns : std::min(resume_ns_, late_ns);
  }

 private:
  struct Entry {
    Connection connection;
    int64_t since_ns;
  };

  PendingLimits limits_;
  std::list<Entry> entries_;  // oldest first
  int64_t resume_ns_ = 0;     // 0 = accepting
};

}  // namespace perseus
