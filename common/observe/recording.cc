// The ring and its thread.
#include "observe/recording.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "base/start_thread.h"

namespace perseus {
namespace {

constexpr size_t kInline = sizeof(TraceRecord::name);
constexpr size_t kFlushBytes = 256 * 1024;

int64_t epoch_microseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Recording::Recording(const std::string& path, const TraceOwner& owner, const Log& log)
    : log_(log),
      file_(path),
      format_(owner, now_ns(), epoch_microseconds()),
      ring_(std::make_unique<TraceRecord[]>(kSlots)) {
  if (file_.path() != path)
    log_.warning("[timeline] another world writes to '" + path + "': this one's timeline is '" + file_.path() + "'");
  format_.header(&events_);
  flush();
  thread_ = start_thread("timeline", [this] { write_loop(); });
}

Recording::~Recording() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
  const uint64_t dropped = dropped_.load(std::memory_order_relaxed);
  if (dropped > 0 && !broken_)
    log_.warning("[timeline] " + std::to_string(dropped) + " records are missing in '" + path() +
                 "': they could not be written fast enough");
}

// ---- with the progress lock held ----

size_t Recording::slots_for(size_t name_bytes) {
  const size_t rest = name_bytes > kInline ? name_bytes - kInline : 0;
  return 1 + (rest + sizeof(TraceRecord) - 1) / sizeof(TraceRecord);
}

bool Recording::has_room(size_t slots, size_t records) {
  const size_t used = head_.load(std::memory_order_relaxed) - tail_.load(std::memory_order_acquire);  // with drain()
  if (used + slots <= kSlots) return true;
  dropped_.fetch_add(records, std::memory_order_relaxed);
  return false;
}

void Recording::add(TraceRecord record, const std::string& name) {
  record.name_bytes = static_cast<uint32_t>(name.size());
  std::memcpy(record.name, name.data(), std::min(name.size(), kInline));
  const size_t head = head_.load(std::memory_order_relaxed);
  size_t next = head;
  ring_[next++ % kSlots] = record;
  for (size_t done = kInline; done < name.size(); done += sizeof(TraceRecord))
    std::memcpy(static_cast<void*>(&ring_[next++ % kSlots]), name.data() + done,
                std::min(name.size() - done, sizeof(TraceRecord)));
  head_.store(next, std::memory_order_release);  // pairs with drain(): the slots are filled
  const size_t tail = tail_.load(std::memory_order_relaxed);
  if (head - tail < kSlots / 2 && next - tail >= kSlots / 2) wake_.notify_one();
}

// ---- the thread ----

void Recording::write_loop() {
  pthread_setname_np(pthread_self(), "perseus-trace");
  while (wait_for_records()) drain();
  drain();
}

// False when the recording ends.
bool Recording::wait_for_records() {
  const MutexLock lock(mutex_);
  if (!stop_) wake_.wait_for(mutex_, std::chrono::milliseconds(kWriteEveryMs));
  return !stop_;
}

void Recording::drain() {
  const size_t head = head_.load(std::memory_order_acquire);  // pairs with add()
  try {
    if (!broken_) write(head);
    if (!trouble_.empty()) tell();
  } catch (const std::bad_alloc&) {
    if (!broken_) trouble_ = "out of memory";  // so short that it needs none
    broken_ = true;
  }
  if (broken_) tail_.store(head, std::memory_order_release);  // pairs with has_room()
}

void Recording::write(size_t head) {
  size_t tail = tail_.load(std::memory_order_relaxed);
  while (tail != head) {
    take(&tail);
    tail_.store(tail, std::memory_order_release);  // pairs with has_room(): the slots may be filled again
    if (events_.size() >= kFlushBytes) flush();
    if (broken_) return;
  }
  const uint64_t dropped = dropped_.load(std::memory_order_relaxed);
  if (dropped > dropped_reported_) {
    format_.dropped(dropped - dropped_reported_, now_ns(), &events_);
    dropped_reported_ = dropped;
  }
  flush();
}

void Recording::take(size_t* tail) {
  const TraceRecord record = ring_[(*tail)++ % kSlots];
  name_.assign(record.name, std::min<size_t>(record.name_bytes, kInline));
  while (name_.size() < record.name_bytes)
    name_.append(reinterpret_cast<const char*>(&ring_[(*tail)++ % kSlots]),
                 std::min<size_t>(record.name_bytes - name_.size(), sizeof(TraceRecord)));
  format_.record(record, name_, &events_);
}

void Recording::flush() {
  trouble_ = file_.append(events_);
  events_.clear();
  broken_ = !trouble_.empty();
}

void Recording::tell() {
  log_.warning("[timeline] cannot write '" + path() + "' any more: " + trouble_ + "; what follows is missing");
  trouble_.clear();
}

}  // namespace perseus
