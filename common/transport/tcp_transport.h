// All TCP connections of one rank. One thread uses it until join() has returned, then the holder of the progress lock.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/progress_lock.h"
#include "net/poller.h"
#include "transport/tcp_acceptor.h"
#include "transport/tcp_connector.h"
#include "transport/tcp_control_connection.h"
#include "transport/tcp_endpoint.h"
#include "transport/tcp_link.h"
#include "transport/transport.h"

namespace perseus {

class TcpTransport : public Transport, public TcpAcceptor::Members, public TcpControlConnection::Listener {
 public:
  // Listens on the configured interfaces and publishes where. Throws Error(kInvalidArgument) for interfaces that are
  // not there.
  TcpTransport(const World& world, Store& store, Waker& waker, const Config& config, const std::vector<int>& peers,
               const ConnectOptions& options);
  ~TcpTransport() override;

  // Blocks until every peer's control connection is established; see connect_tcp().
  void join(Store& store, int64_t deadline_ns, const std::function<bool()>& interrupted);

  TransportKind kind() const override { return TransportKind::kTcp; }
  bool reaches(int peer) const override { return peers_.count(peer) != 0; }
  Link& link(int peer, Channel channel) override PERSEUS_REQUIRES(progress_lock);
  void forget(int peer, uint32_t group) override PERSEUS_REQUIRES(progress_lock);
  void poll(bool woken) override PERSEUS_REQUIRES(progress_lock);
  void send_control_message(int peer, const std::string& message) override PERSEUS_REQUIRES(progress_lock);
  bool next_event(PeerEvent* event) override PERSEUS_REQUIRES(progress_lock);
  void send_heartbeats() override PERSEUS_REQUIRES(progress_lock) { send_all_heartbeats(); }
  int64_t last_alive_ns(int peer) override PERSEUS_REQUIRES(progress_lock) { return peer_of(peer).alive_ns; }
  uint64_t bytes_sent() const override PERSEUS_REQUIRES(progress_lock) { return traffic_.sent; }
  uint64_t bytes_received() const override PERSEUS_REQUIRES(progress_lock) { return traffic_.received; }
  uint64_t staging_bytes() const override PERSEUS_REQUIRES(progress_lock) { return traffic_.staging; }

 private:
  class Outgoing;
  friend class Outgoing;

  struct Peer {
    int64_t alive_ns = 0;
    std::unique_ptr<TcpControlConnection> side;
    SocketAddress address;  // data connections go to the address at which the control connection found the peer …
    std::vector<std::pair<SocketAddress, SocketAddress>> stripes;  // … or, several interfaces, to these in turn
    std::string gone;                                              // why, "" = there
    std::map<uint64_t, std::unique_ptr<TcpLink>> links;
    std::set<uint32_t> forgotten;  // groups, of which a connection may still be on its way to us
  };

  Peer& peer_of(int rank);
  void open_listeners(const InterfaceChoice& choice);
  void look_up(Store& store, int64_t deadline_ns, const std::function<bool()>& interrupted);
  void connect_all(Store& store, int64_t deadline_ns, const std::function<bool()>& interrupted);
  void work(int timeout_ms);
  void send_all_heartbeats();
  bool complete() const;  // throws when one that was here has ended
  std::string missing() const;
  std::string obstacles() const;
  [[noreturn]] void report_missing();
  TcpLink& link_of(Peer& peer, int rank, Channel channel);
  std::unique_ptr<MessageCheck> check_of(const Peer& peer, int from, int to, Channel channel) const;
  void connect(TcpLink& link, bool striped, int tries = 1);
  std::string ticket_for(const TcpLink& link);
  void on_established(Outgoing* connection);
  void on_unreachable(Outgoing* connection, const std::string& why);
  void on_refused(Outgoing* connection, const std::string& why);
  void end(Outgoing* connection);
  void attach(TcpLink& link, Socket socket);
  void look_at_events();
  void linger() PERSEUS_REQUIRES(progress_lock);
  bool finish(int64_t alive_since_ns) PERSEUS_REQUIRES(progress_lock);
  std::string store_prefix() const;

  // TcpAcceptor::Members
  std::string may_join(int rank) override;
  const std::string* session_with(int rank) override;
  void on_side(int rank, Socket socket, std::string session) override;
  std::string on_data(int rank, Channel channel, Socket socket) override;
  // TcpControlConnection::Listener
  void on_control_message(int peer, std::string text) override;
  void on_gone(int peer, const std::string& why) override;

  const World world_;
  const int keep_alive_s_;  // 0 = off
  const int64_t heard_ns_;
  const bool checked_;
  Waker& waker_;
  const Log log_;
  TcpTraffic traffic_;
  Poller poller_{"tcp"};
  TcpEndpoint own_;
  std::map<int, Peer> peers_;
  std::unique_ptr<TcpAcceptor> acceptor_;
  std::vector<std::unique_ptr<TcpConnector>> connectors_;  // while joining
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::deque<PeerEvent> peer_events_;
  size_t unattached_ = 0;  // links without connection
  int64_t retry_at_ns_ = 0, events_at_ns_ = 0, time_check_at_ns_ = 0;
  int64_t heartbeat_at_ns_ = 0;  // while joining
};

}  // namespace perseus
