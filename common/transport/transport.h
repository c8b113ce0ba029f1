// Moves byte ranges between two ranks and never blocks; no idea of tensors. Whatever a pass calls needs the Context's
// progress lock, so implementations need no locks of their own (peers are another matter: mem and shm share memory with
// them).
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress_lock.h"
#include "base/span.h"
#include "topology/transport_kind.h"
#include "topology/world.h"

namespace perseus {

class Config;
class Error;
class MessageCheck;
class Store;
class Waker;

// One ordered stream of bytes between two ranks. Channels are independent: one never waits behind another.
struct Channel {
  uint32_t group = 0;
  uint32_t stream = 0;
  uint64_t key() const { return uint64_t{group} << 32 | stream; }
  static Channel of_key(uint64_t key) { return {static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key)}; }
};

// Streams at or above this number carry what ranks agree on, not data: small rings suffice.
constexpr uint32_t kControlStream = 0x100;  // rounds of negotiation
// See collective/nccl/letters.h: about NCCL inside a host, and between hosts.
constexpr uint32_t kLettersStream = kControlStream + 1, kWideLettersStream = kControlStream + 2;
// No send_window/recv_window call asks for more at once, but for what MessageCheck puts behind it.
constexpr size_t kMaxMessage = 256 * 1024;
constexpr size_t kMaxControlMessage = 4 * 1024;

// Both directions of one channel to one peer. The two ends agree beforehand on the sequence of message sizes (it
// follows from headers already exchanged): whatever way one end writes n bytes, the other reads them as n bytes, where
// message boundaries are the same on both ends. A call that cannot proceed does nothing; a dead link throws Error(kIo)
// naming the peer. References stay valid until the Transport forgets the group.
class Link {
 public:
  virtual ~Link() = default;

  // Does the sender write straight into memory the receiver reads (mem, shm)? Then use send_window/send_commit, else
  // try_send.
  virtual bool has_windows() const = 0;

  // What follows headers and messages in either direction (transport/messages.h), null = nothing. Not for links with
  // windows; of the same kind on both ends.
  virtual MessageCheck* outgoing_check() { return nullptr; }
  virtual MessageCheck* incoming_check() { return nullptr; }
  // For messages: "rank 3 (10.0.0.5:4711)".
  virtual std::string peer_text() const { return "a rank"; }

  // Contiguous room for the next message of exactly n bytes (0 < n <= kMaxMessage), or empty. Stable until commit.
  virtual Span send_window(size_t n) PERSEUS_REQUIRES(progress_lock) = 0;
  virtual void send_commit(size_t n) PERSEUS_REQUIRES(progress_lock) = 0;

  // Takes as many bytes as fit now from the pieces, in order; returns how many. Not for links with windows.
  virtual size_t try_send(const iovec* pieces, int count) PERSEUS_REQUIRES(progress_lock) = 0;

  // The next message of exactly n bytes (0 < n <= kMaxMessage) once all of it is here, contiguous, else empty. Valid
  // until recv_release(n). The same n must be asked for until it is released.
  virtual ConstSpan recv_window(size_t n) PERSEUS_REQUIRES(progress_lock) = 0;
  virtual void recv_release(size_t n) PERSEUS_REQUIRES(progress_lock) = 0;

  // Fills as much of the pieces as has arrived, in order; returns how many bytes. Not for links with windows.
  virtual size_t try_recv(const iovec* pieces, int count) PERSEUS_REQUIRES(progress_lock) = 0;

  // Has all that was sent arrived at the peer's host, as far as this one knows? Costs a system call: for messages.
  virtual bool delivered() const PERSEUS_REQUIRES(progress_lock) { return true; }
};

// A control message from a peer, or its end.
struct PeerEvent {
  enum class Kind { kControlMessage, kGone };
  int peer = -1;
  Kind kind = Kind::kControlMessage;
  std::string text;  // kControlMessage: the bytes sent; kGone: "connection closed", "process ended", … without the rank
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual TransportKind kind() const = 0;
  const char* name() const { return transport_name(kind()); }
  virtual bool reaches(int peer) const = 0;

  // The link to `peer` on `channel`, made at first use; both ends must use it. Never blocks: until the other end is
  // there, windows are empty or buffer.
  virtual Link& link(int peer, Channel channel) PERSEUS_REQUIRES(progress_lock) = 0;
  // Ends the links to `peer` on the channels of a group that neither end uses any more, or ever again.
  virtual void forget(int peer, uint32_t group) PERSEUS_REQUIRES(progress_lock) = 0;

  // Finish handshakes, accept, read control messages. Called in every progress pass: costs next to nothing when nothing
  // can have changed. `woken`: the waker reported an event since the last call.
  virtual void poll(bool woken) PERSEUS_REQUIRES(progress_lock) = 0;

  // Sends a control message (<= 1024 bytes), which is not queued behind data. Best effort; never throws for a dead
  // peer.
  virtual void send_control_message(int peer, const std::string& message) PERSEUS_REQUIRES(progress_lock) = 0;
  // Takes the next event; returns false if there is none. A peer is reported gone once.
  virtual bool next_event(PeerEvent* event) PERSEUS_REQUIRES(progress_lock) = 0;

  // Tells every peer that we live; about once a second, or more often where the limit is short.
  virtual void send_heartbeats() PERSEUS_REQUIRES(progress_lock) = 0;
  // When a heartbeat or data last proved that `peer` lives, in now_ns() time.
  virtual int64_t last_alive_ns(int peer) PERSEUS_REQUIRES(progress_lock) = 0;

  // Bytes handed to and taken from this transport so far, headers included.
  virtual uint64_t bytes_sent() const PERSEUS_REQUIRES(progress_lock) = 0;
  virtual uint64_t bytes_received() const PERSEUS_REQUIRES(progress_lock) = 0;
  // Memory this transport holds for rings and buffers on behalf of this rank.
  virtual uint64_t staging_bytes() const PERSEUS_REQUIRES(progress_lock) = 0;
};

// Ranks as threads of one process. `fabric` is shared by them all: see make_mem_fabric().
class MemFabric;
std::shared_ptr<MemFabric> make_mem_fabric(int size);
std::unique_ptr<Transport> connect_mem(const World& world, std::shared_ptr<MemFabric> fabric, Waker& waker);

// How ranks connect.
struct ConnectOptions {
  int64_t deadline_ns = 0;  // now_ns() time
  // As in Store::get.
  std::function<bool()> interrupted;
  // Told of an error while our connections are still open: what it says is there before a peer sees them close.
  std::function<void(const Error&)> on_failure;
};

// Shared memory with the ranks of this host that it leads to; the rest is not reached, which the log says once. Null
// where this process has none; PERSEUS_TRANSPORT=shm makes both an Error(kIo). Blocks until every candidate answered or
// throws Error(kTimeout) at the deadline, naming one.
std::unique_ptr<Transport> connect_shm(const World& world, Store& store, Waker& waker, const Config& config,
                                       const ConnectOptions& options);

// TCP with `peers`, authenticated, over the configured interfaces. Blocks until every peer is connected or throws
// Error(kTimeout) at the deadline, naming the missing ranks.
std::unique_ptr<Transport> connect_tcp(const World& world, Store& store, Waker& waker, const Config& config,
                                       const std::vector<int>& peers, const ConnectOptions& options);

}  // namespace perseus
