// What collectives in stages exchange inside a group: a sum of which some members get a shard each, and the way back.
// Pure functions.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/exchange_plan.h"
#include "topology/levels.h"

namespace perseus {

// The pieces of every inner member that carries a shard, in order; `in` and `out` of the whole buffer.
using Shards = std::vector<std::vector<Piece>>;

// Appends an even part of the pieces in a row to every shard.
void cut_into_shards(const Piece* pieces, size_t count, Shards* shards);
// Sums all shards into `out` of the members that carry them.
void plan_inner_sum(const Levels& levels, const Shards& shards, const kernels::ReduceSpec& reduction,
                    ExchangePlan* plan);
// Copies `out` of every shard from the member that carries it to all.
void plan_inner_spread(const Levels& levels, const Shards& shards, DType dtype, ExchangePlan* plan);

}  // namespace perseus
