// One negotiation round: every rank of a group learns the AND of all readiness bits and the union of all announcements,
// by dissemination: in step s rank r sends what it knows to r + 2^s and receives from r - 2^s, ceil(log2 N) messages
// per rank for any N. Merging is idempotent, so what arrives twice does no harm. Resumable.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/progress_lock.h"
#include "transport/messages.h"

namespace perseus {

struct RoundContent {
  std::vector<uint64_t> bits;          // slot s is bit s % 64 of word s / 64
  std::vector<std::string> announced;  // by group rank; "" = nothing new (announcement.h has the format)
};

class Round {
 public:
  static constexpr size_t kMostBody = 64 * 1024 * 1024;  // bytes of a message, which may have what all ranks announce

  // send_links[s], receive_links[s]: to rank + 2^s and from rank - 2^s. Empty for a group of one.
  Round(std::vector<Link*> send_links, std::vector<Link*> receive_links, int size, int me, uint32_t epoch,
        uint32_t group);

  // Has a peer begun the next round? Only while idle.
  bool called() PERSEUS_REQUIRES(progress_lock);
  bool idle() const PERSEUS_REQUIRES(progress_lock) { return step_ < 0; }
  // Of the round in flight or, when idle, of the last one finished.
  uint64_t number() const PERSEUS_REQUIRES(progress_lock) { return number_; }
  // Sent so far, ceil(log2 N) a round.
  uint64_t messages() const PERSEUS_REQUIRES(progress_lock) { return messages_; }

  // Begins the next round with this rank's bits and announcements in `content().bits` / announced[me].
  RoundContent& content() PERSEUS_REQUIRES(progress_lock) { return content_; }
  void begin() PERSEUS_REQUIRES(progress_lock);
  // Moves what can be moved; true when anything did. After the last step idle() holds and content() is merged.
  bool step() PERSEUS_REQUIRES(progress_lock);

  // Of the round in flight: members whose part of this step is missing, or that do not take ours.
  std::vector<int> waiting_for() const PERSEUS_REQUIRES(progress_lock);
  // Members whose hosts have not acknowledged what was sent to them.
  std::vector<int> unreached() const PERSEUS_REQUIRES(progress_lock);

 private:
  // Fixed first message of every step: small bodies ride inside.
  struct Frame {
    uint32_t magic, epoch, group, step;
    uint64_t round;
    uint32_t words, body_bytes;
    unsigned char inlined[216];
  };
  static_assert(sizeof(Frame) == 248, "a small part of a control ring");

  void compose() PERSEUS_REQUIRES(progress_lock);
  bool send_some() PERSEUS_REQUIRES(progress_lock);
  bool sent() const PERSEUS_REQUIRES(progress_lock) { return out_left_ == 0 && senders_[step_].header_gone(); }
  bool receive_some() PERSEUS_REQUIRES(progress_lock);
  void merge(const char* body, size_t bytes, size_t words);

  std::vector<Link*> send_links_, receive_links_;
  std::vector<MessageSender> senders_;      // over send_links_
  std::vector<MessageReceiver> receivers_;  // over receive_links_
  int size_, me_;
  uint32_t epoch_, group_;

  uint64_t number_ = 0, messages_ = 0;
  int step_ = -1;  // -1 = idle
  RoundContent content_;

  std::string out_;      // frame and body of this step
  size_t out_left_ = 0;  // bytes of the body that still go behind the frame, in whole messages
  std::vector<Piece> out_body_;
  Cursor out_at_;
  Frame in_frame_{};
  bool in_frame_here_ = false;
  std::string in_body_;
  bool in_done_ = false;
};

}  // namespace perseus
