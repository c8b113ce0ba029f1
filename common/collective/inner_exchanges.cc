// Shards as exchanges among the members of a group.
#include "collective/inner_exchanges.h"

namespace perseus {
namespace {

std::vector<size_t> bytes_of(const Levels& levels, const Shards& shards) {
  std::vector<size_t> bytes(levels.inner.size(), 0);
  for (size_t s = 0; s < shards.size(); ++s) bytes[s] = total_bytes(shards[s]);
  return bytes;
}

}  // namespace

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
