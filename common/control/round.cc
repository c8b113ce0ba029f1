// Dissemination over control links.
#include "control/round.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace perseus {
namespace {

constexpr uint32_t kMagic = 0x50524e44;  // "PRND"

}  // namespace

Round::Round(std::vector<Link*> send_links, std::vector<Link*> receive_links, int size, int me, uint32_t epoch,
             uint32_t group)
    : send_links_(std::move(send_links)),
      receive_links_(std::move(receive_links)),
      size_(size),
      me_(me),
      epoch_(epoch),
      group_(group) {
  content_.announced.resize(size);
  for (Link* link : send_links_) senders_.emplace_back(link);
  for (Link* link : receive_links_) receivers_.emplace_back(link);
}

bool Round::called() {
  for (MessageReceiver& receiver : receivers_)
    if (receiver.whole(sizeof(Frame))) return true;
  return false;
}

void Round::begin() {
  ++number_;
  step_ = 0;
  if (send_links_.empty()) {
    step_ = -1;
    return;
  }
  compose();
}

void Round::compose() {
  const size_t words = content_.bits.size();
  Frame frame{};
  frame.magic = kMagic;
  frame.epoch = epoch_;
  frame.group = group_;
  frame.step = static_cast<uint32_t>(step_);
  frame.round = number_;
  frame.words = static_cast<uint32_t>(words);
  out_.assign(sizeof frame, '\0');
  out_.append(reinterpret_cast<const char*>(content_.bits.data()), words * sizeof(uint64_t));
  for (int rank = 0; rank < size_; ++rank) {
    const std::string& blob = content_.announced[rank];
    if (blob.empty()) continue;
    const uint32_t head[2] = {static_cast<uint32_t>(rank), static_cast<uint32_t>(blob.size())};
    out_.append(reinterpret_cast<const char*>(head), sizeof head);
    out_.append(blob);
  }
  const size_t body = out_.size() - sizeof frame;
  if (body > kMostBody)
    fail(ErrorKind::kInvalidArgument, "[negotiation] more than 64 MiB of new tensor names and shapes in one round");
  frame.body_bytes = static_cast<uint32_t>(body);
  if (body <= sizeof frame.inlined) {
    std::memcpy(frame.inlined, out_.data() + sizeof frame, body);
    out_.resize(sizeof frame);
  }
  std::memcpy(&out_[0], &frame, sizeof frame);
  out_left_ = out_.size() - sizeof frame;
  out_body_.assign(1, Piece{reinterpret_cast<const Byte*>(out_.data()) + sizeof frame, nullptr, out_left_});
  out_at_ = Cursor(out_body_, 0);
  senders_[step_].start(out_.data(), sizeof frame);
  receivers_[step_].start();
  in_frame_here_ = in_done_ = false;
  ++messages_;
}

bool Round::step() {
  bool moved = false;
  while (step_ >= 0) {
    bool now = false;
    if (!sent()) now |= send_some();
    if (!in_done_) now |= receive_some();
    moved |= now;
    if (sent() && in_done_) {
      const char* body = in_frame_.body_bytes <= sizeof in_frame_.inlined
                             ? reinterpret_cast<const char*>(in_frame_.inlined)
                             : in_body_.data();
      merge(body, in_frame_.body_bytes, in_frame_.words);
      if (++step_ == static_cast<int>(send_links_.size())) step_ = -1;
      else compose();
      moved = true;
    } else if (!now) {
      break;
    }
  }
  return moved;
}

bool Round::send_some() {
  bool moved = false;
  while (!sent()) {
    // Message boundaries both ends know: the frame, then pieces of a fixed size.
    const size_t n = std::min(kMaxControlMessage, out_left_);
    const Moved now = senders_[step_].send(n, &out_at_, true);
    if (now == Moved::kNothing) break;
    if (now == Moved::kAll) out_left_ -= n;
    moved = true;
  }
  return moved;
}

bool Round::receive_some() {
  MessageReceiver& receiver = receivers_[step_];
  bool moved = false;
  if (!in_frame_here_) {
    if (!receiver.take_header(&in_frame_, sizeof in_frame_)) return false;
    const Frame& f = in_frame_;
    if (f.magic != kMagic || f.epoch != epoch_ || f.group != group_ || f.step != static_cast<uint32_t>(step_) ||
        f.round != number_ || f.body_bytes > kMostBody || size_t{f.words} * 8 > f.body_bytes)
      fail(ErrorKind::kInternal, "[negotiation] a peer sent round " + std::to_string(f.round) + " step " +
                                     std::to_string(f.step) + " of group " + std::to_string(f.group) +
                                     ", expected round " + std::to_string(number_) + " step " + std::to_string(step_) +
                                     " of group " + std::to_string(group_));
    in_frame_here_ = moved = true;
    in_body_.clear();
  }
  if (in_frame_.body_bytes > sizeof in_frame_.inlined) {
    while (in_body_.size() < in_frame_.body_bytes) {
      const size_t n = std::min(kMaxControlMessage, in_frame_.body_bytes - in_body_.size());
      const ConstSpan window = receiver.whole(n);
      if (!window) return moved;
      in_body_.append(reinterpret_cast<const char*>(window.data), n);
      receiver.release(n);
      moved = true;
    }
  }
  in_done_ = true;
  return true;
}

std::vector<int> Round::waiting_for() const {
  std::vector<int> members;
  const int distance = 1 << step_;
  if (!in_done_) members.push_back((me_ - distance + size_) % size_);
  if (!sent()) members.push_back((me_ + distance) % size_);
  return members;
}

std::vector<int> Round::unreached() const {
  std::vector<int> members;
  for (size_t s = 0; s < send_links_.size(); ++s)
    if (!send_links_[s]->delivered()) members.push_back((me_ + (1 << s)) % size_);
  return members;
}

void Round::merge(const char* body, size_t bytes, size_t words) {
  const char* const end = body + bytes;
  // Slots are agreed, but a rank that is about to learn of new ones may know fewer: a missing word is not ready.
  if (content_.bits.size() > words) content_.bits.resize(words);
  for (size_t i = 0; i < content_.bits.size(); ++i) {
    uint64_t word;
    std::memcpy(&word, body + i * sizeof word, sizeof word);
    content_.bits[i] &= word;
  }
  body += words * sizeof(uint64_t);
  while (body < end) {
    uint32_t head[2];
    if (static_cast<size_t>(end - body) < sizeof head) fail(ErrorKind::kIo, "[negotiation] truncated round");
    std::memcpy(head, body, sizeof head);
    body += sizeof head;
    if (head[0] >= static_cast<uint32_t>(size_) || head[1] > static_cast<size_t>(end - body))
      fail(ErrorKind::kIo, "[negotiation] malformed round");
    std::string& known = content_.announced[head[0]];
    if (known.empty()) known.assign(body, head[1]);
    body += head[1];
  }
}

}  // namespace perseus
