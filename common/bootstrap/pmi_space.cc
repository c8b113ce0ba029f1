// PMI-1: lines of name=value words over a socket that mpirun left open. One request, one answer.
//
//   cmd=init pmi_version=1 pmi_subversion=1         -> cmd=response_to_init rc=0 …
//   cmd=get_maxes                                   -> cmd=maxes vallen_max=1024 …
//   cmd=get_my_kvsname                              -> cmd=my_kvsname kvsname=N
//   cmd=put kvsname=N key=K value=V                 -> cmd=put_result rc=0
//   cmd=barrier_in                                  -> cmd=barrier_out           once all ranks have sent theirs
//   cmd=get kvsname=N key=K                         -> cmd=get_result rc=0 value=V
//   cmd=finalize                                    -> cmd=finalize_ack
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/processes.h"
#include "bootstrap/launcher_space.h"

namespace perseus {
namespace {

constexpr const char* kRemedy = "; start the job with perseusrun";
constexpr size_t kLongestLine = 64 * 1024;
constexpr int kLookAgainMs = 100;

// The value of one word of a line, "" = not there.
std::string word(const std::string& line, const std::string& name) {
  const std::string text = " " + line;
  const size_t found = text.find(" " + name + "=");
  if (found == std::string::npos) return "";
  const size_t begin = found + name.size() + 2;
  return text.substr(begin, text.find(' ', begin) - begin);
}

// The process's own MPI would be in the middle of its own talk with mpirun.
void refuse_mpi_in_use() {
  for (const std::string& path : loaded_libraries("self", "libmpi")) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) continue;
    const auto initialized = reinterpret_cast<int (*)(int*)>(::dlsym(library, "MPI_Initialized"));
    int flag = 0;
    if (initialized != nullptr && initialized(&flag) == 0 && flag != 0)
      fail(ErrorKind::kInvalidArgument,
           "[rendezvous] MPI is initialised in this process already, and its mpirun answers a process once: leave out "
           "MPI_Init, or start the job with perseusrun");
    ::dlclose(library);
  }
}

class PmiSpace final : public LauncherSpace {
 public:
  explicit PmiSpace(const SpaceOptions& options) : options_(options) {
    refuse_mpi_in_use();
    const std::string fd = options.environment("PMI_FD");
    if (fd.empty())
      fail(ErrorKind::kInvalidArgument,
           std::string("[rendezvous] this mpirun has not set PMI_FD, through which its ranks bootstrap") + kRemedy);
    fd_ = static_cast<int>(whole_number("rendezvous", "PMI_FD", fd, 0, 1 << 20));
    int type = 0;
    socklen_t size = sizeof type;
    if (::getsockopt(fd_, SOL_SOCKET, SO_TYPE, &type, &size) != 0)
      fail(ErrorKind::kIo, "[rendezvous] PMI_FD='" + fd + "' is not open here (" + std::strerror(errno) +
                               "): let whatever stands between mpirun and this program leave it open, or start the "
                               "job with perseusrun");
    ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
    ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init");
    most_bytes_ = static_cast<size_t>(
        whole_number("rendezvous", "vallen_max", word(ask("cmd=get_maxes", "maxes"), "vallen_max"), 1, 1 << 30));
    space_ = word(ask("cmd=get_my_kvsname", "my_kvsname"), "kvsname");
  }

  void put(const std::string& key, const std::string& value) override {
    ask("cmd=put kvsname=" + space_ + " key=" + own_key(options_.identity.rank, key) + " value=" + value, "put_result");
  }
  size_t most_bytes() const override { return most_bytes_ - 1; }  // the limit counts a closing zero
  void fence() override { ask("cmd=barrier_in", "barrier_out", "some rank"); }
  std::string get(int rank, const std::string& key) override {
    return word(ask("cmd=get kvsname=" + space_ + " key=" + own_key(rank, key), "get_result"), "value");
  }
  void finish() override {
    ask("cmd=finalize", "finalize_ack");
    ::close(fd_);
  }

 private:
  static std::string own_key(int rank, const std::string& key) { return "perseus-" + key + "-" + std::to_string(rank); }

  [[noreturn]] void broken(const std::string& why) {
    fail(ErrorKind::kIo, "[rendezvous] mpirun's PMI: " + why + kRemedy);
  }

  // The answer, which must be `expected` and no failure.
  std::string ask(const std::string& request, const char* expected, const char* waits_for = "mpirun's PMI") {
    send(request + "\n");
    const std::string line = receive(waits_for);
    const std::string code = word(line, "rc");
    if (word(line, "cmd") != expected || (!code.empty() && code != "0"))
      broken("'" + line.substr(0, 200) + "' answers '" + request.substr(0, request.find(" value=")) + "'");
    return line;
  }

  void send(const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t n = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) sent += static_cast<size_t>(n);
      else if (errno == EAGAIN) await(POLLOUT, "mpirun's PMI");
      else if (errno != EINTR) broken(std::strerror(errno));
    }
  }

  std::string receive(const char* waits_for) {
    for (;;) {
      if (const size_t end = received_.find('\n'); end != std::string::npos) {
        const std::string line = received_.substr(0, end);
        received_.erase(0, end + 1);
        return line;
      }
      char data[4096];
      const ssize_t n = ::recv(fd_, data, sizeof data, MSG_DONTWAIT);
      if (n > 0) received_.append(data, static_cast<size_t>(n));
      else if (n == 0) broken("closed the connection");
      else if (errno == EAGAIN) await(POLLIN, waits_for);
      else if (errno != EINTR) broken(std::strerror(errno));
      if (received_.size() > kLongestLine) broken("a line of more than 64 KiB");
    }
  }

  void await(short events, const char* what) {
    pollfd entry{fd_, events, 0};
    // A timer's signals may end every look before its time.
    if (::poll(&entry, 1, kLookAgainMs) <= 0) check_patience(options_, what);
  }

  SpaceOptions options_;
  int fd_ = -1;  // stays open where we fail: closing it is a failure of this process to mpirun, before we have said why
  size_t most_bytes_ = 0;
  std::string space_, received_;
};

}  // namespace

std::unique_ptr<LauncherSpace> open_pmi_space(const SpaceOptions& options) {
  return std::make_unique<PmiSpace>(options);
}

}  // namespace perseus
