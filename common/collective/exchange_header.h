// First on every link of every exchange: both ends check that they are doing the same thing. Plain data.
#pragma once

#include <cstdint>

#include "collective/exchange_plan.h"

namespace perseus {

struct ExchangeHeader {
  uint32_t magic = 0;
  uint32_t epoch = 0;
  uint32_t group = 0;
  uint32_t stream = 0;
  uint64_t sequence = 0;
  uint8_t collective = 0, dtype = 0, op = 0, algorithm = 0;
  uint32_t unused2 = 0;
  uint64_t bytes = 0;         // of the whole buffer (allreduce, reduce-scatter, broadcast), 0 where it differs per rank
  uint64_t result_bytes = 0;  // that the sender is going to send as results on this link
  uint64_t rows = 0;          // allgather, alltoall: of result_bytes
  uint64_t schedule = 0;      // fingerprint of the schedule that the exchange belongs to, 0 = negotiated online
};
static_assert(sizeof(ExchangeHeader) == 64, "one cache line");

// Fills in what the plan says and every link's header shares.
void describe(const ExchangePlan& plan, ExchangeHeader* header);
// Throws Error(kInternal) where member `from` of the group does something else than we, sizes of results aside.
void check_header(const ExchangeHeader& in, const ExchangeHeader& out, int from);
// Throws Error(kInternal) where member `from` announces results of another size than `expected`.
void check_results(const ExchangeHeader& in, uint64_t expected, int from);

}  // namespace perseus
