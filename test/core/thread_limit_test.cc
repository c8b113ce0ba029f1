// Where the system lets this user have no more threads: an error that says so, and nothing left open.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>

#include "bootstrap/store.h"
#include "error_of.h"
#include "world.h"

namespace {

using namespace perseus;

int open_descriptors() {
  int count = 0;
  struct stat status{};
  for (int fd = 0; fd < 1024; ++fd) count += fstat(fd, &status) == 0;
  return count;
}

bool says(const std::string& message, const std::string& component) {
  if (message.find("[" + component + "] cannot start a thread (Resource temporarily unavailable): raise `ulimit -u`") !=
      std::string::npos)
    return true;
  std::cerr << "said: " << message << std::endl;
  return false;
}

int without_threads() {
  // Root has no limit.
  if (geteuid() == 0 && setuid(65534) != 0) return 2;
  const rlimit none{0, 0};
  setrlimit(RLIMIT_NPROC, &none);
  const int before = open_descriptors();
  const Error store = error_of([] { StoreServer::listen("127.0.0.1", 0, false, "the job's secret"); });
  perseus_context* context = nullptr;
  perseus_test::create_context(perseus_test::all_media()[0], "alone", 0, 1, 0, {}, &context);
  if (!says(store.what(), "rendezvous") || !says(perseus_error_message(), "engine")) return 1;
  return open_descriptors() == before ? 0 : 3;
}

TEST(ThreadLimit, IsNamed) {
  if (perseus_test::kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer looks at no child of a process with a thread";
  const pid_t child = fork();
  if (child == 0) _exit(without_threads());
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "cannot become another user, and the limit is not root's";
  EXPECT_EQ(WEXITSTATUS(status), 0) << (WEXITSTATUS(status) == 3 ? "left descriptors open" : "another error");
}

}  // namespace
