// Requests whose tensors lie on a device, until these are computed: only then do other ranks learn of them, so that no
// rank waits in an exchange for what another one still computes. What must not overtake them waits, too: messages
// behind messages, wherever their tensors are, and a join behind the collectives before it.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/progress_lock.h"
#include "engine/process_set.h"

namespace perseus {

class Loading {
 public:
  struct Request {
    std::string name;
    std::shared_ptr<ProcessSet> group;  // null: a send or a receive
    Entry* entry;
    uint64_t number = 0;  // in the order of submission
  };

  // Must the entry wait here? Any thread, like all but what says otherwise.
  bool holds(const Entry& entry) const;
  // False once closed. Never waits for a driver, which is asked without the mutex.
  bool add(Request request);
  // Is there a request that was not announced yet?
  bool any() const { return messages_left_.load() + collectives_left_.load() > 0; }
  // Appends those that need not wait any more. Of each queue, the first that does ends the search, as those behind it
  // are computed later. Throws as Staging::computed() does.
  void take_computed(std::vector<Request>* taken) PERSEUS_REQUIRES(progress_lock);
  // A request of this kind that was taken is known to the other ranks, or has failed.
  void announced(Kind kind) PERSEUS_REQUIRES(progress_lock) { --left(kind); }
  // Appends all that were not taken, and takes no more.
  void close(std::vector<Entry*>* taken) PERSEUS_REQUIRES(progress_lock);

 private:
  std::atomic<size_t>& left(Kind kind) { return is_point_to_point(kind) ? messages_left_ : collectives_left_; }
  // What follows each other in a queue of its own.
  static int queue_of(const Entry& entry);
  bool may_go(const Request& request) const PERSEUS_REQUIRES(progress_lock);
  // Sorts what has arrived into the queues.
  void sort_arrived() PERSEUS_REQUIRES(progress_lock);

  std::map<int, std::deque<Request>> queues_ PERSEUS_GUARDED_BY(progress_lock);
  std::deque<Request> sorting_ PERSEUS_GUARDED_BY(progress_lock);
  Mutex mutex_;
  std::deque<Request> arrived_ PERSEUS_GUARDED_BY(mutex_);
  uint64_t numbers_ PERSEUS_GUARDED_BY(mutex_) = 0;
  bool closed_ PERSEUS_GUARDED_BY(mutex_) = false;
  std::atomic<size_t> messages_left_{0}, collectives_left_{0};
};

}  // namespace perseus
