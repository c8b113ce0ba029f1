// A client of the store that knows the job's secret, and then says anything.
#include <fcntl.h>
#include <sys/socket.h>

#include <map>

#include "bootstrap/store_connection.h"
#include "bootstrap/store_protocol.h"
#include "fuzz.h"

using namespace perseus;
using namespace perseus::store_protocol;
using perseus_fuzz::expect;

namespace {

const std::string kSecret = "the secret of the job";

// Moves what either side has sent of the handshake; returns the session.
std::string shake_hands(StoreConnection* server, int client) {
  Handshake handshake(Handshake::Side::kConnector, kSecret, "", opening(), Versions::kAny);
  char bytes[512];
  while (!handshake.proven()) {
    const ssize_t n = ::recv(client, bytes, std::min(sizeof bytes, handshake.wanted()), MSG_DONTWAIT);
    expect(n > 0, "the store shakes hands");
    const std::string reply = handshake.feed(bytes, static_cast<size_t>(n));
    expect(::send(client, reply.data(), reply.size(), 0) == static_cast<ssize_t>(reply.size()), "room for a reply");
    while (!handshake.proven() && server->pending() && ::recv(client, bytes, 1, MSG_DONTWAIT | MSG_PEEK) < 0)
      expect(server->serve(EPOLLIN, [](const StoreRequest&) { return false; }), "the store goes on");
  }
  return handshake.session();
}

// Puts the right codes behind requests: whoever cannot is closed before anything is parsed.
class Signer {
 public:
  explicit Signer(const std::string& session) : of_requests_(code_of_requests(session)) {}

  std::string sign(const std::vector<uint8_t>& piece) {
    std::string out;
    for (const uint8_t byte : piece) {
      request_.push_back(static_cast<char>(byte));
      out.push_back(static_cast<char>(byte));
      if (request_.size() < 4 || request_.size() < 4 + size_t{get_u32(request_.data())}) continue;
      out += of_requests_.behind(request_);
      request_.clear();
    }
    return out;
  }

 private:
  AuthenticationCode of_requests_;
  std::string request_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Poller poller("fuzz");
  int ends[2];
  expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
  const Socket client([&] { return ends[0]; });
  StoreConnection connection(1, Socket([&] { return ends[1]; }), kSecret, poller, [](uint32_t) {});
  expect(connection.start(), "the store opens");
  Signer signer(shake_hands(&connection, client.fd()));
  std::map<std::string, StoreConnection::Value> values;
  const auto on_request = [&](StoreRequest request) {
    expect(!request.key.empty() && request.key.size() <= kMaxKey && request.body.size() <= kMaxRequest,
           "requests are as large as the protocol says");
    const auto value = std::make_shared<const std::string>(std::move(request.body));
    if (request.op == kSet) {
      values[request.key] = value;
      return connection.reply(std::make_shared<const std::string>());
    }
    if (request.op == kGet) {
      const auto found = values.find(request.key);
      if (found != values.end()) return connection.reply(found->second);
      connection.await_key(request.key);
      return true;
    }
    return false;
  };
  // In pieces, as a network would bring it.
  perseus_fuzz::Input input(data, size);
  bool alive = true;
  while (alive && input.left() > 0) {
    const std::string piece = signer.sign(input.take(1 + input.choice(300)));
    if (!piece.empty() && ::send(client.fd(), piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) break;
    alive = connection.serve(EPOLLIN, on_request);
    char replies[4096];
    while (::recv(client.fd(), replies, sizeof replies, MSG_DONTWAIT) > 0) continue;
  }
  connection.stop();
  return 0;
}
