// Shards as exchanges among the members of a group.
#include "collective/inner_exchanges.h"

#include <algorithm>

#include "collective/steps.h"

namespace perseus {
namespace {

std::vector<size_t> bytes_of(const Levels& levels, const Shards& shards) {
  std::vector<size_t> bytes(levels.inner.size(), 0);
  for (size_t s = 0; s < shards.size(); ++s) bytes[s] = total_bytes(shards[s]);
  return bytes;
}

}  // namespace

void cut_into_shards(const Piece* pieces, size_t count, Shards* shards) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += pieces[i].bytes;
  size_t at = 0, offset = 0;  // a piece, and how much of it is already in a shard
  for (size_t s = 0; s < shards->size(); ++s) {
    for (size_t left = even_part(bytes, shards->size(), s).bytes; left > 0;) {
      const Piece& piece = pieces[at];
      const size_t run = std::min(left, piece.bytes - offset);
      (*shards)[s].push_back(Piece{piece.in + offset, piece.out + offset, run});
      left -= run;
      offset += run;
      if (offset < piece.bytes) continue;
      ++at;
      offset = 0;
    }
  }
}

void plan_inner_sum(const Levels& levels, const Shards& shards, const kernels::ReduceSpec& reduction,
                    ExchangePlan* plan) {
  plan->clear();
  plan->collective = Collective::kReduceScatter;
  plan->reduction = reduction;
  plan->parts = bytes_of(levels, shards);
  for (const std::vector<Piece>& shard : shards)
    for (const Piece& piece : shard) plan->pieces.push_back(Piece{piece.in, nullptr, piece.bytes});
  if (levels.carries()) plan->result = shards[static_cast<size_t>(levels.inner_me)];
}

void plan_inner_spread(const Levels& levels, const Shards& shards, DType dtype, ExchangePlan* plan) {
  plan->clear();
  plan->collective = Collective::kSpread;
  plan->reduction.dtype = dtype;
  plan->parts = bytes_of(levels, shards);
  if (levels.carries())
    for (const Piece& piece : shards[static_cast<size_t>(levels.inner_me)])
      plan->pieces.push_back(Piece{piece.out, nullptr, piece.bytes});
  for (const std::vector<Piece>& shard : shards)
    for (const Piece& piece : shard) plan->result.push_back(Piece{nullptr, piece.out, piece.bytes});
}

}  // namespace perseus
