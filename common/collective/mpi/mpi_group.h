// A Group whose collectives an MPI library carries out, on a communicator of its own (PERSEUS_CPU_OPERATIONS=mpi). Data
// passes through staging memory, round by round: MPI counts in ints, buckets are scattered over tensors, and a request
// of MPI cannot be cancelled, so it must never see memory that belongs to a tensor.
#pragma once

#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/group.h"
#include "mpi/library.h"

namespace perseus {

class MpiGroup final : public Group, private Operation {
 public:
  // `communicator`: of `members`, of which we are number `me`; used by nobody else. `library` outlives the group.
  // `round_bytes`: of all members' messages of one round together.
  MpiGroup(const mpi::Library& library, mpi::Handle communicator, int members, int me,
           size_t round_bytes = kRoundBytes);
  ~MpiGroup() override;

  bool serves(const Work& work) const override PERSEUS_REQUIRES(progress_lock);
  // What MPI has begun, it ends.
  bool rolls_back(const Work&) const override PERSEUS_REQUIRES(progress_lock) { return false; }
  Operation& plan(const Work& work) override PERSEUS_REQUIRES(progress_lock);
  size_t staging_bytes() const override PERSEUS_REQUIRES(progress_lock);

 private:
  static constexpr size_t kRoundBytes = 16 * 1024 * 1024;
  static constexpr size_t kRounds = 2;  // under way at once: while one is on the wire another is packed or unpacked

  // What goes to each member or comes from it, one part after the other.
  struct Parts {
    std::vector<size_t> bytes, begin;
    void assign(const std::vector<size_t>& sizes);
    size_t longest() const;
  };
  // Slices of all parts, in memory that MPI may use until the request has ended.
  struct Round {
    std::vector<Byte> out, in;
    std::vector<int> out_counts, out_places, in_counts, in_places;
    mpi::Handle request = nullptr;
    bool under_way = false;
  };

  bool step() override PERSEUS_REQUIRES(progress_lock);
  bool done() const override PERSEUS_REQUIRES(progress_lock) { return done_; }
  void abort() noexcept override PERSEUS_REQUIRES(progress_lock);
  bool wakes() const override PERSEUS_REQUIRES(progress_lock) { return done_; }
  std::vector<int> waiting_for() const override PERSEUS_REQUIRES(progress_lock);

  Round& fresh(std::unique_ptr<Round>* round) const;
  bool ended(Round* round) const;
  void announce_sizes() PERSEUS_REQUIRES(progress_lock);
  void take_sizes() PERSEUS_REQUIRES(progress_lock);
  void set_rounds(size_t longest, size_t parts) PERSEUS_REQUIRES(progress_lock);
  void begin_round() PERSEUS_REQUIRES(progress_lock);
  void begin_allreduce(Round* round) PERSEUS_REQUIRES(progress_lock);
  void begin_broadcast(Round* round) PERSEUS_REQUIRES(progress_lock);
  void begin_reduce_scatter(Round* round) PERSEUS_REQUIRES(progress_lock);
  void begin_spread(Round* round) PERSEUS_REQUIRES(progress_lock);
  void begin_alltoall(Round* round) PERSEUS_REQUIRES(progress_lock);
  void end_round() PERSEUS_REQUIRES(progress_lock);

  size_t slice(size_t bytes, uint64_t round) const PERSEUS_REQUIRES(progress_lock);
  // Counts the slices of a round in units of so many bytes; returns their bytes.
  size_t cut(const Parts& parts, uint64_t round, size_t unit, std::vector<int>* counts, std::vector<int>* places) const
      PERSEUS_REQUIRES(progress_lock);
  void pack(uint64_t round, const Parts& parts, std::vector<Byte>* out) const PERSEUS_REQUIRES(progress_lock);
  void pack(size_t begin, size_t bytes, Byte* packed) const PERSEUS_REQUIRES(progress_lock);
  void unpack(const Byte* packed, size_t begin, size_t bytes, const std::vector<Piece>& target) const
      PERSEUS_REQUIRES(progress_lock);

  const mpi::Library& library_;
  const mpi::Handle communicator_;
  const int members_, me_;
  const size_t round_bytes_;

  const ExchangePlan* plan_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  OutputSink* sink_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  Parts sent_ PERSEUS_GUARDED_BY(progress_lock);
  Parts received_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Piece> gathered_ PERSEUS_GUARDED_BY(progress_lock);   // the output, where sizes vary
  std::unique_ptr<Round> sizes_ PERSEUS_GUARDED_BY(progress_lock);  // under way where members announce theirs
  std::unique_ptr<Round> rounds_[kRounds] PERSEUS_GUARDED_BY(progress_lock);
  size_t slice_bytes_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // of a part in a round
  uint64_t begun_ PERSEUS_GUARDED_BY(progress_lock) = 0;      // rounds
  uint64_t ended_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  uint64_t count_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  bool done_ PERSEUS_GUARDED_BY(progress_lock) = true;
};

}  // namespace perseus
