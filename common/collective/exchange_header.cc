// Composes and checks the headers of exchanges.
#include "collective/exchange_header.h"

#include <string>

#include "base/error.h"

namespace perseus {
namespace {

constexpr uint32_t kMagic = 0x50584348;  // "PXCH"

std::string text_of(const ExchangeHeader& h) {
  return "group " + std::to_string(h.group) + " stream " + std::to_string(h.stream) + " operation " +
         std::to_string(h.sequence) + " collective " + std::to_string(h.collective) + " algorithm " +
         std::to_string(h.algorithm) + " of " + std::to_string(h.bytes) + " bytes" +
         (h.schedule == 0 ? "" : " of schedule " + std::to_string(h.schedule));
}

}  // namespace

void describe(const ExchangePlan& plan, ExchangeHeader* header) {
  header->magic = kMagic;
  header->collective = static_cast<uint8_t>(plan.collective);
  header->algorithm = static_cast<uint8_t>(plan.algorithm);
  header->dtype = static_cast<uint8_t>(plan.reduction.dtype);
  header->op = static_cast<uint8_t>(plan.reduction.op);
  header->bytes = plan.sizes_vary() ? 0 : plan.bytes();
}

void check_header(const ExchangeHeader& in, const ExchangeHeader& out, int from) {
  const bool same = in.magic == out.magic && in.epoch == out.epoch && in.group == out.group &&
                    in.stream == out.stream && in.sequence == out.sequence && in.collective == out.collective &&
                    in.algorithm == out.algorithm && in.dtype == out.dtype && in.op == out.op &&
                    in.bytes == out.bytes && in.schedule == out.schedule;
  if (same) return;
  fail(ErrorKind::kInternal, "[collective] member " + std::to_string(from) + " of the group sent the header of " +
                                 text_of(in) + ", expected " + text_of(out));
}

void check_results(const ExchangeHeader& in, uint64_t expected, int from) {
  if (in.result_bytes == expected) return;
  fail(ErrorKind::kInternal, "[collective] member " + std::to_string(from) + " of the group has results of " +
                                 std::to_string(in.result_bytes) + " bytes, expected " + std::to_string(expected));
}

}  // namespace perseus
