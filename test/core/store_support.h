// What tests of the store have in common.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
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

// A server in a process of its own, which can be stopped and go on. Make it while this process has a single thread.
class StoppableServer {
 public:
  StoppableServer() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return;
    process_ = ::fork();
    if (process_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const auto server = serve();
      const int port = server->port();
      if (::write(ends[1], &port, sizeof port) != sizeof port) _exit(1);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    EXPECT_EQ(::read(ends[0], &port_, sizeof port_), static_cast<ssize_t>(sizeof port_));
    ::close(ends[0]);
  }
  ~StoppableServer() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  StoppableServer(const StoppableServer&) = delete;
  StoppableServer& operator=(const StoppableServer&) = delete;

  int port() const { return port_; }
  std::shared_ptr<Store> client() const { return connect_store("127.0.0.1", port_, "secret", in_ms(kPatienceMs)); }
  // It answers nothing from here on.
  void stop() const {
    ::kill(process_, SIGSTOP);
    int status = 0;
    EXPECT_EQ(::waitpid(process_, &status, WUNTRACED), process_);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  void go_on() const { ::kill(process_, SIGCONT); }

 private:
  pid_t process_ = -1;
  int port_ = 0;
};

}  // namespace perseus
