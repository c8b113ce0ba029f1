#include "bootstrap/store_connection.h"

#include "bootstrap/store_protocol.h"

namespace perseus {
namespace {

using namespace store_protocol;

// Smaller values are copied into one piece of a reply, up to about so many bytes.
constexpr size_t kPiece = 64 * 1024;

}  // namespace

StoreConnection::StoreConnection(uint64_t id, Socket socket, const std::string& secret, Poller& poller,
                                 OnEvent on_event)
    : id_(id), socket_(std::move(socket)), poller_(poller), on_event_(std::move(on_event)) {
  handshake_.emplace(Handshake::Side::kListener, secret, "", opening(), Versions::kAny);
}

bool StoreConnection::start() {
  poller_.add(socket_.fd(), interest_ = EPOLLIN, this);
  return send(handshake_->open(), nullptr, "");
}

void StoreConnection::stop() {
  poller_.remove(socket_.fd());
  socket_.reset();
}

bool StoreConnection::serve(uint32_t events, const OnRequest& on_request) {
  if ((events & EPOLLOUT) != 0 && !flush()) return false;
  return (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0 || receive(on_request);
}

bool StoreConnection::receive(const OnRequest& on_request) {
  char buffer[64 * 1024];
  // A pending connection gets exactly the attention that its proof needs.
  const size_t limit = handshake_ ? handshake_->wanted() : sizeof buffer;
  const ssize_t n = recv_some(socket_.fd(), buffer, limit);
  if (n < 0) return false;
  if (handshake_) return shake_hands(buffer, static_cast<size_t>(n));
  in_.append(buffer, static_cast<size_t>(n));
  return read_requests(on_request);
}

bool StoreConnection::shake_hands(const char* bytes, size_t size) {
  std::string answer = handshake_->feed(bytes, size);
  if (handshake_->proven()) {
    const std::string session = handshake_->session();
    of_requests_ = code_of_requests(session);
    of_replies_ = code_of_replies(session);
    handshake_.reset();
  } else if (handshake_->refusal()) {
    close_when_sent_ = true;
    if (answer.empty()) return false;
  }
  return answer.empty() || send(std::move(answer), nullptr, "");
}

bool StoreConnection::read_requests(const OnRequest& on_request) {
  while (in_.size() >= 4) {
    // One at a time is the protocol: more than that in advance would be unlimited memory.
    if (waits() || to_send() != 0) return false;
    const size_t size = get_u32(in_.data());
    if (size < kRequestHeader || size > kMaxRequest) return false;
    if (in_.size() < 4 + size + kCode) return true;
    if (of_requests_->behind(std::string_view(in_).substr(0, 4 + size)) !=
        std::string_view(in_).substr(4 + size, kCode))
      return false;
    const size_t key_size = get_u32(in_.data() + 8);
    if (key_size == 0 || key_size > kMaxKey || key_size > size - kRequestHeader) return false;
    const size_t body_at = 4 + kRequestHeader + key_size;
    StoreRequest request{get_u32(in_.data() + 4), in_.substr(4 + kRequestHeader, key_size),
                         in_.substr(body_at, 4 + size - body_at)};
    in_.erase(0, 4 + size + kCode);
    if (!on_request(std::move(request))) return false;
  }
  return !waits() || in_.empty();
}

bool StoreConnection::reply(Value value) {
  awaited_key_.clear();
  std::string head;
  put_u32(&head, static_cast<uint32_t>(value->size()));
  std::string tail = of_replies_->behind(head, *value);
  if (value->size() < kPiece) return send(head + *value + tail, nullptr, "");
  return send(std::move(head), std::move(value), std::move(tail));
}

bool StoreConnection::take_missing(const std::string& key, const Value& value) {
  const std::optional<int> number = missing_.number_of(key);
  if (!number) return false;
  add_entry(*number, value);
  missing_.mark(*number);
  return true;
}

bool StoreConnection::send_entries() {
  // What is being sent goes first, and takes along what has been added when it is out.
  return to_send() != 0 || flush();
}

bool StoreConnection::send(std::string head, Value value, std::string tail) {
  head_ = std::move(head);
  value_ = std::move(value);
  tail_ = std::move(tail);
  sent_ = 0;
  return flush();
}

// Moves entries into the reply, up to a limit; false when there are none.
bool StoreConnection::refill() {
  due_ns_ = 0;
  head_.clear();
  value_.reset();
  tail_.clear();
  sent_ = 0;
  while (!entries_.empty() && !value_ && head_.size() < kPiece) {
    const auto [number, value] = std::move(entries_.front());
    entries_.pop_front();
    std::string entry;
    put_u32(&entry, static_cast<uint32_t>(number));
    put_u32(&entry, value ? static_cast<uint32_t>(value->size()) : kAbsent);
    const std::string code = value ? of_replies_->behind(entry, *value) : of_replies_->behind(entry);
    head_ += entry;
    if (value && value->size() >= kPiece) {
      value_ = value;
      tail_ = code;
    } else {
      if (value) head_ += *value;
      head_ += code;
    }
  }
  return !head_.empty();
}

bool StoreConnection::flush() {
  while (to_send() != 0 || refill()) {
    const std::string_view value = value_ ? std::string_view(*value_) : std::string_view();
    size_t at = sent_;
    std::string_view part = head_;
    for (const std::string_view next : {value, std::string_view(tail_)}) {
      if (at < part.size()) break;
      at -= part.size();
      part = next;
    }
    const ssize_t n = send_some(socket_.fd(), part.data() + at, part.size() - at);
    if (n < 0) return false;
    if (n == 0) break;
    sent_ += static_cast<size_t>(n);
  }
  const bool done = to_send() == 0;
  if (done && close_when_sent_) return false;
  const uint32_t interest = done ? EPOLLIN : EPOLLIN | EPOLLOUT;
  if (interest != interest_) poller_.change(socket_.fd(), interest_ = interest, this);
  return true;
}

}  // namespace perseus
