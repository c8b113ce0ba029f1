// How the ranks of one host connect: each listens on an abstract UNIX socket, connects to the lower ranks and accepts
// the higher ones. Over the socket both prove that they belong to the job, and pass each other what they share. Of
// descriptors on their way the kernel allows a user no more than RLIMIT_NOFILE: a rank that has to wait for room takes
// meanwhile what is on its way to it, so that no limit is too low.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "bootstrap/store.h"
#include "net/handshake.h"
#include "net/pending_connections.h"
#include "net/socket.h"
#include "topology/world.h"
#include "transport/shared_segment.h"
#include "transport/shm_message.h"

namespace perseus {

// What a rank shows to all ranks of its host.
struct StatePage {
  alignas(64) std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint64_t> heartbeats;
};

// What a rank has of another one of its host.
struct ShmPeer {
  Socket socket;       // SEQPACKET; ends with the peer's process
  Socket event_fd;     // wakes the peer
  SharedSegment page;  // its StatePage
};

// Belongs to the thread that starts the world, for the time of the start.
class ShmPeering {
 public:
  using Interrupted = Store::Interrupted;

  // Listens. The descriptors, of our state page and of the event that wakes us, go to every peer. Throws Error(kIo).
  ShmPeering(const World& world, int page_fd, int event_fd);

  // Where the others find this rank.
  const std::string& address() const { return address_; }
  // Connects with all `neighbours`, the other ranks of this host that have an address. Returns those that shared memory
  // leads to; of the others, `unreachable` says why it does not. Throws Error(kIo) for a rank that seems to be dead,
  // Error(kTimeout) at the deadline, Error(kAborted) when `interrupted`.
  std::map<int, ShmPeer> connect(Store& store, const std::map<int, std::string>& neighbours, int64_t deadline_ns,
                                 const Interrupted& interrupted, std::map<int, std::string>* unreachable);

 private:
  enum class Sent { kYes, kNotYet, kNever };

  void listen();
  std::map<int, ShmPeer> connect_all(Store& store, const std::map<int, std::string>& neighbours, int64_t deadline_ns,
                                     const Interrupted& interrupted, std::map<int, std::string>* unreachable);
  std::string connect_to(int rank, const std::string& address, const std::function<void()>& wait_a_little);
  void await_higher(Store& store, const std::map<int, std::string>& neighbours, const std::string& missed,
                    int64_t deadline_ns, const Interrupted& interrupted);
  void serve();
  void serve_pending();
  bool on_hello(Socket& socket);
  void await_welcomes(int64_t deadline_ns, const Interrupted& interrupted);
  Sent send(int rank, const ShmMessage& message);
  void send_welcomes();
  void take_welcomes();
  void adopt(int rank, Passed passed);
  [[noreturn]] void report_missing(const std::string& ranks) const;
  std::string unpassed() const;
  std::string awaited() const;
  Opening opening_of(int rank) const;

  const World& world_;
  const int page_fd_, event_fd_;
  std::string address_;
  Socket listener_;
  PendingConnections<Socket> pending_;
  std::set<int> expected_;                            // ranks that are to connect to us
  std::map<int, ShmMessage> welcomes_;                // for which there was no room yet
  std::map<int, int> shortages_;                      // why the last message to a rank was put off: error numbers
  std::map<int, std::unique_ptr<Handshake>> proofs_;  // of lower ranks that have not welcomed us yet
  std::map<int, ShmPeer> peers_;
};

// Throws the Error(kTimeout) of a start that waited for these ranks of this host.
[[noreturn]] void report_unconnected(const std::string& ranks,
                                     const std::string& remedy = "look at what it printed last");

}  // namespace perseus
