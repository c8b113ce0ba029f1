// Sends and receives between ranks of the world. No other rank takes part, so they are not negotiated: a send is
// announced to its receiver alone, and its bytes move once a receive for it is posted there.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "base/progress_lock.h"
#include "point_to_point/matching.h"
#include "point_to_point/peer_link.h"
#include "request/request.h"
#include "topology/world.h"

namespace perseus {

class PointToPoint final : private PeerLink::Listener {
 public:
  using LinkTo = std::function<Link&(int peer)>;
  // Tells a peer, with a control message, that this rank has made its end of their link. A link leads nowhere until
  // both ends have made it, and who only receives would not make it by itself. On the control connection it also comes
  // before the news that this rank has left.
  using TellOfLink = std::function<void(int peer)>;
  // What is to be said of requests that end because this peer shuts down.
  using ShutdownText = std::function<std::string(int peer)>;
  using Ended = std::vector<std::pair<Entry*, Status>>;

  PointToPoint(const World& world, LinkTo link_to, TellOfLink tell_of_link, ShutdownText shutdown_text)
      : world_(world),
        link_to_(std::move(link_to)),
        tell_of_link_(std::move(tell_of_link)),
        shutdown_text_(std::move(shutdown_text)) {}

  // Any thread. Takes over an entry of the kind send or receive: description.root is the other rank, or kAnySource.
  // False when no more are taken.
  bool submit(Entry* entry);
  // Submitted and not yet taken over by a pass; any thread.
  bool has_submissions() const { return any_submitted_.load(std::memory_order_seq_cst); }

  // A peer has made its end of the link.
  void on_link_made(int peer) PERSEUS_REQUIRES(progress_lock);
  // A peer reads no more; what it has sent may still arrive.
  void on_left(int peer) PERSEUS_REQUIRES(progress_lock);

  // One pass; true when anything moved. Throws Error where a link is broken.
  bool step(int64_t now, bool woken) PERSEUS_REQUIRES(progress_lock);
  // The entries that have ended, for the caller to finish and clear. Of a receive, description.root is the sender now.
  Ended& ended() PERSEUS_REQUIRES(progress_lock) { return ended_; }
  // Throws Error(kTimeout), naming a rank, when messages under way have moved no byte for the time limit. Waiting for
  // a rank to submit the other half is not meant: see oldest_unmatched().
  void check_progress(int64_t now, int64_t since_ns, int64_t timeout_ns) PERSEUS_REQUIRES(progress_lock);
  // The send or receive that has waited longest for its other half.
  struct Unmatched {
    int64_t submitted_ns;
    std::string text;  // who has not started what
  };
  std::optional<Unmatched> oldest_unmatched() PERSEUS_REQUIRES(progress_lock);
  // Is anything under way that both ends have agreed on, or that a peer has to learn?
  bool moving() const PERSEUS_REQUIRES(progress_lock);

  // This rank shuts down: messages that may go are finished, everything else ends with this text. More than once.
  void close(const std::string& text) PERSEUS_REQUIRES(progress_lock);
  // The world has failed: takes no more, and gives up everything. Each entry once.
  void abandon(std::vector<Entry*>* entries) PERSEUS_REQUIRES(progress_lock);

  // Memory beside tensors and links.
  size_t staging_bytes() const PERSEUS_REQUIRES(progress_lock);

 private:
  bool collect() PERSEUS_REQUIRES(progress_lock);
  void admit(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  void admit_send(Entry* send) PERSEUS_REQUIRES(progress_lock);
  void admit_receive(Entry* receive) PERSEUS_REQUIRES(progress_lock);
  PeerLink* find(int peer) const PERSEUS_REQUIRES(progress_lock);
  PeerLink& make_link(int peer) PERSEUS_REQUIRES(progress_lock);
  // Does the receive fit the message, which so goes to it? Else both fail.
  bool pair(PeerLink& from, Entry* receive, uint64_t id, uint64_t bytes) PERSEUS_REQUIRES(progress_lock);
  void take_whole(PeerLink& from, Entry* receive, uint64_t id, const Byte* data) PERSEUS_REQUIRES(progress_lock);
  void finish(Entry* entry, Status status = Status()) PERSEUS_REQUIRES(progress_lock);
  void fail_all(const std::vector<Entry*>& entries, const std::string& text) PERSEUS_REQUIRES(progress_lock);

  // PeerLink::Listener
  void on_announced(PeerLink& from, const Announcement& message) override PERSEUS_REQUIRES(progress_lock);
  void on_accepted(Entry* send) override PERSEUS_REQUIRES(progress_lock);
  void on_refused(PeerLink& by, Entry* send, uint64_t room) override PERSEUS_REQUIRES(progress_lock);
  void on_moved(Entry* entry) override PERSEUS_REQUIRES(progress_lock) { finish(entry); }
  void on_bye(PeerLink& from, const std::vector<Entry*>& unfinished) override PERSEUS_REQUIRES(progress_lock);

  const World& world_;
  const LinkTo link_to_;
  const TellOfLink tell_of_link_;
  const ShutdownText shutdown_text_;

  Mutex mutex_;
  std::vector<Entry*> submitted_ PERSEUS_GUARDED_BY(mutex_);
  // All that are in flight: other lists may be in between two states when memory runs out.
  std::unordered_set<Entry*> entries_ PERSEUS_GUARDED_BY(mutex_);
  bool refuses_ PERSEUS_GUARDED_BY(mutex_) = false;
  std::atomic<bool> any_submitted_{false};

  std::vector<Entry*> collected_ PERSEUS_GUARDED_BY(progress_lock);
  std::map<int, std::unique_ptr<PeerLink>> links_ PERSEUS_GUARDED_BY(progress_lock);
  std::unordered_set<int> left_ PERSEUS_GUARDED_BY(progress_lock);  // peers that read no more
  Matching matching_ PERSEUS_GUARDED_BY(progress_lock);
  Ended ended_ PERSEUS_GUARDED_BY(progress_lock);
  bool closed_ PERSEUS_GUARDED_BY(progress_lock) = false;
};

}  // namespace perseus
