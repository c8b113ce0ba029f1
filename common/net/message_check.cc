#include "net/message_check.h"

#include "base/error.h"
#include "base/little_endian.h"
#include "kernels/crc32c.h"

namespace perseus {

void Checksum::add(const void* data, size_t n) { sum_ = kernels::crc32c(sum_, data, n); }

void Checksum::refuse(size_t n, const std::string& peer, uint64_t found, uint64_t sent) const {
  fail(ErrorKind::kIo, "[tcp] " + std::to_string(n) + " bytes of " + peer +
                           " have changed on their way: their CRC32C is " + std::to_string(found) + ", not " +
                           std::to_string(sent) +
                           "; if the script does not change tensors that are under way, look for errors of the " +
                           "network cards and of memory on both hosts (ethtool -S, dmesg)");
}

void AuthenticationCode::begin(size_t n) {
  const uint64_t head[2] = {number_++, n};
  hash_.add(head, sizeof head);
}

std::string AuthenticationCode::behind(std::string_view first, std::string_view second) {
  begin(first.size() + second.size());
  add(first.data(), first.size());
  add(second.data(), second.size());
  std::string code;
  put_u64(&code, finish());
  return code;
}

std::string AuthenticationCode::refusal(size_t n) {
  return "a message of " + std::to_string(n) +
         " bytes with a wrong authentication code: it has changed on its way, or somebody else has sent it; look for " +
         "errors of the network cards and of memory on both hosts (ethtool -S, dmesg), and for who else can send " +
         "packets there (docs/security.md)";
}

void AuthenticationCode::refuse(size_t n, const std::string& peer, uint64_t, uint64_t) const {
  fail(ErrorKind::kIo, "[tcp] from " + peer + " came " + refusal(n));
}

}  // namespace perseus
