// One trace file while it is being written: the holder of the progress lock appends fixed-size records to a ring that
// was allocated beforehand; a thread of its own turns them into events and writes these. Records that the ring has no
// room for are counted, and the trace and the log report them.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "base/log.h"
#include "base/mutex.h"
#include "base/progress_lock.h"
#include "observe/trace_file.h"
#include "observe/trace_format.h"

namespace perseus {

class Recording {
 public:
  static constexpr size_t kSlots = 32768;  // 4 MiB
  // How long events may be missing in the file.
  static constexpr int64_t kWriteEveryMs = 50;

  // The file exists and is a valid trace when it returns. Throws Error(kInvalidArgument).
  Recording(const std::string& path, const TraceOwner& owner, const Log& log);
  // Writes what is left.
  ~Recording();

  const std::string& path() const { return file_.path(); }
  const std::string& wanted() const { return file_.wanted(); }

  static size_t slots_for(size_t name_bytes);
  // Room for `slots`? If not, `records` are counted as dropped.
  bool has_room(size_t slots, size_t records) PERSEUS_REQUIRES(progress_lock);
  // Only after has_room().
  void add(TraceRecord record, const std::string& name) PERSEUS_REQUIRES(progress_lock);

 private:
  void write_loop();
  bool wait_for_records();
  void drain();
  void write(size_t head);
  void flush();
  void take(size_t* tail);
  void tell();

  const Log log_;
  TraceFile file_;
  TraceFormat format_;
  std::unique_ptr<TraceRecord[]> ring_;  // slot n lies at n % kSlots
  std::atomic<size_t> head_{0};          // slots ever filled; written with the progress lock held
  std::atomic<size_t> tail_{0};          // slots ever taken; written by the thread
  std::atomic<uint64_t> dropped_{0};

  // The thread's:
  std::string events_, name_;
  uint64_t dropped_reported_ = 0;
  bool broken_ = false;  // nothing can be written any more
  std::string trouble_;  // then: why, until the log has it

  Mutex mutex_;
  ConditionVariable wake_;
  bool stop_ PERSEUS_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace perseus
