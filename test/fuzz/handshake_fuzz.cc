// A handshake with somebody who does not know the secret: whatever comes, nothing is proven.
#include "fuzz.h"
#include "net/handshake.h"

using namespace perseus;
using perseus_fuzz::expect;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  perseus_fuzz::Input input(data, size);
  const uint8_t choices = input.byte();
  const auto side = choices % 2 == 0 ? Handshake::Side::kConnector : Handshake::Side::kListener;
  const Opening ours{1, 2, this_version(), 3, 0, 0, std::string(kNonceSize, 'n')};
  Handshake handshake(side, "a secret", "job", ours, choices % 4 < 2 ? Versions::kSame : Versions::kAny,
                      [](const Opening& theirs) { return theirs.rank == 7 ? "not that one" : ""; });
  if (choices % 8 < 4) handshake.open();
  if (choices % 16 < 8) {  // past the opening
    const std::string theirs = Opening{1, 2, this_version(), 3, 1, 0, std::string(kNonceSize, 'm')}.encode();
    handshake.feed(theirs.data(), theirs.size());
  }
  while (input.left() > 0 && handshake.wanted() > 0 && !handshake.refusal()) {
    const size_t piece = std::min({1 + input.choice(100), handshake.wanted(), input.left()});
    if (piece == 0) break;
    const std::vector<uint8_t> bytes = input.take(piece);
    handshake.feed(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    expect(!handshake.proven(), "who does not know the secret proves nothing");
  }
  const std::string ticket(reinterpret_cast<const char*>(data), size);
  expect(!ticket_holds(std::string(kProofSize, 's'), ticket), "who does not know the session has no ticket");
  return 0;
}
