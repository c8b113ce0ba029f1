// Runs what negotiation found ready, for one group: fuses requests into buckets, gives each bucket to a stream in the
// agreed order, and reports entries whose last bucket is done.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/progress_lock.h"
#include "base/thread_pool.h"
#include "codec/whole.h"
#include "collective/adasum.h"
#include "collective/group.h"
#include "collective/hierarchical_allreduce.h"
#include "collective/hierarchical_broadcast.h"
#include "collective/low_rank_allreduce.h"
#include "compression/residuals.h"
#include "cuda/encoding.h"
#include "execution/auto_codecs.h"
#include "execution/bucket_observer.h"
#include "execution/link_probe.h"
#include "execution/tuner.h"
#include "request/batch.h"
#include "request/request.h"
#include "topology/allreduce_cost.h"
#include "topology/topology.h"

namespace perseus {

struct ExecutionSettings {
  TunerSettings tuner;
  uint32_t first_stream = 0;                         // number of the first one's channel
  int64_t timeout_ns = 60 * kSecond;                 // 0 = off
  AlgorithmChoice algorithm;                         // of exact allreduces, between inner groups where there are any
  const Topology* topology = nullptr;                // asked when the first allreduce comes
  CodecSpec precision;                               // PERSEUS_ALLREDUCE_DTYPE's: of gradients inside a host, if asked
                                                     // for, and of those too small for the codec they ask for
  bool precision_chosen = false;                     // by the user
  std::array<CodecSpec, kAutoCodecs> auto_codecs;    // what auto chooses among, ordered as kAutoKinds
  bool measures = true;                              // else speeds are as told, and without them auto is exact
  double link_seconds_per_byte = 0;                  // 0 = measured
  int64_t link_check_ns = 0;                         // a measurement is repeated after this time; 0 = never
  std::function<void(const std::string& text)> log;  // for news
  GpuOperations gpu_operations = GpuOperations::kPerseus;  // who sums what stays on its GPUs
  bool gpu_codecs = false;                                 // GPUs encode what stays on them for that
  std::string nccl_library;                                // see nccl::Library::get()
  // May NCCL sum between this group's hosts, or does it? The same on all ranks before and after it has done so.
  std::function<bool()> nccl_between = [] { return false; };
  std::function<void(const std::string& text)> warn;
  std::function<void()> poll;                  // looks for bytes of peers, for who waits for them outside of a pass
  Residuals* residuals = nullptr;              // none = nothing is held back
  BucketObserver* observer = nullptr;          // none = nobody looks at buckets
  ThreadPool* threads = &ThreadPool::none();   // that encode and decode
  std::function<int64_t(int rank)> silent_ns;  // how long a rank of the world has given no sign of life
};

// What moves together: requests that are one run of bytes, or one tensor of an allgather or alltoall.
class Bucket final : public OutputSink {
 public:
  ExchangePlan plan;
  std::unique_ptr<Adasum> adasum;
  std::unique_ptr<HierarchicalAllreduce> hierarchical[3];  // made when first needed: see levels_
  std::unique_ptr<LowRankAllreduce> low_rank;
  std::unique_ptr<HierarchicalBroadcast> broadcast;  // likewise
  Staged* staged = nullptr;                          // one of these: then several exchanges take the place of `plan`
  int stages = -1;                                   // which of `hierarchical`, or the levels of `low_rank`; -1 = none
  Device device;                                     // of all its tensors
  CodecSpec codec;
  bool compressed_inside = false;  // with stages: not only between groups
  bool flushes = false;            // all that was held back goes along: then no codec
  std::vector<Residuals::Lease> residuals;
  std::vector<Entry*> entries;
  uint64_t number = 0;  // of the group's buckets, the same on all ranks
  Batch batch;
  std::vector<bool> begun_by;  // rolled back: the members that had begun it; else empty
  size_t bytes = 0;
  Output* output = nullptr;  // allgather, alltoall
  Byte* place = nullptr;     // the caller's memory for it, if it has that many bytes
  size_t place_bytes = 0;
  int64_t row_bytes = 0;
  std::vector<int64_t> tail_shape;

  // Of the entry's tensors on a device: what has to be loaded before the bucket begins, and may be stored after it.
  struct Image {
    cuda::Staging* staging;
    size_t tensor, begin, bytes;
    bool stores;
  };
  std::vector<Image> images;
  cuda::Copies copies;
  cuda::Images on_device;   // of all of them, where `device` says that they are reduced there
  cuda::Encoding encoding;  // of those that GPUs encode, which have no images

  // A part of a tensor that is read and, changed, written; where the two differ, written for the first time, most
  // likely.
  void add_piece(const Entry& entry, size_t tensor, size_t begin, size_t size);
  // Notes a tensor that is read.
  void reads(const Entry& entry, size_t tensor);
  // Is the memory there that it reads?
  bool loaded() const;
  // Gives what it has written to the devices.
  void store();
  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override
      PERSEUS_REQUIRES(progress_lock);
  void clear();
};

// How an allreduce or reduce-scatter of so many ranks reduces.
kernels::ReduceSpec reduction_of(const Description& description, DType dtype, size_t ranks);
// Is an exact reduction of so many bytes one among all ranks, even if there are stages?
bool is_flat(const Description& description, size_t bytes);

class Execution {
 public:
  // The members, as the group that moves the buckets of one stream, divided into these levels.
  using MakeGroup = std::function<std::unique_ptr<Group>(uint32_t stream, const Levels& levels)>;
  using OutputsOf = std::function<std::vector<Output>&(Entry*)>;

  // `ranks`: the members. `number`: of the process set, by which residuals are told apart. `automatic` outlives it.
  Execution(const ExecutionSettings& settings, std::vector<int> ranks, int me, uint32_t number, MakeGroup make_group,
            OutputsOf outputs_of, AutoCodecs* automatic);

  // Queues ready entries in their agreed order. Entries without bytes to move are finished at once. Where it throws,
  // some of the others are queued: see give_up().
  void add(const std::vector<Entry*>& ready, std::vector<Entry*>* finished, const Batch& batch = Batch())
      PERSEUS_REQUIRES(progress_lock);
  // Of the schedule under way only the first batches up to the fewest in `begun` (by member: how many it has begun)
  // will be finished: gives back this rank's other entries. All ranks have added as many batches as any has begun.
  void roll_back(const std::vector<uint64_t>& begun, std::vector<Entry*>* entries) PERSEUS_REQUIRES(progress_lock);
  // Does a bucket of a schedule wait since before `since_ns` for other ranks to begin it?
  bool waits_since(int64_t since_ns) const PERSEUS_REQUIRES(progress_lock);
  // Moves what can be moved; true when anything did.
  bool step(std::vector<Entry*>* finished) PERSEUS_REQUIRES(progress_lock);
  // Is an operation under way that no event of the Waker announces?
  bool polls() const PERSEUS_REQUIRES(progress_lock);
  // Throws Error(kTimeout) when an operation under way has not moved a byte for the time limit. Silence before
  // `since_ns` proves nothing: this process itself did not run then.
  void check_progress(int64_t now, int64_t since_ns) const PERSEUS_REQUIRES(progress_lock);
  // What moves now, and the ranks whose bytes it waits for or that do not take its own.
  struct UnderWay {
    std::vector<Entry*> entries;
    int64_t begun_ns;
    std::vector<int> ranks;
  };
  void find_under_way(std::vector<UnderWay>* found) const PERSEUS_REQUIRES(progress_lock);
  bool busy() const PERSEUS_REQUIRES(progress_lock) { return in_flight_ > 0 || !waiting_.empty(); }
  // Gives up everything queued and under way; each entry once.
  void abandon(std::vector<Entry*>* entries) PERSEUS_REQUIRES(progress_lock);
  uint64_t buckets() const PERSEUS_REQUIRES(progress_lock) { return buckets_done_; }
  Tuner& tuner() PERSEUS_REQUIRES(progress_lock) { return tuner_; }
  const Tuner& tuner() const PERSEUS_REQUIRES(progress_lock) { return tuner_; }
  // Memory beyond tensors, and what holds them.
  size_t staging_bytes() const PERSEUS_REQUIRES(progress_lock);

 private:
  struct Stream {
    std::unique_ptr<Group> group;                // made when first needed
    std::vector<std::unique_ptr<Bucket>> queue;  // [0] is under way
    Operation* operation = nullptr;              // that moves it; null = it has not begun
    CompressedBuffers compressed;
    int64_t moved_ns = 0;                     // the first look in vain after bytes moved; 0 = none yet
    int64_t begun_ns = 0, first_byte_ns = 0;  // of the bucket under way
    bool open = false;                        // it is of a schedule, and not all ranks have begun it, as far as we know
  };

  // ---- measuring.cc ----
  bool waits_for_speeds(const std::vector<Entry*>& ready) PERSEUS_REQUIRES(progress_lock);
  bool needs_speeds(const std::vector<Entry*>& ready) PERSEUS_REQUIRES(progress_lock);
  void begin_probe() PERSEUS_REQUIRES(progress_lock);
  void finish_probe(std::vector<Entry*>* finished) PERSEUS_REQUIRES(progress_lock);

  void place_in_buckets(const std::vector<Entry*>& ready, const Tuner::InForce& in_force, std::vector<Entry*>* finished,
                        const Batch& batch) PERSEUS_REQUIRES(progress_lock);
  std::unique_ptr<Bucket> fresh_bucket() PERSEUS_REQUIRES(progress_lock);
  // Bytes of one exchange in stages.
  size_t most_staged() PERSEUS_REQUIRES(progress_lock);
  // The levels of tensors that are reduced on their devices: where NCCL sums between hosts, all ranks are one inner
  // group.
  const Levels& device_levels() PERSEUS_REQUIRES(progress_lock);
  // The levels of gradients that stay inside hosts.
  const Levels& levels_by_host() PERSEUS_REQUIRES(progress_lock);
  // May NCCL sum an entry's tensors between hosts?
  bool is_for_nccl(const Entry& entry) PERSEUS_REQUIRES(progress_lock);
  // Are the tensors of an allreduce that stay on their device here encoded by it? Other ranks need not know.
  bool encodes_on_device(Entry* entry, bool sums_there) PERSEUS_REQUIRES(progress_lock);
  bool lock_pages(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  // Are the tensors of an allreduce, which stay on their devices, reduced there?
  bool reduces_on_device(const Entry& entry) PERSEUS_REQUIRES(progress_lock);
  void place(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  const Levels& levels_of_encoded(const Entry& entry, size_t tensor) PERSEUS_REQUIRES(progress_lock);
  void add_reduction(Entry* entry, size_t tensor, const CodecSpec& codec) PERSEUS_REQUIRES(progress_lock);
  void add_inside(Entry* entry, size_t tensor, const CodecSpec& codec) PERSEUS_REQUIRES(progress_lock);
  void add_adasum(Entry* entry, size_t tensor, const kernels::ReduceSpec& reduction) PERSEUS_REQUIRES(progress_lock);
  size_t run_bytes(size_t bytes) const PERSEUS_REQUIRES(progress_lock);
  void add_compressed(Entry* entry, size_t tensor, const Levels& levels, const CodecSpec& codec)
      PERSEUS_REQUIRES(progress_lock);
  void add_low_rank(Entry* entry, size_t tensor, const Levels& levels, const CodecSpec& codec)
      PERSEUS_REQUIRES(progress_lock);
  void take_residuals(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  void give_up_other_shapes(const Entry& entry) PERSEUS_REQUIRES(progress_lock);
  void choose_codecs(const Entry& entry) PERSEUS_REQUIRES(progress_lock);
  CodecSpec codec_of(const Entry& entry, size_t tensor) PERSEUS_REQUIRES(progress_lock);
  const WireFormat* format_of(const CodecSpec& codec) PERSEUS_REQUIRES(progress_lock);
  Algorithm algorithm_of(int stages, size_t bytes) PERSEUS_REQUIRES(progress_lock);
  void settle_algorithm(Bucket* bucket) PERSEUS_REQUIRES(progress_lock);
  const Levels& levels(bool undivided) PERSEUS_REQUIRES(progress_lock);
  size_t slice_bytes(CodecKind codec) const PERSEUS_REQUIRES(progress_lock);
  HierarchicalAllreduce& open_stages(Bucket* bucket, const Levels& levels, const WireFormat* format,
                                     const WireFormat* inside = nullptr) PERSEUS_REQUIRES(progress_lock);
  void add_broadcast(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  void add_reducescatter(Entry* entry) PERSEUS_REQUIRES(progress_lock);
  void add_gather(Entry* entry, size_t tensor) PERSEUS_REQUIRES(progress_lock);
  // What a bucket must be like to take another tensor.
  struct Fit {
    Fit(Device device, Collective collective, const kernels::ReduceSpec& reduction, int root = 0)
        : device(device), collective(collective), reduction(reduction), root(root) {}
    Device device;
    Collective collective;
    kernels::ReduceSpec reduction;
    int root;
    int stages = -1;  // see Bucket
    Algorithm algorithm = Algorithm::kPairwise;
    CodecSpec codec;
    bool compressed_inside = false;
    bool flushes = false;
    size_t most_bytes = SIZE_MAX;
  };
  // An open bucket of the same kind with room, else a new one; the entry waits for it.
  Bucket& bucket_for(Entry* entry, size_t bytes, const Fit& fit) PERSEUS_REQUIRES(progress_lock);
  Bucket& own_bucket(Entry* entry, size_t bytes, Device device) PERSEUS_REQUIRES(progress_lock);
  void close_all(const Batch& batch) PERSEUS_REQUIRES(progress_lock);
  void begin(Stream* stream, uint32_t index) PERSEUS_REQUIRES(progress_lock);
  std::unique_ptr<Bucket> end(Stream* stream) PERSEUS_REQUIRES(progress_lock);
  bool traced() const PERSEUS_REQUIRES(progress_lock) {
    return settings_.observer != nullptr && settings_.observer->on();
  }
  void trace(const Stream& stream, size_t index) const PERSEUS_REQUIRES(progress_lock);
  void report_silence(const Stream& stream) const PERSEUS_REQUIRES(progress_lock);

  const ExecutionSettings settings_;
  const std::vector<int> ranks_;
  const int me_;
  const uint32_t number_;
  const MakeGroup make_group_;
  const OutputsOf outputs_of_;
  AutoCodecs* const automatic_;

  Tuner tuner_ PERSEUS_GUARDED_BY(progress_lock);
  Tuner::InForce in_force_ PERSEUS_GUARDED_BY(progress_lock);  // for what is put into buckets just now
  // [0] undivided, [1] divided, [2] by host, [3] together; made when first needed.
  std::vector<Levels> levels_ PERSEUS_GUARDED_BY(progress_lock);
  // Between members of the group that are far apart; set with them.
  LinkCost link_cost_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<std::pair<CodecSpec, std::unique_ptr<WireFormat>>> formats_ PERSEUS_GUARDED_BY(progress_lock);
  const WholeFormat whole_;
  cuda::LastingMemory page_locked_ PERSEUS_GUARDED_BY(progress_lock);  // of what is held back of gradients on GPUs
  Residuals::Tensors tensors_ PERSEUS_GUARDED_BY(progress_lock);       // of one entry
  std::vector<CodecSpec> codecs_ PERSEUS_GUARDED_BY(progress_lock);    // likewise
  bool between_by_nccl_ PERSEUS_GUARDED_BY(progress_lock) = false;     // NCCL sums this entry's tensors between hosts
  // By gradient, at a percentage between 0 and 100: does it go by NCCL? Each one keeps to its way, so that its bits are
  // rounded alike in all steps.
  std::unordered_map<std::string, bool> ways_ PERSEUS_GUARDED_BY(progress_lock);
  int percent_of_ways_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int64_t owed_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // to NCCL, in bytes times percent

  std::unique_ptr<LinkProbe> probe_ PERSEUS_GUARDED_BY(progress_lock);  // under way
  // For it: what each round made ready, which is never fused with the next.
  struct Waiting {
    std::vector<Entry*> ready;
    Tuner::InForce in_force;
  };
  std::vector<Waiting> waiting_ PERSEUS_GUARDED_BY(progress_lock);

  std::vector<Stream> streams_ PERSEUS_GUARDED_BY(progress_lock);
  // Being filled, in order of their first entry.
  std::vector<std::unique_ptr<Bucket>> open_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<std::unique_ptr<Bucket>> free_ PERSEUS_GUARDED_BY(progress_lock);
  uint64_t buckets_started_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  uint64_t buckets_done_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int in_flight_ PERSEUS_GUARDED_BY(progress_lock) = 0;
};

}  // namespace perseus
