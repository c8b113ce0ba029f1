// The timeline (HOROVOD_TIMELINE): what a pass tells it goes into a Chrome trace, while one is being recorded. Any
// thread may start and stop it. Costs one look at a pointer while it is off.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "base/mutex.h"
#include "execution/bucket_observer.h"
#include "observe/recording.h"
#include "progress/progress_engine.h"
#include "request/request.h"
#include "topology/transport_kind.h"
#include "topology/world.h"

namespace perseus {

class Timeline final : public BucketObserver {
 public:
  // `identity` is the world's in traces; `transports[rank]` leads to that rank. Records from the start where
  // HOROVOD_TIMELINE names a file; throws Error(kInvalidArgument) when that file cannot be written.
  Timeline(const World& world, const std::string& identity, const Config& config,
           const std::vector<TransportKind>& transports, const Log& log);

  bool on() const override PERSEUS_REQUIRES(progress_lock) { return recording_ != nullptr; }
  bool marks_cycles() const PERSEUS_REQUIRES(progress_lock) { return on() && mark_cycles_; }
  // The entry's handle is about to be done; it still has its name.
  void operation(const Entry& entry, bool ok) PERSEUS_REQUIRES(progress_lock);
  void bucket(const Bucket& bucket, const std::vector<int>& ranks, const std::vector<Entry*>& entries) override
      PERSEUS_REQUIRES(progress_lock);
  void round(int group, uint64_t number) PERSEUS_REQUIRES(progress_lock);
  // The tuner has settled.
  void tuned(size_t bucket_bytes, int streams, const std::string& why) PERSEUS_REQUIRES(progress_lock);

  // See perseus_timeline_start and perseus_timeline_stop.
  void start(const std::string& path, bool mark_cycles, ProgressEngine& progress);
  void stop(ProgressEngine& progress);

 private:
  std::unique_ptr<Recording> open(const std::string& path) const;

  const Log log_;
  const TraceOwner owner_;
  const bool armed_;                 // HOROVOD_TIMELINE is set
  const bool writes_;                // this rank has a file
  std::vector<uint8_t> transports_;  // by rank, as transport_bit()

  Mutex control_mutex_;  // held by whoever starts or stops
  // Changed with the progress lock and control_mutex_; read with either.
  std::unique_ptr<Recording> recording_;
  bool mark_cycles_ = false;
};

// trace.json of rank 2 → trace.rank2.json; rank 0 has the file as named.
std::string timeline_path(const std::string& path, int rank);

}  // namespace perseus
