// The heart of a Context: takes requests, drives groups and transports, watches over peers, ends everything cleanly or
// with one cause. Public calls are for any thread.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "base/mutex.h"
#include "collective/mpi/mpi_world.h"
#include "compression/accumulation.h"
#include "compression/first_steps.h"
#include "compression/gradient_codecs.h"
#include "compression/residuals.h"
#include "cuda/device.h"
#include "engine/loading.h"
#include "engine/process_set.h"
#include "net/waker.h"
#include "observe/flight_recorder.h"
#include "observe/inspection.h"
#include "observe/nan_check.h"
#include "observe/perf_check.h"
#include "observe/timeline.h"
#include "point_to_point/point_to_point.h"
#include "progress/callers.h"
#include "progress/progress_engine.h"
#include "progress/silent_batch.h"
#include "request/handle_table.h"
#include "transport/transport.h"

namespace perseus {

// Of this host: cores that this process may use, and ranks that share them.
struct Cores {
  int usable, ranks;
};

struct EngineStats {
  uint64_t shm_sent = 0, shm_received = 0, tcp_sent = 0, tcp_received = 0;
  uint64_t rounds = 0, buckets = 0, operations = 0, sleeps = 0, staging_bytes = 0, messages = 0;
};

class Engine final : private ProgressWork {
 public:
  static constexpr int kAnyDevice = -1;
  // A request as the caller states it; pointers need to live only during submit().
  struct Submission {
    Kind kind = Kind::kAllreduce;
    int group = 0;
    const char* name = nullptr;
    ReduceOp op = ReduceOp::kSum;
    double prescale = 1.0, postscale = 1.0;
    int root = 0;
    int priority = 0;
    bool transient = false;
    struct Tensor {
      const void* in;
      void* out;
      const int64_t* shape;
      int ndim;
      DType dtype;

      size_t count() const {
        size_t count = 1;
        for (int d = 0; d < ndim; ++d) count *= static_cast<size_t>(shape[d]);
        return count;
      }
    };
    const Tensor* tensors = nullptr;
    int tensor_count = 0;
    const int64_t* splits = nullptr;
    int split_count = 0;
    const int* ranks = nullptr;
    int rank_count = 0;
    uint64_t gradient_of = 0;
    double learning_rate = 0;  // see perseus_request
    double momentum = 0;       // likewise
    CodecWish codec;
    Completion done;
    int64_t tag = 0;                // of a send or receive, whose other rank is `root`
    std::vector<uint32_t> times;    // of the tuner's request
    const char* refusal = nullptr;  // see perseus_request
    // Where tensors lie on a device: its number, or kAnyDevice to find it, and the stream that computes them.
    bool on_cuda = false;
    int device = 0;
    void* stream = nullptr;
    bool stays_on_device = false;  // as far as this rank knows, until NCCL has summed them
  };

  // `route[peer]` is the transport that reaches it (null for this rank); all connected to all peers.
  Engine(const World& world, const Config& config, const Log& log, std::unique_ptr<Waker> waker,
         std::vector<std::unique_ptr<Transport>> transports, std::vector<Transport*> route, Cores cores);
  ~Engine() override;

  // Throws Error(kInvalidArgument) for what this rank alone can see to be wrong, Error(kAborted) after a failure.
  int64_t submit(const Submission& submission);
  // Waits until the handle is done or the deadline; null when unknown, else its slot (maybe not done).
  HandleTable::Slot* wait(int64_t handle, int64_t deadline_ns);
  HandleTable::Slot* poll(int64_t handle);
  HandleTable& handles() { return handles_; }

  // What each rank of the world says its own_location() is. Before anything is submitted.
  void set_locations(std::vector<Location> locations);
  Location own_location() const;

  // Collectives of the world go through an MPI library where it can do them. Every rank calls it, before anything is
  // submitted. Throws as MpiWorld does.
  void use_mpi(int64_t deadline_ns, const std::function<bool()>& interrupted);

  // See perseus_gradients_forget.
  void forget_gradients(uint64_t owner);
  // See perseus_sums_forget.
  void forget_sums(uint64_t owner) { accumulation_.forget(owner); }
  // See perseus_momenta_forget.
  void forget_momenta(uint64_t owner) { residuals_.spoil_momenta(owner); }
  // See perseus_residuals_flush, perseus_residual_read and perseus_residual_write.
  void flush_residuals() { residuals_.flush(); }
  size_t read_residual(uint64_t owner, int group, const std::string& name, float* data, size_t room,
                       Residuals::Place* place);
  void write_residual(uint64_t owner, int group, const std::string& name, const float* data, size_t room,
                      const Residuals::Place& place);

  // See perseus_context_shutdown.
  void shutdown();
  // See perseus_context_abort.
  void abort_world(const std::string& reason);
  // See perseus_context_set_stall_limits.
  void set_stall_limits(int64_t check_ns, int64_t shutdown_ns);
  // See perseus_inspection_signal.
  static int inspection_signal(bool chain);
  // Why the world has ended; ok while it has not.
  Status failure() const;

  // See perseus_timeline_start and perseus_timeline_stop.
  void start_timeline(const std::string& path, bool mark_cycles);
  void stop_timeline();

  std::vector<int> group_ranks(int id) const;
  // What auto goes by in a group; its number is 0 where it was not needed yet.
  Speeds speeds(int group);
  // Of an unnamed request of the group; -1 where this rank is no member.
  int64_t next_number(int group) const;
  const char* transport_name(int peer) const;
  EngineStats stats() const;

 private:
  // Bytes that are worth a round while earlier buckets are under way, and a thread's wake-up.
  static constexpr size_t kBucketsWorth = 4 * 1024 * 1024;

  // ---- submission (submission.cc); any thread ----
  std::shared_ptr<ProcessSet> find_group(const Submission& submission) const;
  // Of a group's residuals; throws Error(kInvalidArgument) where this rank is no member.
  uint32_t channel_of(int group) const;
  Entry* take_entry();
  void recycle(Entry* entry);
  struct Recycler {
    Engine* engine;
    void operator()(Entry* entry) const { engine->recycle(entry); }
  };
  using Taken = std::unique_ptr<Entry, Recycler>;
  Taken take() { return Taken(take_entry(), Recycler{this}); }
  void fill(const Submission& submission, Entry* entry);
  void fill_collective(const Submission& submission, const ProcessSet& group, const CompressionTerms& compression,
                       Entry* entry);
  int64_t submit_point_to_point(const Submission& submission);
  int64_t submit_point_to_point(const Submission& submission, std::unique_ptr<cuda::Staging> staging);
  // Opens the handle of an entry's result and has `give` pass the entry on: true = enough waits for a round to begin.
  // Where nobody takes it, `give` throws, and nothing is left.
  template <class Give>
  int64_t announce(Taken entry, const Give& give);
  // A submission whose tensors or images are in host memory; `staging` has the images, where the tensors lie on a
  // device.
  int64_t submit_checked(const Submission& submission, const std::shared_ptr<ProcessSet>& group,
                         const CompressionTerms& compression, std::unique_ptr<cuda::Staging> staging);
  // Of tensors on a device: begins to load their images, or notes when they are computed, and makes the submission one
  // of these. `group`: null for a send or receive.
  std::unique_ptr<cuda::Staging> stage(ProcessSet* group, const CompressionTerms& compression, Submission* submission,
                                       std::vector<Submission::Tensor>* images);
  // Of tensors on a device that nobody has to look at: what one rank alone reduces or broadcasts is its result.
  bool is_result(const Submission& submission, const ProcessSet& group) const;
  int64_t pass_on(const Submission& submission);
  bool looks_at(const Submission& submission) const;
  bool may_stay(const Submission& submission, const CompressionTerms& compression, int device, ProcessSet* group) const;
  bool may_be_encoded(const Submission& submission, const CompressionTerms& compression, int device, ProcessSet* group);
  // What is said where negotiation has not taken an entry.
  Error not_taken(Negotiation::Submitted submitted, const std::string& name) const;
  Error ended() const;

  // ---- gradients (gradients.cc); any thread ----
  // What comes before a gradient's reduction: true when there is none yet, because it was added to a sum.
  bool holds(const Submission& submission);
  bool caller_waits_for(const Entry& entry) const;
  // Of what is over already, but for what streams of a device have to do.
  int64_t done_handle(GradientOutcome outcome, const Completion& done, std::unique_ptr<cuda::Staging> staging);
  // Once on rank 0, when gradients are about to lose precision that nobody has spoken of.
  void warn_about_accuracy(const Submission& s, const CompressionTerms& terms, const std::vector<int>& ranks);
  bool steps_otherwise(const Submission& s);
  void warn_about_precision(const std::vector<int>& ranks);
  void check_speed(const Submission& submission);
  // Notes in the description whether what is held back has to go along.
  void ask_for_flush(const Submission& submission, const ProcessSet& group, Description* description);
  bool warms_up(const Submission& submission, const ProcessSet& group, const Description& description);
  // Is something of it corrected by momentum that this rank has no momenta for?
  bool lacks_momenta(const Submission& submission, const ProcessSet& group, const Description& description);

  // ---- ProgressWork (engine.cc) ----
  bool pass(bool eager) override PERSEUS_REQUIRES(progress_lock);
  void on_failure(const Error& cause) noexcept override PERSEUS_REQUIRES(progress_lock);
  bool busy() noexcept override PERSEUS_REQUIRES(progress_lock);
  bool has_submissions() const noexcept override;
  bool awaited() const noexcept override { return silent_batch_.complete(); }

  bool advance(bool eager) PERSEUS_REQUIRES(progress_lock);
  // Negotiation gets requests whose tensors have been computed; true when there were any.
  bool announce_computed(int64_t now, bool eager) PERSEUS_REQUIRES(progress_lock);
  void announce_to_peers(const Loading::Request& request, Status* status) PERSEUS_REQUIRES(progress_lock);
  // Of tensors on a device.
  void end_storing(Entry* entry, HandleTable::Slot* slot) PERSEUS_REQUIRES(progress_lock);
  // Completes what has ended since the last time; true when there was anything.
  bool complete_ended() PERSEUS_REQUIRES(progress_lock);
  // What the handle tells beside the status, where that is a success.
  void give_result(const Entry& entry, HandleTable::Slot* slot) PERSEUS_REQUIRES(progress_lock);
  // Completes the handle in any case: what goes wrong meanwhile ends the world.
  void finish(Entry* entry, const Status& status) PERSEUS_REQUIRES(progress_lock);
  Status change_groups(const Entry& entry, Output* output) PERSEUS_REQUIRES(progress_lock);
  void add_group(int id, std::vector<int> ranks) PERSEUS_REQUIRES(progress_lock);
  void make_room(const std::vector<int>& ranks) const;
  NcclOrder::Settings order_of_nccl();
  std::shared_ptr<ProcessSet> make_group(int id, uint32_t channels, const std::vector<int>& ranks)
      PERSEUS_REQUIRES(progress_lock);
  void count() PERSEUS_REQUIRES(progress_lock);

  // ---- tuning (tuning.cc) ----
  void begin_tuner_log() const;
  bool may_try_nccl() const;
  void keep_tuning(ProcessSet* world) PERSEUS_REQUIRES(progress_lock);

  // ---- watching (watch.cc) ----
  void read_peer_events() PERSEUS_REQUIRES(progress_lock);
  void on_peer_event(const PeerEvent& event) PERSEUS_REQUIRES(progress_lock);
  void on_goodbye(int peer, const std::string& rounds) PERSEUS_REQUIRES(progress_lock);
  void tell_of_link(int peer) PERSEUS_REQUIRES(progress_lock);
  void call_about_nccl(int peer) PERSEUS_REQUIRES(progress_lock);
  void forget_removed() PERSEUS_REQUIRES(progress_lock);
  void housekeeping(int64_t now) PERSEUS_REQUIRES(progress_lock);
  void check_liveness(int64_t now) PERSEUS_REQUIRES(progress_lock);
  void answer_inspection(int64_t now) PERSEUS_REQUIRES(progress_lock);
  std::string what_it_waits_for(int64_t now) PERSEUS_REQUIRES(progress_lock);
  void on_awaited(int peer, const std::string& names) PERSEUS_REQUIRES(progress_lock);
  void check_stalls(int64_t now) PERSEUS_REQUIRES(progress_lock);
  void check_unmatched(int64_t now) PERSEUS_REQUIRES(progress_lock);
  void check_deadlocks(int64_t now) PERSEUS_REQUIRES(progress_lock);
  void abort(const Error& cause, bool tell) PERSEUS_REQUIRES(progress_lock);
  // Once the world has failed: those that have not been told, and whatever is left of its requests.
  void tell_peers() PERSEUS_REQUIRES(progress_lock);
  void end_everything() PERSEUS_REQUIRES(progress_lock);
  // Finishes what `take` takes, even where that throws.
  template <class Take>
  void end(const Take& take, const Status& status) PERSEUS_REQUIRES(progress_lock);
  // Of all process sets; none is taken from now on.
  void fail_loading(const Status& status) PERSEUS_REQUIRES(progress_lock);
  void fail_pending(ProcessSet* group, bool close, const Status& status) PERSEUS_REQUIRES(progress_lock);
  void give_up(ProcessSet* group, const Status& status) PERSEUS_REQUIRES(progress_lock);
  void wind_down() PERSEUS_REQUIRES(progress_lock);
  bool never_ends(const ProcessSet& group) const PERSEUS_REQUIRES(progress_lock);  // the round in flight
  void end_rounds(ProcessSet* group) PERSEUS_REQUIRES(progress_lock);
  std::string last_round(const ProcessSet& group) const PERSEUS_REQUIRES(progress_lock);
  std::string goodbye() const PERSEUS_REQUIRES(progress_lock);
  void send_goodbye() PERSEUS_REQUIRES(progress_lock);
  // Of `first`, the rank that shut down before others did; -1 = this one.
  std::string shutdown_text(int first) const;
  std::string shutdown_text() const { return shutdown_text(first_left_.load()); }
  void note_cause(ErrorKind kind, const std::string& text);  // what failure() says from now on

  const World world_;
  const Log log_;
  FlightRecorder flight_recorder_ PERSEUS_GUARDED_BY(progress_lock);
  const int64_t timeout_ns_, housekeeping_pause_ns_, cycle_ns_;
  std::atomic<int64_t> stall_ns_, stall_shutdown_ns_;
  const bool schedules_;
  ThreadPool codec_threads_;
  ExecutionSettings execution_settings_;

  std::unique_ptr<Waker> waker_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Transport*> route_;
  Timeline timeline_;
  cuda::Devices devices_;  // outlives handles, which hold images
  HandleTable handles_;
  Loading loading_;
  Accumulation accumulation_;
  const GradientCodecs gradient_codecs_;
  std::atomic<bool> warned_about_accuracy_{false}, warned_about_precision_{false};
  Mutex steps_mutex_;
  std::pair<uint64_t, std::string> steps_otherwise_ PERSEUS_GUARDED_BY(steps_mutex_);  // a gradient: owner and name
  Residuals residuals_;
  FirstSteps first_steps_;
  std::atomic<bool> warned_about_dropped_{false};
  int interfaces_ = 1;  // that the user has named
  Topology topology_;   // changed once, before anything is submitted
  const NanCheck nan_check_;
  PerfCheck perf_check_;
  SilentBatch silent_batch_;
  Callers callers_;

  NcclOrder nccl_order_;           // outlives process sets
  std::unique_ptr<MpiWorld> mpi_;  // set once, before anything is submitted
  mutable Mutex groups_mutex_;
  // Written under groups_mutex_ with the progress lock; read under either. groups_ holds those this rank is a member
  // of.
  std::map<int, std::vector<int>> members_;
  std::map<int, std::shared_ptr<ProcessSet>> groups_;
  std::deque<int> free_ids_ PERSEUS_GUARDED_BY(progress_lock);  // freed first is used first
  int next_id_ PERSEUS_GUARDED_BY(progress_lock) = 1;
  // Numbers channels, which are never used again.
  uint32_t groups_made_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  // A removed process set, by its channels, and the other members to which links are left: they end once both ranks
  // have said that they use them no more.
  struct Removed {
    std::shared_ptr<ProcessSet> set;  // until no thread that was about to submit something holds it
    std::vector<int> members;
    bool told = false;
  };
  std::map<uint32_t, Removed> removed_ PERSEUS_GUARDED_BY(progress_lock);
  std::set<std::pair<uint32_t, int>> unused_by_ PERSEUS_GUARDED_BY(progress_lock);  // channels, the rank that said so
  PointToPoint point_to_point_;

  Mutex entries_mutex_;
  std::vector<std::unique_ptr<Entry>> entries_ PERSEUS_GUARDED_BY(entries_mutex_);  // all ever made
  std::vector<Entry*> free_entries_ PERSEUS_GUARDED_BY(entries_mutex_);

  std::atomic<bool> failed_{false};   // over: cause_ says why
  std::atomic<bool> closing_{false};  // some rank shuts down: what all have agreed on is finished, no more is taken
  std::atomic<bool> sent_goodbye_{false};
  std::atomic<bool> drained_{false};  // while closing: nothing is moving
  std::atomic<int> first_left_{-1};   // the peer that was first to say goodbye
  mutable Mutex cause_mutex_;
  Status cause_ PERSEUS_GUARDED_BY(cause_mutex_);
  std::atomic<uint64_t> operations_{0};

  std::vector<bool> left_ PERSEUS_GUARDED_BY(progress_lock);  // peers that said goodbye
  // Channel number of a group → last round that all who left took part in.
  std::map<uint32_t, uint64_t> last_rounds_ PERSEUS_GUARDED_BY(progress_lock);
  uint64_t inspected_ PERSEUS_GUARDED_BY(progress_lock) = inspections();  // before the first pass
  bool inspection_due_ PERSEUS_GUARDED_BY(progress_lock) = false;
  int64_t awaited_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // when another rank last said that it waits for this one
  int64_t warned_of_unmatched_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int64_t housekeeping_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int64_t alive_since_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // silence counts from here on
  int64_t events_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int64_t look_again_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // for what devices have computed
  bool tcp_ PERSEUS_GUARDED_BY(progress_lock) = false;
  std::vector<Entry*> finished_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<std::pair<Entry*, std::string>> mismatched_ PERSEUS_GUARDED_BY(progress_lock);
  // Of what tells the others this rank's times; 0 = not submitted.
  int64_t tuner_handle_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  // The world has failed, but not everything could be told and ended yet.
  bool ending_ PERSEUS_GUARDED_BY(progress_lock) = false;
  int untold_ PERSEUS_GUARDED_BY(progress_lock) = 0;             // the first peer that is still to be told of a failure
  bool number_lacks_ PERSEUS_GUARDED_BY(progress_lock) = false;  // in the failure's text: this rank's
  const std::string tuner_log_;

  mutable Mutex stats_mutex_;
  EngineStats stats_ PERSEUS_GUARDED_BY(stats_mutex_);

  ProgressEngine progress_;  // last: its thread uses everything above
};

}  // namespace perseus
