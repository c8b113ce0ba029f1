// The stages of a handshake and what its proofs are made over.
#include "net/handshake.h"

#include <climits>
#include <utility>

#include "base/little_endian.h"
#include "net/auth.h"

namespace perseus {
namespace {

constexpr const char* kSessionLabel = "perseus session";
constexpr const char* kMessagesLabel = "perseus messages";
constexpr const char* kTicketLabel = "perseus ticket";

const char* label_of(Handshake::Side side) {
  return side == Handshake::Side::kConnector ? "perseus connector" : "perseus listener";
}

}  // namespace

std::string Opening::encode() const {
  std::string bytes;
  put_u32(&bytes, magic);
  put_u32(&bytes, format);
  bytes += version_field(version);
  for (const uint32_t number :
       {epoch, static_cast<uint32_t>(rank), static_cast<uint32_t>(channel), static_cast<uint32_t>(channel >> 32)})
    put_u32(&bytes, number);
  return bytes + nonce;
}

Refusal read_opening(const std::string& bytes, const Opening& ours, Versions versions, Opening* theirs) {
  using Kind = Refusal::Kind;
  if (bytes.size() < 4) return {};
  theirs->magic = get_u32(bytes.data());
  if (theirs->magic != ours.magic) return {Kind::kForeign, "it did not send the hello of a rank"};
  if (bytes.size() < kOpeningHead) return {};
  theirs->format = get_u32(bytes.data() + 4);
  theirs->version = version_of_field(bytes.substr(8, kVersionField));
  if (versions == Versions::kSame && theirs->version != ours.version)
    return {Kind::kVersion, "it runs Perseus " + theirs->version + ", expected " + ours.version +
                                ": install the same Perseus on every host"};
  if (theirs->format != ours.format)
    return {Kind::kFormat, "it runs Perseus " + theirs->version + ", this process Perseus " + ours.version +
                               ": they do not understand each other (format " + std::to_string(theirs->format) +
                               ", not " + std::to_string(ours.format) + "); install the same Perseus on every host"};
  if (bytes.size() < kOpeningSize) return {};
  const char* const numbers = bytes.data() + kOpeningHead;
  const uint32_t rank = get_u32(numbers + 4);
  if (rank > INT_MAX) return {Kind::kRank, "its hello names no rank"};
  theirs->epoch = get_u32(numbers);
  theirs->rank = static_cast<int>(rank);
  theirs->channel = get_u32(numbers + 8) | uint64_t{get_u32(numbers + 12)} << 32;
  theirs->nonce = bytes.substr(kOpeningSize - kNonceSize, kNonceSize);
  if (theirs->epoch != ours.epoch)
    return {Kind::kEpoch, "it belongs to epoch " + std::to_string(theirs->epoch) + " of the job, expected " +
                              std::to_string(ours.epoch)};
  return {};
}

Handshake::Handshake(Side side, std::string secret, std::string job, Opening ours, Versions versions, Admit admit)
    : side_(side),
      secret_(std::move(secret)),
      job_(std::move(job)),
      ours_(std::move(ours)),
      versions_(versions),
      admit_(std::move(admit)) {
  if (ours_.nonce.empty()) ours_.nonce = random_bytes(kNonceSize);
  said_by(side_) = ours_.encode();
}

std::string Handshake::open() {
  opened_ = true;
  return said_by(side_);
}

size_t Handshake::wanted() const {
  switch (stage_) {
    case Stage::kAwaitsOpening:
      // A connector that has our opening answers together with its own.
      return kOpeningSize + (side_ == Side::kListener && opened_ ? kProofSize : 0) - in_.size();
    case Stage::kAwaitsProof:
      return kProofSize - in_.size();
    case Stage::kProven:
    case Stage::kRefused:
      break;
  }
  return 0;
}

std::string Handshake::feed(const char* bytes, size_t size) {
  if (stage_ == Stage::kRefused) return "";
  if (size > wanted()) return refuse(Refusal::Kind::kForeign, "it sent more than a handshake");
  in_.append(bytes, size);
  std::string reply;
  if (stage_ == Stage::kAwaitsOpening) reply = on_opening();
  if (stage_ == Stage::kAwaitsProof && in_.size() == kProofSize)
    reply += side_ == Side::kListener ? on_answer() : on_verdict();
  return reply;
}

std::string Handshake::on_opening() {
  if (Refusal refusal = read_opening(in_, ours_, versions_, &theirs_)) return refuse(refusal.kind, refusal.why);
  if (in_.size() < kOpeningSize) return "";
  said_by(side_ == Side::kConnector ? Side::kListener : Side::kConnector) = in_.substr(0, kOpeningSize);
  in_.erase(0, kOpeningSize);
  if (std::string why = admit_ ? admit_(theirs_) : ""; !why.empty()) return refuse(Refusal::Kind::kRank, why);
  stage_ = Stage::kAwaitsProof;
  std::string reply = opened_ ? "" : open();
  if (side_ == Side::kConnector) reply += proof_by(Side::kConnector);
  return reply;
}

std::string Handshake::on_answer() {
  if (!proves(in_, Side::kConnector))
    return refuse(Refusal::Kind::kSecret,
                  "it does not know this job's secret: start every rank with the same one (PERSEUS_SECRET_FILE), or is "
                  "it another job's rank?",
                  std::string(kProofSize, '\0'));
  // Another connection may have been quicker.
  if (std::string why = admit_ ? admit_(theirs_) : ""; !why.empty()) return refuse(Refusal::Kind::kRank, why);
  stage_ = Stage::kProven;
  in_.clear();
  return proof_by(Side::kListener);
}

std::string Handshake::on_verdict() {
  if (in_ == std::string(kProofSize, '\0'))
    return refuse(Refusal::Kind::kSecret, "it refused this rank's proof: do all ranks have the same secret?");
  if (!proves(in_, Side::kListener))
    return refuse(Refusal::Kind::kImpostor, "could not prove that it knows the job's secret");
  stage_ = Stage::kProven;
  in_.clear();
  return "";
}

std::string Handshake::refuse(Refusal::Kind kind, std::string why, std::string reply) {
  stage_ = Stage::kRefused;
  refusal_ = Refusal{kind, std::move(why)};
  in_.clear();
  return reply;
}

std::string Handshake::proof_by(Side side) const {
  return bytes_of(prove(secret_, {label_of(side), job_, by_connector_, by_listener_}));
}

bool Handshake::proves(const std::string& proof, Side side) const {
  return proof_holds(proof, secret_, {label_of(side), job_, by_connector_, by_listener_});
}

std::string Handshake::session() const {
  return bytes_of(prove(secret_, {kSessionLabel, job_, by_connector_, by_listener_}));
}

std::string make_ticket(const std::string& session, Opening ours) {
  ours.nonce.clear();
  const std::string said = ours.encode();
  return said + bytes_of(prove(session, {kTicketLabel, said}));
}

bool ticket_holds(const std::string& session, const std::string& ticket) {
  if (ticket.size() != kOpeningSize) return false;
  const size_t said = kOpeningSize - kNonceSize;
  return proof_holds(ticket.substr(said), session, {kTicketLabel, ticket.substr(0, said)});
}

Digest message_key(const std::string& session, int from, int to, const std::string& name) {
  return prove(session, {kMessagesLabel, std::to_string(from), std::to_string(to), name});
}

}  // namespace perseus
