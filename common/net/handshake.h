// How two processes of one job prove to each other that they know its secret: as bytes, which the store, TCP and shared
// memory carry over their own connections. A Handshake is used by one thread at a time. Numbers are little-endian.
//
//   handshake = opening opening answer verdict
//   opening   = magic:u32 format:u32 version:32B epoch:u32 rank:u32 channel:u64 nonce:32B   ; each side's, in any order
//   answer    = proof:32B                  ; the connector knows the secret, …
//   verdict   = proof:32B                  ; … and so does the listener; or zeros, after which it closes
//   ticket    = opening                    ; of a later connection between the two; its nonce is a proof
//
// Proofs of a handshake cover the side that makes them, the job and both openings to the last bit, so that a proof is
// worth nothing on another connection, for another purpose, or sent back. A listener proves nothing to a connector that
// has not proved itself. What comes before a proof has a fixed size, and decides about nothing but the refusal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "base/version.h"
#include "net/auth.h"

namespace perseus {

constexpr size_t kNonceSize = 32;
constexpr size_t kProofSize = 32;
constexpr size_t kOpeningHead = 8 + kVersionField;  // tells whether the two understand each other
constexpr size_t kOpeningSize = kOpeningHead + 16 + kNonceSize;

// What one side says about itself.
struct Opening {
  uint32_t magic = 0;   // what the connection is for
  uint32_t format = 0;  // numbers the grammar of what follows
  std::string version = this_version();
  uint32_t epoch = 0;
  int rank = 0;
  uint64_t channel = 0;  // of a ticket
  std::string nonce;

  std::string encode() const;
};

struct Refusal {
  enum class Kind { kNone, kForeign, kFormat, kVersion, kEpoch, kRank, kSecret, kImpostor };
  Kind kind = Kind::kNone;
  std::string why;  // "it runs Perseus …"

  explicit operator bool() const { return kind != Kind::kNone; }
};

// Whether sides of different versions may talk: they understand each other if the format is the same.
enum class Versions { kSame, kAny };

// Reads an opening, of which `bytes` may be only the first part, and compares it with `ours`. Refuses as soon as the
// bytes suffice for that.
Refusal read_opening(const std::string& bytes, const Opening& ours, Versions versions, Opening* theirs);

class Handshake {
 public:
  enum class Side { kConnector, kListener };
  // Asked about the other side's opening when it has come, and by a listener once more when it is proven: "" = go on,
  // else why not.
  using Admit = std::function<std::string(const Opening& theirs)>;

  // Without a nonce in `ours`, the handshake draws one. Empty secrets are for ranks that are threads of one process:
  // whoever listens to others refuses them.
  Handshake(Side side, std::string secret, std::string job, Opening ours, Versions versions = Versions::kSame,
            Admit admit = {});

  // Our opening, to be sent before anything has come. The side that does not call this sends it in its first reply.
  std::string open();
  // How many bytes may come before the next reply: read no more, since what comes after them is not ours to look at.
  size_t wanted() const;
  // Takes bytes that have come, in pieces of any size, and returns what to send, also where it refuses.
  std::string feed(const char* bytes, size_t size);

  bool proven() const { return stage_ == Stage::kProven; }
  const Refusal& refusal() const { return refusal_; }
  // The other side's words; to be believed once proven().
  const Opening& theirs() const { return theirs_; }
  // Once proven(): a secret of these two and this handshake, from which tickets and keys of messages are made.
  std::string session() const;

 private:
  enum class Stage { kAwaitsOpening, kAwaitsProof, kProven, kRefused };

  std::string on_opening();
  std::string on_answer();
  std::string on_verdict();
  std::string refuse(Refusal::Kind kind, std::string why, std::string reply = {});
  std::string proof_by(Side side) const;
  bool proves(const std::string& proof, Side side) const;
  std::string& said_by(Side side) { return side == Side::kConnector ? by_connector_ : by_listener_; }

  const Side side_;
  const std::string secret_, job_;
  Opening ours_, theirs_;
  const Versions versions_;
  const Admit admit_;
  Stage stage_ = Stage::kAwaitsOpening;
  bool opened_ = false;                     // our opening is sent
  std::string by_connector_, by_listener_;  // both openings, as they were sent
  std::string in_;                          // the part of a message that has come
  Refusal refusal_;
};

// The ticket to another connection of two sides that have a session: `ours`, with a proof in place of the nonce.
std::string make_ticket(const std::string& session, Opening ours);
bool ticket_holds(const std::string& session, const std::string& ticket);

// The key of the authentication codes behind what rank `from` sends to rank `to` on the connection `name` of two sides
// that have a session.
Digest message_key(const std::string& session, int from, int to, const std::string& name);

}  // namespace perseus
