// What tests of the store have in common.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "bootstrap/store.h"
#include "error_of.h"

namespace perseus {

constexpr int64_t kPatienceMs = 30'000;  // for what comes at once, on however busy a machine

inline int64_t in_ms(int64_t ms) { return now_ns() + ms * kMillisecond; }

inline std::unique_ptr<StoreServer> serve(const std::string& secret = "secret") {
  return StoreServer::listen("127.0.0.1", 0, false, secret);
}

inline std::shared_ptr<Store> client_of(const StoreServer& server, const std::string& secret = "secret") {
  return connect_store("127.0.0.1", server.port(), secret, in_ms(kPatienceMs));
}

using Values = std::map<int, std::string>;

// Fails the test when a number comes twice.
inline Store::OnValue into(Values* values) {
  return [values](int number, const std::string& value) {
    EXPECT_TRUE(values->emplace(number, value).second) << number << " came twice";
  };
}

}  // namespace perseus
