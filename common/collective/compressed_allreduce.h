// The sum of gradients that travel encoded: every chunk has an owner, which gets everybody's encoding of it, adds what
// those decode to in rank order, and sends the encoded result to all. So a lossy format rounds once in and once out,
// whatever the number of ranks; the owner and every sender go on with what the others decode, so all end with the same
// bits, and who owns what changes none of them. Two exchanges of variable size, between which the sums may go
// elsewhere.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "base/thread_pool.h"
#include "collective/exchange_plan.h"
#include "collective/wire_format.h"

namespace perseus {

// Momentum correction, where `velocity` is not null: instead of a gradient, velocity = momentum * velocity + gradient
// is encoded, of which what is sent becomes zero if it `masks`. The output is the result without momentum *
// last_result, so that an optimizer that keeps v = momentum * v + output has the result as its v.
struct Momenta {
  float* velocity = nullptr;
  float* last_result = nullptr;  // of all members
  float momentum = 0.0F;
  bool masks = false;

  Momenta from(size_t begin) const {
    return velocity == nullptr ? Momenta() : Momenta{velocity + begin, last_result + begin, momentum, masks};
  }
  // Null where it does not mask.
  float* masked() const { return masks ? velocity : nullptr; }
};

struct CompressedChunk {
  const float* in = nullptr;
  float* out = nullptr;              // may be `in`
  float* residual = nullptr;         // of what this rank sends; null = none is kept
  float* result_residual = nullptr;  // of what the owner sends; null = none is kept
  float carry = 1.0F;                // what both residuals are multiplied by first
  Byte* slot = nullptr;  // not null: a GPU has encoded it here, and will find the result here, instead of in and out
  Momenta momenta;
  // A rank that has joined keeps no residuals: sums of others that it sends, and its results, travel as they are.
  bool whole = false, result_whole = false;
  uint32_t count = 0;             // <= kWireChunk
  uint32_t result = 0;            // see CompressedAllreduce::note_results
  uint64_t step = 0;              // see WireFormat::encode
  ChunkSelection selection = {};  // where the format selects
};

// What an operation needs beside its tensors while it is under way; they can take turns.
struct CompressedBuffers {
  std::vector<Byte> sent, own, received;
  std::vector<Byte> passed_on;  // results of elsewhere, see CompressedAllreduce::spread
  std::vector<float> scratch;
  std::vector<float> staging;      // see FloatStaging
  std::vector<uint16_t> selected;  // indices of elements, see WireFormat::select

  size_t bytes() const {
    return sent.capacity() + own.capacity() + received.capacity() + passed_on.capacity() +
           (scratch.capacity() + staging.capacity()) * sizeof(float) + selected.capacity() * sizeof(uint16_t);
  }
};

class CompressedAllreduce final : public OutputSink {
 public:
  CompressedAllreduce(int members, int me);

  // Begins anew. Encoded is prescale * x; a result is the sum times `factor`. `format` must stay until the end. `last`:
  // outputs are not read again soon.
  void start(const WireFormat& format, float prescale, float factor, bool last) PERSEUS_REQUIRES(progress_lock);
  // After start(): encoded results are noted in (*results)[chunk.result]; their bytes stay until the buffers are used
  // again.
  void note_results(std::vector<Piece>* results) PERSEUS_REQUIRES(progress_lock) { results_ = results; }
  // After start(), where the sums are only a part of what is to be summed: next() leaves them in `out` of the own
  // chunks, and is null before the second exchange, which is spread().
  void sum_only() PERSEUS_REQUIRES(progress_lock) { sums_only_ = true; }
  // The results of the own chunks, encoded in a format that may be another, go to all; next() decodes them. The own
  // chunks are left alone.
  const ExchangePlan* spread(const WireFormat& format, const std::vector<Piece>& results)
      PERSEUS_REQUIRES(progress_lock);
  // Before the first next(): nobody else uses the buffers until the end, and `threads`, where there are some to share
  // the chunks with, while next() runs. What is sent depends on neither.
  void use(CompressedBuffers* buffers, ThreadPool* threads) PERSEUS_REQUIRES(progress_lock);
  // The chunks that are added next belong to another slice.
  void begin_slice() PERSEUS_REQUIRES(progress_lock) { slices_.push_back(order_.size()); }
  void add(int owner, const CompressedChunk& chunk) PERSEUS_REQUIRES(progress_lock) {
    std::vector<CompressedChunk>& chunks = chunks_[static_cast<size_t>(owner)];
    if (format_->selects()) order_.push_back({static_cast<uint32_t>(owner), static_cast<uint32_t>(chunks.size())});
    chunks.push_back(chunk);
  }
  // The next exchange to run, whose sizes vary, or null when all outputs are written (but see sum_only).
  const ExchangePlan* next() PERSEUS_REQUIRES(progress_lock);
  int64_t codec_ns() const PERSEUS_REQUIRES(progress_lock) { return codec_ns_; }

  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override
      PERSEUS_REQUIRES(progress_lock);

 private:
  enum class Stage { kEncode, kReduce, kFinish };

  // A chunk in chunks_.
  struct Place {
    uint32_t owner, index;
  };
  // Chunks of one owner that one thread works on, and where it puts their encodings.
  struct Task {
    int owner;
    size_t begin, end;
    Byte* room = nullptr;
    size_t bytes = 0;  // that it has put there
    size_t found = 0;  // where in encoded_ the first of them is, of results
  };

  CompressedChunk& chunk_at(const Place& place) { return chunks_[place.owner][place.index]; }
  void select();
  void prepare_to_select(CompressedChunk* chunk) const;
  void encode();
  void encode(size_t thread, Task* task);
  void reduce();
  void reduce(size_t thread, Task* task);
  void send_results(size_t bytes);
  void finish();
  void give_out(const Byte* encoded, const CompressedChunk& chunk, size_t thread) const;
  std::vector<Byte>& received();
  struct Load {
    size_t chunks = 0, floats = 0;
    void add(const Load& more) {
      chunks += more.chunks;
      floats += more.floats;
    }
  };
  template <class Body>
  void in_parallel(const Load& load, const Body& body);
  Load load_of(int owner) const;
  size_t chunks_in_task(const Load& load) const;
  void cut_into_tasks(int owner, size_t together);
  void give_room(bool own, std::vector<Byte>* buffer);
  float* scratch(size_t thread) const { return buffers_->scratch.data() + 2 * kWireChunk * thread; }

  const int members_, me_;
  const WireFormat* format_ = nullptr;
  float prescale_ = 1, factor_ = 1;
  bool last_ = false, sums_only_ = false;
  std::vector<Piece>* results_ = nullptr;
  Stage stage_ = Stage::kEncode;
  std::vector<std::vector<CompressedChunk>> chunks_;  // by owner
  std::vector<Place> order_;                          // of the chunks of all owners; where the format selects
  std::vector<size_t> slices_;                        // where in order_ each begins
  std::vector<ChunkSelection> slice_;
  ExchangePlan plan_;
  CompressedBuffers* buffers_ = nullptr;
  ThreadPool* threads_ = nullptr;
  std::vector<Task> tasks_;
  std::vector<size_t> received_bytes_;           // by member
  std::vector<const Byte*> encoded_;             // of the own chunks, by chunk and member; or of everybody's results
  std::vector<std::vector<const Byte*>> parts_;  // by thread: of the chunk that it reduces, by member
  int64_t codec_ns_ = 0;
};

}  // namespace perseus
