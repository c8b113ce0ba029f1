// Which message goes to which receive: per sender and tag the first announced to the first posted, and a receive from
// any rank gets what was announced first. Its owner guards it.
#pragma once

#include <climits>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/span.h"
#include "request/request.h"

namespace perseus {

constexpr int kAnySource = -1;

class Matching {
 public:
  // A message that no receive was posted for when it was announced.
  struct Arrival {
    int peer;
    int64_t tag;
    uint64_t id, bytes;
    bool whole;
    std::unique_ptr<Byte[]> held;  // its bytes, where it is whole and has any
  };

  // A receive from rank description.root, or any.
  void add(Entry* receive) {
    receives_.emplace(Key{receive->tag, receive->description.root}, Posted{receive, ++count_});
  }
  void add(Arrival arrival) {
    const Key key{arrival.tag, arrival.peer};
    arrivals_.emplace(key, Counted{std::move(arrival), ++count_});
  }

  // The receive that a message goes to, which it takes out; null = none.
  Entry* take_receive(int peer, int64_t tag) {
    const auto from_peer = first(receives_, {tag, peer}), from_any = first(receives_, {tag, kAnySource});
    const auto end = receives_.end();
    if (from_peer == end && from_any == end) return nullptr;
    const bool any = from_peer == end || (from_any != end && from_any->second.number < from_peer->second.number);
    const auto found = any ? from_any : from_peer;
    Entry* receive = found->second.entry;
    receives_.erase(found);
    return receive;
  }

  // The message that goes to a receive, which it takes out.
  std::optional<Arrival> take_arrival(int source, int64_t tag) {
    auto found = arrivals_.end();
    if (source != kAnySource) {
      found = first(arrivals_, {tag, source});
    } else {
      // Of each sender's the first one.
      for (auto at = arrivals_.lower_bound({tag, INT_MIN}); at != arrivals_.end() && at->first.first == tag;
           at = arrivals_.upper_bound(at->first))
        if (found == arrivals_.end() || at->second.number < found->second.number) found = at;
    }
    if (found == arrivals_.end()) return std::nullopt;
    std::optional<Arrival> arrival = std::move(found->second.arrival);
    arrivals_.erase(found);
    return arrival;
  }

  // The peer sends no more: drops what it has announced, and takes out the receives from it alone.
  std::vector<Entry*> end(int peer) {
    std::vector<Entry*> ended;
    for (auto at = receives_.begin(); at != receives_.end();) {
      if (at->first.second == peer) {
        ended.push_back(at->second.entry);
        at = receives_.erase(at);
      } else {
        ++at;
      }
    }
    for (auto at = arrivals_.begin(); at != arrivals_.end();)
      at = at->first.second == peer ? arrivals_.erase(at) : ++at;
    return ended;
  }
  void clear() {
    receives_.clear();
    arrivals_.clear();
  }

  template <typename Look>
  void for_each_receive(const Look& look) const {
    for (const auto& [key, posted] : receives_) look(posted.entry);
  }

 private:
  using Key = std::pair<int64_t, int>;  // tag, rank
  struct Posted {
    Entry* entry;
    uint64_t number;
  };
  struct Counted {
    Arrival arrival;
    uint64_t number;
  };

  // Of equal keys the one that was added first.
  template <typename Map>
  static typename Map::iterator first(Map& map, const Key& key) {
    const auto found = map.lower_bound(key);
    return found != map.end() && found->first == key ? found : map.end();
  }

  std::multimap<Key, Posted> receives_;
  std::multimap<Key, Counted> arrivals_;
  uint64_t count_ = 0;
};

}  // namespace perseus
