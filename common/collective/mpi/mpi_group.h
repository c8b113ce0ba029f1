// A Group whose collectives an MPI library carries out, on a communicator of its own (PERSEUS_CPU_OPERATIONS=mpi). Data
// passes through staging memory, round by round: MPI counts in ints, buckets are scattered over tensors, and a request
// of MPI cannot be cancelled, so it must never see memory that belongs to a tensor. Used by one progress engine.
#pragma once

#include <memory>
#include <vector>

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

  bool serves(const Work& work) const override;
  // What MPI has begun, it ends.
  bool rolls_back(const Work&) const override { return false; }
  Operation& plan(const Work& work) override;
  size_t staging_bytes() const override;

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

  bool step() override;
  bool done() const override { return done_; }
  void abort() noexcept override;
  bool wakes() const override { return done_; }
  std::vector<int> waiting_for() const override;

  Round& fresh(std::unique_ptr<Round>* round) const;
  bool ended(Round* round) const;
  void announce_sizes();
  void take_sizes();
  void set_rounds(size_t longest, size_t parts);
  void begin_round();
  void begin_allreduce(Round* round);
  void begin_broadcast(Round* round);
  void begin_reduce_scatter(Round* round);
  void begin_spread(Round* round);
  void begin_alltoall(Round* round);
  void end_round();

  size_t slice(size_t bytes, uint64_t round) const;
  // Counts the slices of a round in units of so many bytes; returns their bytes.
  size_t cut(const Parts& parts, uint64_t round, size_t unit, std::vector<int>* counts, std::vector<int>* places) const;
  void pack(uint64_t round, const Parts& parts, std::vector<Byte>* out) const;
  void pack(size_t begin, size_t bytes, Byte* packed) const;
  void unpack(const Byte* packed, size_t begin, size_t bytes, const std::vector<Piece>& target) const;

  const mpi::Library& library_;
  const mpi::Handle communicator_;
  const int members_, me_;
  const size_t round_bytes_;

  const ExchangePlan* plan_ = nullptr;
  OutputSink* sink_ = nullptr;
  Parts sent_, received_;
  std::vector<Piece> gathered_;   // the output, where sizes vary
  std::unique_ptr<Round> sizes_;  // under way where members announce theirs
  std::unique_ptr<Round> rounds_[kRounds];
  size_t slice_bytes_ = 0;  // of a part in a round
  uint64_t begun_ = 0, ended_ = 0, count_ = 0;
  bool done_ = true;
};

}  // namespace perseus
