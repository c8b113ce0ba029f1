// One queue for each lane of a device, one for messages, and one for joins.
#include "engine/loading.h"

#include <utility>

namespace perseus {
namespace {

constexpr int kMessages = -2, kJoins = -1;  // beside those of Staging

// A message is read as soon as the other rank wants it, and a bucket waits for its own parts of a tensor.
bool computed(const Entry& entry) {
  if (!entry.staging) return true;
  return is_point_to_point(entry.description.kind) ? entry.staging->loaded(0, entry.bytes) : entry.staging->computed();
}

}  // namespace

int Loading::queue_of(const Entry& entry) {
  if (is_point_to_point(entry.description.kind)) return kMessages;
  return entry.staging ? entry.staging->queue() : kJoins;
}

bool Loading::holds(const Entry& entry) const {
  const Kind kind = entry.description.kind;
  if (is_point_to_point(kind) && messages_left_.load() > 0) return true;
  if (kind == Kind::kJoin && collectives_left_.load() > 0) return true;
  try {
    return !computed(entry);
  } catch (const Error&) {
    return true;  // the pass that asks again ends the world
  }
}

bool Loading::add(Request request) {
  const MutexLock lock(mutex_);
  if (closed_) return false;
  request.number = ++numbers_;
  const Kind kind = request.entry->description.kind;
  arrived_.push_back(std::move(request));
  ++left(kind);
  return true;
}

bool Loading::may_go(const Request& request) const {
  if (request.entry->description.kind == Kind::kJoin)
    for (const auto& [number, queue] : queues_)
      if (number >= 0 && !queue.empty() && queue.front().number < request.number) return false;
  return computed(*request.entry);
}

void Loading::sort_arrived() {
  if (sorting_.empty()) {
    const MutexLock lock(mutex_);
    sorting_.swap(arrived_);
  }
  for (; !sorting_.empty(); sorting_.pop_front())
    queues_[queue_of(*sorting_.front().entry)].push_back(std::move(sorting_.front()));
}

void Loading::take_computed(std::vector<Request>* taken) {
  sort_arrived();
  // In descending order: joins come after the collectives that they wait for.
  for (auto queue = queues_.rbegin(); queue != queues_.rend(); ++queue)
    while (!queue->second.empty() && may_go(queue->second.front())) {
      taken->push_back(queue->second.front());
      queue->second.pop_front();
    }
}

void Loading::close(std::vector<Entry*>* taken) {
  const auto take_all = [this, taken](std::deque<Request>* requests) {
    for (; !requests->empty(); requests->pop_front()) {
      taken->push_back(requests->front().entry);
      --left(requests->front().entry->description.kind);
    }
  };
  for (auto& [number, queue] : queues_) take_all(&queue);
  take_all(&sorting_);
  const MutexLock lock(mutex_);
  closed_ = true;
  take_all(&arrived_);
}

}  // namespace perseus
