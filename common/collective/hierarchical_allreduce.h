// An allreduce in stages: reduce-scatter inside each host, an allreduce of every shard across the hosts, and an
// allgather inside each host ("2D"; with one shard, "two-level"). The middle stage may be encoded, and so may the
// others: the allgather then passes on the bytes that came across. Every stage reduces in rank order, so the bits
// depend on the topology alone.
#pragma once

#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/compressed_allreduce.h"
#include "collective/float_staging.h"
#include "collective/inner_exchanges.h"
#include "collective/staged.h"
#include "cuda/encoding.h"

namespace perseus {

class HierarchicalAllreduce final : public Staged {
 public:
  explicit HierarchicalAllreduce(const Levels& levels);

  // Begins anew. With a `format`, what is added must be of a floating type, to be summed: as float32 throughout.
  // `inside`, which needs a `format`: of contributions to the reduce-scatter, null = exact. Formats stay until the end.
  void start(const kernels::ReduceSpec& reduction, const WireFormat* format, const WireFormat* inside = nullptr)
      PERSEUS_REQUIRES(progress_lock);

  // After start(), without a format: nothing goes across, and the reduction is that of each inner group.
  void inside_only() PERSEUS_REQUIRES(progress_lock) { inside_only_ = true; }

  // Exact: a piece of a tensor. Where `in` is not `out`, they do not overlap.
  void add(const Piece& piece) PERSEUS_REQUIRES(progress_lock) { pieces_.push_back(piece); }

  // Encoded: a run of whole chunks of a tensor (but for its end). `number` of the first one plus `salt` decides who
  // owns them, which therefore depends on neither bucket nor stream.
  struct Run {
    Piece piece;
    float* residual = nullptr;  // of the run's elements; null = none is kept
    float* result_residual = nullptr;
    float carry = 1.0F;     // see CompressedChunk
    Momenta momenta;        // likewise
    Byte* slots = nullptr;  // of its chunks, where a GPU encodes it
    bool joined = false;    // this rank has, and keeps no residuals although the format does
    uint64_t number = 0;
    uint64_t salt = 0;
    uint64_t step = 0;
  };
  void add(const Run& run) PERSEUS_REQUIRES(progress_lock);
  // Does this member sum and send the run's chunk that begins with this element?
  bool carries(const Run& run, size_t begin) const {
    const uint64_t shards = static_cast<uint64_t>(levels_.shards);
    return levels_.carries() &&
           (run.salt + run.number + begin / kWireChunk) % shards == static_cast<uint64_t>(levels_.inner_me);
  }

  // Before the first next(), where there is no format: how shards are reduced across.
  void use(Algorithm algorithm) PERSEUS_REQUIRES(progress_lock) { algorithm_ = algorithm; }
  // Before the first next(), where there is a format: see CompressedAllreduce.
  void use(CompressedBuffers* buffers, ThreadPool* threads) PERSEUS_REQUIRES(progress_lock);
  // Who encodes runs with slots, of which it has the chunks that this member carries: their sums, where it is not alone
  // inside, which then are on the device.
  void use(cuda::Encoding* encoding) PERSEUS_REQUIRES(progress_lock) { encoding_ = encoding; }
  bool ready() override PERSEUS_REQUIRES(progress_lock) {
    return encoding_ == nullptr || (stage_ == Stage::kInner && works_inside()) || encoding_->encoded();
  }
  bool next(Step* step) override PERSEUS_REQUIRES(progress_lock);
  int64_t codec_ns() const override PERSEUS_REQUIRES(progress_lock);
  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override
      PERSEUS_REQUIRES(progress_lock);

 private:
  enum class Stage { kInner, kAcross, kEncoded, kBack, kSpread, kDone };

  void add_floats(const Run& run) PERSEUS_REQUIRES(progress_lock);
  bool next_encoded(Step* step, CompressedAllreduce* compressed, Level level) const PERSEUS_REQUIRES(progress_lock);
  void cut_into_shards();
  void plan_inner();
  void plan_across();
  void reduce_alone() const;
  bool works_inside() const { return levels_.inner.size() > 1; }
  const std::vector<Piece>& shard() const { return shards_[static_cast<size_t>(levels_.inner_me)]; }

  const Levels levels_;
  const Level across_;  // which exchange goes across
  kernels::ReduceSpec reduction_;
  const WireFormat* format_ = nullptr;
  const WireFormat* inside_ = nullptr;  // null also where we are alone inside
  bool inside_only_ = false;
  Algorithm algorithm_ = Algorithm::kPairwise;
  Stage stage_ = Stage::kInner;
  std::vector<Piece> pieces_;
  Shards shards_;
  std::unique_ptr<CompressedAllreduce> compressed_;         // across; where we carry a shard
  std::unique_ptr<CompressedAllreduce> compressed_inside_;  // its owners are those that carry a shard
  std::vector<Piece> results_;                              // encoded, of our shard's chunks in order
  cuda::Encoding* encoding_ = nullptr;
  FloatStaging staging_;
  std::vector<Run> staged_;  // of other types than float32, until there is memory
  ExchangePlan plan_;
};

}  // namespace perseus
