// connect_tcp(): from a list of peers to control connections with all of them.
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/config.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "bootstrap/store.h"
#include "topology/host.h"
#include "transport/tcp_transport.h"

namespace perseus {
namespace {

// The store's get_all() asks us about this often; meanwhile higher ranks want answers.
constexpr int kWorkSliceMs = 20;

}  // namespace

std::string TcpTransport::store_prefix() const { return world_.job + "/" + std::to_string(world_.epoch) + "/tcp/"; }

void TcpTransport::open_listeners(const InterfaceChoice& choice) {
  own_.host = host_identity();
  // Also where there are no peers: a wrong name is an error everywhere or nowhere.
  own_.addresses = usable_addresses(choice);
  if (peers_.empty()) return;
  own_.chosen = choice.names_some();
  if (own_.chosen) {
    for (InterfaceAddress& entry : own_.addresses) {
      Socket socket = listen_on(entry.address);
      if (!socket)
        fail(ErrorKind::kIo, "[tcp] cannot listen on " + entry.address.host_text() + " (" + entry.interface +
                                 "): " + error_text(errno));
      entry.address.set_port(local_address(socket.fd()).port());
      acceptor_->listen(std::move(socket));
    }
    return;
  }
  Socket socket = listen_everywhere(0);
  if (!socket) fail(ErrorKind::kIo, "[tcp] cannot listen: " + error_text(errno));
  for (InterfaceAddress& entry : own_.addresses) entry.address.set_port(local_address(socket.fd()).port());
  acceptor_->listen(std::move(socket));
}

void TcpTransport::work(int timeout_ms) {
  for (const auto& connector : connectors_) connector->check_time();
  poller_.run(timeout_ms);
  acceptor_->check_time();
  // Ranks that are connected to all others already watch over this one.
  const int64_t now = now_ns();
  if (now < heartbeat_at_ns_) return;
  heartbeat_at_ns_ = now + heard_ns_ / 2;
  send_all_heartbeats();
}

void TcpTransport::look_up(Store& store, int64_t deadline_ns, const std::function<bool()>& interrupted) {
  const auto meanwhile = [&] {
    work(0);
    return interrupted && interrupted();
  };
  std::vector<int> lower;
  for (const auto& [rank, peer] : peers_)
    if (rank < world_.rank) lower.push_back(rank);
  const auto on_endpoint = [&](int rank, const std::string& text) {
    const TcpEndpoint theirs = TcpEndpoint::decode(text, rank);
    peers_.at(rank).stripes = stripes(own_, theirs);
    const auto done = [this, rank](Socket socket, std::string session) {
      on_side(rank, std::move(socket), std::move(session));
    };
    connectors_.push_back(std::make_unique<TcpConnector>(poller_, world_, rank, candidates(own_, theirs), done));
    connectors_.back()->check_time();
  };
  if (store.get_all(store_prefix(), lower, deadline_ns, on_endpoint, meanwhile).empty()) return;
  work(kWorkSliceMs);  // whoever knocked while we waited for others is not missing
  complete();
  report_missing();
}

void TcpTransport::join(Store& store, int64_t deadline_ns, const std::function<bool()>& interrupted) {
  try {
    connect_all(store, deadline_ns, interrupted);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kIo && error.kind() != ErrorKind::kAborted) throw;
    // Whoever waits for us may lose patience before us, and only we know why we have not connected.
    fail(error.kind(), error.what() + obstacles());
  }
  connectors_.clear();
}

void TcpTransport::connect_all(Store& store, int64_t deadline_ns, const std::function<bool()>& interrupted) {
  look_up(store, deadline_ns, interrupted);
  int64_t ask_at_ns = 0;
  for (;;) {
    const int64_t now = now_ns();
    if (complete()) return;
    if (now >= deadline_ns) report_missing();
    if (interrupted && now >= ask_at_ns) {
      if (interrupted()) fail(ErrorKind::kAborted, "[tcp] interrupted while connecting");
      ask_at_ns = now + 100 * kMillisecond;
    }
    work(kWorkSliceMs);
  }
}

bool TcpTransport::complete() const {
  for (const auto& [rank, peer] : peers_) {
    if (peer.gone.empty()) continue;
    // It may have given up waiting for somebody a moment before we do: the one who never came is the news.
    const std::string others = missing();
    fail(ErrorKind::kIo, "[tcp] rank " + std::to_string(rank) + " ended while ranks were connecting (" + peer.gone +
                             ")" + (others.empty() ? "" : ", rank " + others + " had not connected yet") +
                             ": look at what it printed last");
  }
  return missing().empty();
}

std::string TcpTransport::missing() const {
  std::string ranks;
  for (const auto& [rank, peer] : peers_)
    if (!peer.side && peer.gone.empty()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks;
}

// What is in the way of this rank, as an end of a sentence; "" = nothing.
std::string TcpTransport::obstacles() const {
  std::string text;
  for (const auto& connector : connectors_)
    if (!connector->done() && !connector->trouble().empty())
      text += "; rank " + std::to_string(connector->peer()) + " at " + connector->trouble();
  if (acceptor_->shortage() != 0)
    text +=
        "; rank " + std::to_string(world_.rank) + " cannot accept connections: " + error_text(acceptor_->shortage());
  return text;
}

void TcpTransport::report_missing() {
  std::string remedy;
  if (acceptor_->shortage() == 0)
    remedy = std::string(": are they running, and can the hosts reach each other? ") + variable(Var::kInterfaces).name +
             " chooses the interface";
  fail(ErrorKind::kTimeout, "[tcp] no connection with rank " + missing() + " in time (" +
                                variable(Var::kStartTimeout).name + ")" + obstacles() + remedy);
}

std::unique_ptr<Transport> connect_tcp(const World& world, Store& store, Waker& waker, const Config& config,
                                       const std::vector<int>& peers, const ConnectOptions& options) {
  auto transport = std::make_unique<TcpTransport>(world, store, waker, config, peers, options);
  try {
    transport->join(store, options.deadline_ns, options.interrupted);
  } catch (const Error& error) {
    if (options.on_failure) options.on_failure(error);
    throw;
  }
  return transport;
}

}  // namespace perseus
