// Where a rank can be reached, as it tells others through the store.
#include "fuzz.h"
#include "transport/tcp_endpoint.h"

using namespace perseus;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const TcpEndpoint theirs = TcpEndpoint::decode(std::string(reinterpret_cast<const char*>(data), size), 1);
    const TcpEndpoint again = TcpEndpoint::decode(theirs.encode(), 1);
    perseus_fuzz::expect(again.encode() == theirs.encode(), "an endpoint is written as it was read");
    candidates(theirs, again);
    stripes(theirs, again);
  } catch (const Error&) {
  }
  return 0;
}
