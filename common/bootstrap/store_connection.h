// One client of the store's server: it proves the secret, sends one request at a time and gets a reply to each. Used by
// the server's thread alone. Where a function returns false, the connection is to be closed.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bootstrap/numbered_keys.h"
#include "net/handshake.h"
#include "net/message_check.h"
#include "net/poller.h"
#include "net/socket.h"

namespace perseus {

struct StoreRequest {
  uint32_t op = 0;  // bootstrap/store_protocol.h
  std::string key;
  std::string body;
};

class StoreConnection : public PollHandler {
 public:
  using Value = std::shared_ptr<const std::string>;
  using OnEvent = std::function<void(uint32_t events)>;
  using OnRequest = std::function<bool(StoreRequest request)>;

  // `id` is never used twice.
  StoreConnection(uint64_t id, Socket socket, const std::string& secret, Poller& poller, OnEvent on_event);

  uint64_t id() const { return id_; }
  // Has the client not proved the secret yet?
  bool pending() const { return handshake_.has_value(); }

  // Sends our opening, and watches the socket from now on.
  bool start();
  void stop();
  // Sends and receives what the socket allows. Every request goes to `on_request` as soon as it is complete.
  bool serve(uint32_t events, const OnRequest& on_request);

  // The reply to a set or a get.
  bool reply(Value value);

  // A get waits for this key; "" = none does.
  const std::string& awaited_key() const { return awaited_key_; }
  void await_key(std::string key) { awaited_key_ = std::move(key); }

  // The reply to a request of numbered keys, of which some are missing: entries go out by themselves up to a limit,
  // whatever comes after them when send_entries() is called.
  void await_numbers(NumberedKeys missing) { missing_ = std::move(missing); }
  // Null: the key does not exist.
  void add_entry(int number, Value value) { entries_.emplace_back(number, std::move(value)); }
  // Adds the entry if it is among those that are missing; returns whether it was.
  bool take_missing(const std::string& key, const Value& value);
  bool complete() const { return missing_.all_came(); }
  bool send_entries();
  // When entries must go out that have been added, 0 = there are none.
  int64_t due_ns() const { return due_ns_; }
  void set_due_ns(int64_t due_ns) { due_ns_ = due_ns; }

 private:
  void on_event(uint32_t events) override { on_event_(events); }
  bool receive(const OnRequest& on_request);
  bool shake_hands(const char* bytes, size_t size);
  bool read_requests(const OnRequest& on_request);
  bool waits() const { return !awaited_key_.empty() || !missing_.all_came(); }
  bool send(std::string head, Value value, std::string tail);
  bool flush();
  bool refill();
  size_t to_send() const { return head_.size() + (value_ ? value_->size() : 0) + tail_.size() - sent_; }

  const uint64_t id_;
  Socket socket_;
  Poller& poller_;
  const OnEvent on_event_;
  uint32_t interest_ = 0;                                       // what the poller watches
  std::optional<Handshake> handshake_;                          // until the client has proved itself
  std::optional<AuthenticationCode> of_requests_, of_replies_;  // once the client has proved itself
  bool close_when_sent_ = false;
  std::string in_;  // received, not read
  std::string awaited_key_;
  NumberedKeys missing_;
  std::deque<std::pair<int, Value>> entries_;  // not in the reply yet
  int64_t due_ns_ = 0;
  // The reply on its way.
  std::string head_;
  Value value_;
  std::string tail_;
  size_t sent_ = 0;
};

}  // namespace perseus
