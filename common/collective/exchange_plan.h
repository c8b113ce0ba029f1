// What one collective does to which memory: plain data that every implementation of Group carries out.
#pragma once

#include <cstdint>
#include <vector>

#include "base/progress_lock.h"
#include "kernels/kernels.h"
#include "topology/algorithm.h"
#include "transport/pieces.h"

namespace perseus {

// kSpread: an allgather of parts whose sizes all know, into tensors; the own part lies there already.
enum class Collective : uint8_t { kAllreduce, kReduceScatter, kAllgather, kBroadcast, kAlltoall, kSpread };

// Everything but the per-rank vectors must agree on all ranks.
struct ExchangePlan {
  Collective collective = Collective::kAllreduce;
  Algorithm algorithm = Algorithm::kPairwise;  // allreduce; the others are pairwise
  kernels::ReduceSpec reduction;               // allreduce, reduce-scatter
  std::vector<Piece> pieces;        // allreduce, broadcast: in/out. Reduce-scatter: in (out unused). Else: in only
  std::vector<size_t> parts;        // reduce-scatter, spread: bytes of every rank's part of the whole, in rank order
  std::vector<Piece> result;        // reduce-scatter: out of our part; spread: out of the whole
  int root = 0;                     // broadcast: index in the group
  std::vector<size_t> send_bytes;   // alltoall: for every rank, consecutive in the pieces
  std::vector<uint64_t> send_rows;  // alltoall: the same in rows; allgather: [0] = rows of this rank

  void clear() {
    algorithm = Algorithm::kPairwise;
    pieces.clear();
    parts.clear();
    result.clear();
    send_bytes.clear();
    send_rows.clear();
  }
  // Do sizes differ from rank to rank, so that each announces its own?
  bool sizes_vary() const { return collective == Collective::kAllgather || collective == Collective::kAlltoall; }
  // Of the whole buffer, where all ranks know its size.
  size_t bytes() const { return total_bytes(collective == Collective::kSpread ? result : pieces); }
};

// Makes room for an allgather's or alltoall's output once all sizes are known.
class OutputSink {
 public:
  virtual ~OutputSink() = default;
  // bytes[i], rows[i] come from group rank i. Returns memory for all of it, in rank order.
  virtual Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows)
      PERSEUS_REQUIRES(progress_lock) = 0;
};

}  // namespace perseus
