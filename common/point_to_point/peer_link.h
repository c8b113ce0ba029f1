// Sends and receives between this rank and one peer: announces messages, streams those that the peer has a place for,
// and tells what arrives. The holder of the progress lock uses it.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/progress_lock.h"
#include "point_to_point/message.h"
#include "request/request.h"
#include "transport/messages.h"

namespace perseus {

// A message that the peer wants to send.
struct Announcement {
  uint64_t id = 0;
  int64_t tag = 0;
  uint64_t bytes = 0;
  bool whole = false;  // all of it came along
  ConstSpan data;      // then; valid during the call that tells of it
};

class PeerLink {
 public:
  // Told of what arrives, during step().
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void on_announced(PeerLink& from, const Announcement& message) PERSEUS_REQUIRES(progress_lock) = 0;
    // The peer has a place for a message of this rank, whose bytes move from now on, or have moved already.
    virtual void on_accepted(Entry* send) PERSEUS_REQUIRES(progress_lock) = 0;
    // Its receive has room for so many bytes instead.
    virtual void on_refused(PeerLink& by, Entry* send, uint64_t room) PERSEUS_REQUIRES(progress_lock) = 0;
    // All bytes have moved.
    virtual void on_moved(Entry* entry) PERSEUS_REQUIRES(progress_lock) = 0;
    // The peer shuts down, or has heard that this rank does. `unfinished`: what it neither takes nor sends any more.
    virtual void on_bye(PeerLink& from, const std::vector<Entry*>& unfinished) PERSEUS_REQUIRES(progress_lock) = 0;
  };

  PeerLink(int peer, Link* link, uint32_t epoch, Listener* listener)
      : peer_(peer), epoch_(epoch), listener_(*listener), sender_(link), receiver_(link) {}

  int peer() const { return peer_; }

  // Announces what the entry sends.
  void announce(Entry* send) PERSEUS_REQUIRES(progress_lock);
  // Answers to an announcement: all of it was taken, it may go to this entry, or that has room for so many bytes.
  void accept(uint64_t id) PERSEUS_REQUIRES(progress_lock) { say(PointToPointType::kGo, id); }
  void receive(uint64_t id, Entry* receive) PERSEUS_REQUIRES(progress_lock);
  void refuse(uint64_t id, uint64_t room) PERSEUS_REQUIRES(progress_lock) { say(PointToPointType::kRefuse, id, room); }

  // Keeps count of the bytes that came along before a receive was there. Throws Error(kIo) past kMostHeld.
  void hold(size_t bytes) PERSEUS_REQUIRES(progress_lock);
  void release(size_t bytes) PERSEUS_REQUIRES(progress_lock) { held_ -= bytes; }

  // Moves what can be moved; true when anything did. `woken`: the Waker reported an event since the last call.
  // Throws Error(kIo) for a broken link, and for what no Perseus says.
  bool step(int64_t now, bool woken) PERSEUS_REQUIRES(progress_lock);
  // The transfer clock: throws Error(kTimeout) when what is under way has moved no byte for this long.
  void check_progress(int64_t now, int64_t since_ns, int64_t timeout_ns) PERSEUS_REQUIRES(progress_lock);
  // Is there something to be moved that both ends know of, or that the peer has to learn?
  bool moving() const PERSEUS_REQUIRES(progress_lock);
  size_t held() const PERSEUS_REQUIRES(progress_lock) { return held_; }

  // Shuts down: says goodbye once what may go has gone, and hears of no more messages. The peer answers with its own
  // goodbye, before which it has answered the sends that it took.
  void close() PERSEUS_REQUIRES(progress_lock) { closed_ = true; }
  // Has the peer said goodbye?
  bool ended() const PERSEUS_REQUIRES(progress_lock) { return ended_; }
  // The peer has made its end of the link.
  void on_made() PERSEUS_REQUIRES(progress_lock) { made_by_peer_ = true; }
  // The peer reads no more. If it has made its end, its goodbye is here or on its way.
  void on_left() PERSEUS_REQUIRES(progress_lock);

 private:
  // Most messages that a step moves in each direction: others have their turn, too.
  static constexpr int kMostAtOnce = 32;

  struct Outgoing {
    PointToPointHeader header;
    std::unique_ptr<Byte[]> data;  // that goes along with an announcement
  };
  struct Unanswered {
    Entry* send;
    size_t eager;  // bytes that went along
    bool whole;
  };
  struct Payload {
    uint64_t id;
    Entry* entry;
    size_t moved;
  };

  PointToPointHeader header(PointToPointType type, uint64_t id) const;
  void say(PointToPointType type, uint64_t id, uint64_t bytes = 0) PERSEUS_REQUIRES(progress_lock);
  bool send_some() PERSEUS_REQUIRES(progress_lock);
  bool begin_next() PERSEUS_REQUIRES(progress_lock);
  void end_message() PERSEUS_REQUIRES(progress_lock);
  bool receive_some() PERSEUS_REQUIRES(progress_lock);
  bool take_payload(bool* moved) PERSEUS_REQUIRES(progress_lock);
  bool take_announcement() PERSEUS_REQUIRES(progress_lock);
  void begin_message() PERSEUS_REQUIRES(progress_lock);
  void on_answer() PERSEUS_REQUIRES(progress_lock);
  void on_bye() PERSEUS_REQUIRES(progress_lock);
  [[noreturn]] void report_nonsense(const char* why) const PERSEUS_REQUIRES(progress_lock);

  const int peer_;
  const uint32_t epoch_;
  Listener& listener_;
  bool closed_ PERSEUS_GUARDED_BY(progress_lock) = false;  // it says goodbye when there is nothing left to send
  bool ended_ PERSEUS_GUARDED_BY(progress_lock) = false;   // the peer has said goodbye
  bool made_by_peer_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool left_ PERSEUS_GUARDED_BY(progress_lock) = false;  // the peer reads no more
  // The last time that anything moved or nothing had to.
  int64_t moved_ns_ PERSEUS_GUARDED_BY(progress_lock) = now_ns();

  MessageSender sender_ PERSEUS_GUARDED_BY(progress_lock);
  uint64_t announced_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  size_t eager_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // bytes that the peer may have to hold
  std::unordered_map<uint64_t, Unanswered> unanswered_ PERSEUS_GUARDED_BY(progress_lock);
  std::deque<Outgoing> queue_ PERSEUS_GUARDED_BY(progress_lock);        // goes before payloads
  std::deque<Payload> payloads_out_ PERSEUS_GUARDED_BY(progress_lock);  // in the order in which they may go
  Outgoing out_ PERSEUS_GUARDED_BY(progress_lock);                      // on its way
  std::vector<Piece> out_bytes_ PERSEUS_GUARDED_BY(progress_lock) = std::vector<Piece>(1);
  Cursor out_at_ PERSEUS_GUARDED_BY(progress_lock);
  bool sending_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool said_bye_ PERSEUS_GUARDED_BY(progress_lock) = false;

  MessageReceiver receiver_ PERSEUS_GUARDED_BY(progress_lock);
  uint64_t heard_of_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // messages that the peer has announced
  size_t held_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  std::deque<Payload> payloads_in_ PERSEUS_GUARDED_BY(progress_lock);
  PointToPointHeader in_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Piece> in_bytes_ PERSEUS_GUARDED_BY(progress_lock) = std::vector<Piece>(1);
  Cursor in_at_ PERSEUS_GUARDED_BY(progress_lock);
  bool receiving_ PERSEUS_GUARDED_BY(progress_lock) = false;  // the header is here, what follows it is not
  bool look_again_ PERSEUS_GUARDED_BY(progress_lock) = true;  // there may be more than was read
};

}  // namespace perseus
