#include "faults.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/clock.h"

namespace perseus_test {
namespace {

constexpr int64_t kDelayNs = 2 * perseus::kMillisecond;

// Of this process, which is one rank.
struct Armed {
  std::vector<Fault> faults;
  std::atomic<bool> on{false};
  std::atomic<int> step{kStartUp};
  std::atomic<int> calls[kCalls] = {};  // of this step
  std::atomic<int> injected{0};
  int store_port = 0;
};
Armed& armed() {
  static Armed state;
  return state;
}

// The fault that this call is to suffer, null = none. Waits here for one that delays.
const Fault* on_call(Call call) {
  Armed& state = armed();
  if (!state.on.load(std::memory_order_acquire)) return nullptr;
  const int number = state.calls[static_cast<int>(call)].fetch_add(1);
  for (const Fault& fault : state.faults) {
    if (fault.call != call || fault.step != state.step || number < fault.nth || number - fault.nth >= fault.times)
      continue;
    ++state.injected;
    if (fault.effect == Effect::kDelay) {
      const timespec pause{0, kDelayNs};
      nanosleep(&pause, nullptr);
    }
    errno = fault.error;
    return &fault;
  }
  return nullptr;
}

bool refused(Call call) {
  const Fault* fault = on_call(call);
  return fault != nullptr && fault->effect == Effect::kError;
}

// Asked while this rank starts.
int interrupted(void*) {
  const Armed& state = armed();
  const auto passed = [&](const Fault& fault) { return state.injected >= fault.interrupted_after; };
  return std::any_of(state.faults.begin(), state.faults.end(), passed) ? 1 : 0;
}

// Only a stream may move less than was asked for.
bool is_stream(int fd) {
  int type = 0;
  socklen_t size = sizeof type;
  return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

bool is_store(const sockaddr* address) {
  return address->sa_family == AF_INET &&
         ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port) == armed().store_port;
}

// The kernel looks at a peer that is gone before it looks for room.
int error_of_send(const Fault& fault, int fd) {
  pollfd entry{fd, 0, 0};
  return ::poll(&entry, 1, 0) == 1 && (entry.revents & POLLHUP) != 0 ? EPIPE : fault.error;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// Moves 1 byte of `size`, or all of them.
size_t shortened(const Fault* fault, int fd, size_t size) {
  return fault != nullptr && fault->effect == Effect::kShort && is_stream(fd) ? std::min<size_t>(size, 1) : size;
}

// The first byte of a message.
struct ShortMessage {
  explicit ShortMessage(const msghdr& whole) : message(whole) {
    for (size_t i = 0; i < whole.msg_iovlen && piece.iov_len == 0; ++i)
      piece = iovec{whole.msg_iov[i].iov_base, std::min<size_t>(whole.msg_iov[i].iov_len, 1)};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
  }
  iovec piece{nullptr, 0};
  msghdr message;
};

// Changes a bit in the middle of what has come, if that is data: headers, rounds and heartbeats are smaller. Or only if
// it is the frame of a round.
ssize_t damaged(const Fault* fault, const iovec* pieces, ssize_t received) {
  constexpr ssize_t kFrameOfRound = 248 + 8;
  if (fault == nullptr) return received;
  const bool hits = fault->effect == Effect::kDamage ? received > 16 * 1024
                                                     : fault->effect == Effect::kForge && received == kFrameOfRound;
  if (!hits) return received;
  auto place = static_cast<size_t>(received) / 2;
  for (; place >= pieces->iov_len; ++pieces) place -= pieces->iov_len;
  static_cast<unsigned char*>(pieces->iov_base)[place] ^= 0x10;
  return received;
}

}  // namespace
}  // namespace perseus_test

using perseus_test::Call;
using perseus_test::Effect;
using perseus_test::Fault;

extern "C" {

int socket(int domain, int type, int protocol) noexcept {
  if (perseus_test::refused(Call::kSocket)) return -1;
  return perseus_test::next<int(int, int, int)>("socket")(domain, type, protocol);
}
int connect(int fd, const sockaddr* address, socklen_t size) {
  if (perseus_test::refused(Call::kConnect)) return -1;
  if (!perseus_test::is_store(address) && perseus_test::refused(Call::kConnectToRank)) return -1;
  return perseus_test::next<int(int, const sockaddr*, socklen_t)>("connect")(fd, address, size);
}
int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  if (perseus_test::refused(Call::kAccept)) return -1;
  return perseus_test::next<int(int, sockaddr*, socklen_t*, int)>("accept4")(fd, address, size, flags);
}
ssize_t send(int fd, const void* data, size_t size, int flags) {
  const Fault* fault = perseus_test::on_call(Call::kSend);
  if (fault != nullptr && fault->effect == Effect::kError) return -1;
  return perseus_test::next<ssize_t(int, const void*, size_t, int)>("send")(
      fd, data, perseus_test::shortened(fault, fd, size), flags);
}
ssize_t recv(int fd, void* data, size_t size, int flags) {
  const Fault* fault = perseus_test::on_call(Call::kRecv);
  if (fault != nullptr && fault->effect == Effect::kError) return -1;
  const iovec piece{data, perseus_test::shortened(fault, fd, size)};
  const auto real = perseus_test::next<ssize_t(int, void*, size_t, int)>("recv");
  return perseus_test::damaged(fault, &piece, real(fd, data, piece.iov_len, flags));
}
ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const auto real = perseus_test::next<ssize_t(int, const msghdr*, int)>("sendmsg");
  const Fault* fault = perseus_test::on_call(Call::kSendmsg);
  if (fault != nullptr && fault->effect == Effect::kError) return errno = perseus_test::error_of_send(*fault, fd), -1;
  if (fault == nullptr || fault->effect != Effect::kShort || !perseus_test::is_stream(fd))
    return real(fd, message, flags);
  perseus_test::ShortMessage part(*message);
  return real(fd, &part.message, flags);
}
ssize_t recvmsg(int fd, msghdr* message, int flags) {
  const auto real = perseus_test::next<ssize_t(int, msghdr*, int)>("recvmsg");
  const Fault* fault = perseus_test::on_call(Call::kRecvmsg);
  if (fault != nullptr && fault->effect == Effect::kError) return -1;
  if (fault == nullptr || fault->effect != Effect::kShort || !perseus_test::is_stream(fd))
    return perseus_test::damaged(fault, message->msg_iov, real(fd, message, flags));
  perseus_test::ShortMessage part(*message);
  return real(fd, &part.message, flags);
}
int epoll_create1(int flags) noexcept {
  if (perseus_test::refused(Call::kEpollCreate)) return -1;
  return perseus_test::next<int(int)>("epoll_create1")(flags);
}
int epoll_ctl(int set, int operation, int fd, epoll_event* event) noexcept {
  // What is taken out needs no memory.
  if (operation == EPOLL_CTL_ADD && perseus_test::refused(Call::kEpollCtl)) return -1;
  return perseus_test::next<int(int, int, int, epoll_event*)>("epoll_ctl")(set, operation, fd, event);
}
int eventfd(unsigned count, int flags) noexcept {
  if (perseus_test::refused(Call::kEventfd)) return -1;
  return perseus_test::next<int(unsigned, int)>("eventfd")(count, flags);
}
int timerfd_create(clockid_t clock, int flags) noexcept {
  if (perseus_test::refused(Call::kTimerfd)) return -1;
  return perseus_test::next<int(clockid_t, int)>("timerfd_create")(clock, flags);
}
int memfd_create(const char* name, unsigned flags) noexcept {
  if (perseus_test::refused(Call::kMemfd)) return -1;
  return perseus_test::next<int(const char*, unsigned)>("memfd_create")(name, flags);
}
int posix_fallocate(int fd, off_t offset, off_t size) {
  if (perseus_test::refused(Call::kFallocate)) return errno;  // returns the number itself
  return perseus_test::next<int(int, off_t, off_t)>("posix_fallocate")(fd, offset, size);
}
void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) noexcept {
  // Of shared memory alone: threads' stacks and large allocations are mapped too.
  if (fd >= 0 && (flags & MAP_SHARED) != 0 && perseus_test::refused(Call::kMmap)) return MAP_FAILED;
  return perseus_test::next<void*(void*, size_t, int, int, int, off_t)>("mmap")(at, size, protection, flags, fd,
                                                                                offset);
}

}  // extern "C"

namespace perseus_test {
namespace {

constexpr char kSecret[] = "secret of a test";

int open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

int shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:perseus") != std::string::npos;
  return count;
}

// Whole numbers, so that any order of adding gives the same bits.
float input_of(int rank, int step, int64_t i) { return static_cast<float>((i * 7 + step * 3 + rank * 5) % 1000); }

struct Job {
  std::string transport;
  int size, steps;
  int64_t elements;
  int timeout_s;
  std::vector<int> start_timeouts_s;
  int port;
};

perseus_context* join(const Job& job, int rank, Ending* ending) {
  const std::string transport = "PERSEUS_TRANSPORT=" + job.transport;
  const std::string timeout = "GLOO_TIMEOUT_SECONDS=" + std::to_string(job.timeout_s);
  const int patience_s = job.start_timeouts_s.empty() ? 5 : job.start_timeouts_s[static_cast<size_t>(rank)];
  const std::string start_timeout = "HOROVOD_START_TIMEOUT=" + std::to_string(patience_s);
  const char* overrides[] = {transport.c_str(),
                             "PERSEUS_GLOO_NETWORK_INTERFACE=lo",
                             "PERSEUS_CHECKSUM=1",
                             start_timeout.c_str(),
                             timeout.c_str(),
                             "PERSEUS_LOG_LEVEL=error",
                             nullptr};
  perseus_context_options options{};
  options.struct_size = sizeof options;
  options.rank = rank;
  options.size = job.size;
  options.store_host = "127.0.0.1";
  options.store_port = job.port;
  options.secret = kSecret;
  options.secret_size = sizeof kSecret - 1;
  options.overrides = overrides;
  options.interrupted = interrupted;
  perseus_context* context = nullptr;
  ending->code = perseus_context_create(&options, &context);
  if (ending->code == PERSEUS_OK) return context;
  ending->message = perseus_error_message();
  return nullptr;
}

// Sets *message unless the sum is there and right.
bool allreduce(perseus_context* context, const Job& job, int rank, int step, std::string* message) {
  std::vector<float> data(static_cast<size_t>(job.elements));
  for (int64_t i = 0; i < job.elements; ++i) data[static_cast<size_t>(i)] = input_of(rank, step, i);
  perseus_tensor tensor{data.data(), data.data(), &job.elements, 1, PERSEUS_FLOAT32};
  perseus_request request{};
  request.struct_size = sizeof request;
  request.kind = PERSEUS_ALLREDUCE;
  request.name = "gradient";
  request.tensors = &tensor;
  request.tensor_count = 1;
  request.op = PERSEUS_SUM;
  request.prescale = request.postscale = 1.0;
  perseus_handle handle = 0;
  perseus_code code = perseus_request_submit(context, &request, &handle);
  if (code == PERSEUS_OK) code = perseus_handle_wait(context, handle, 60'000);
  if (code != PERSEUS_OK) return *message = perseus_error_message(), false;
  perseus_handle_release(context, handle);
  for (int64_t i = 0; i < job.elements; ++i) {
    float expected = 0;
    for (int peer = 0; peer < job.size; ++peer) expected += input_of(peer, step, i);
    if (data[static_cast<size_t>(i)] != expected) return *message = "element " + std::to_string(i) + " is wrong", false;
  }
  return true;
}

Ending live(const Job& job, int rank, const std::vector<Fault>& faults) {
  Armed& state = armed();
  for (const Fault& fault : faults)
    if (fault.rank == rank) state.faults.push_back(fault);
  state.store_port = job.port;
  Ending ending;
  const int descriptors = open_descriptors(), mappings = shared_mappings();
  state.on = true;
  perseus_context* context = join(job, rank, &ending);
  for (int step = 0; context != nullptr && step < job.steps; ++step) {
    for (std::atomic<int>& calls : state.calls) calls = 0;
    state.step = step;
    if (!allreduce(context, job, rank, step, &ending.message)) break;
    ++ending.steps;
  }
  state.on = false;
  perseus_context_destroy(context);
  ending.descriptors = open_descriptors() - descriptors;
  ending.mappings = shared_mappings() - mappings;
  ending.injected = state.injected;
  ending.ended = true;
  return ending;
}

void write_all(int fd, const void* data, size_t size) {
  if (::write(fd, data, size) != static_cast<ssize_t>(size)) _exit(3);
}

// Less than a pipe holds: nobody waits for its reader.
void report(int fd, const Ending& ending) {
  const int numbers[] = {ending.steps, ending.injected, ending.descriptors, ending.mappings, ending.code};
  write_all(fd, numbers, sizeof numbers);
  write_all(fd, ending.message.data(), std::min<size_t>(ending.message.size(), 4096));
}

Ending read_report(int fd) {
  Ending ending;
  int numbers[5];
  if (::read(fd, numbers, sizeof numbers) != sizeof numbers) return ending;
  ending.ended = true;
  ending.steps = numbers[0];
  ending.injected = numbers[1];
  ending.descriptors = numbers[2];
  ending.mappings = numbers[3];
  ending.code = numbers[4];
  char text[4096];
  for (ssize_t n; (n = ::read(fd, text, sizeof text)) > 0;) ending.message.append(text, static_cast<size_t>(n));
  return ending;
}

}  // namespace

std::vector<Ending> run_faulty_world(const std::string& transport, int size, int steps, int64_t elements,
                                     const std::vector<Fault>& faults, int limit_s, int timeout_s,
                                     const std::vector<int>& start_timeouts_s) {
  Job job{transport, size, steps, elements, timeout_s, start_timeouts_s, 0};
  std::vector<pid_t> processes;
  std::vector<int> pipes, orders;
  // Before the store has a thread: ThreadSanitizer looks at no child of a process with several.
  for (int rank = 0; rank < size; ++rank) {
    int ends[2], order[2];
    if (::pipe2(ends, O_CLOEXEC) != 0 || ::pipe2(order, O_CLOEXEC) != 0) break;
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(order[1]);
      if (::read(order[0], &job.port, sizeof job.port) != sizeof job.port) _exit(3);
      report(ends[1], live(job, rank, faults));
      _exit(0);
    }
    ::close(ends[1]);
    ::close(order[0]);
    processes.push_back(child);
    pipes.push_back(ends[0]);
    orders.push_back(order[1]);
  }
  perseus_store_server* server = nullptr;
  perseus_store_server_create("127.0.0.1", 0, 0, kSecret, sizeof kSecret - 1, &server);
  job.port = perseus_store_server_port(server);
  for (size_t i = 0; i < orders.size(); ++i) {
    if (::write(orders[i], &job.port, sizeof job.port) != sizeof job.port) ::kill(processes[i], SIGKILL);
    ::close(orders[i]);
  }
  std::vector<Ending> endings;
  const int64_t deadline = perseus::now_ns() + limit_s * perseus::kSecond;
  for (size_t i = 0; i < processes.size(); ++i) {
    pollfd entry{pipes[i], POLLIN, 0};
    const int64_t left = std::max<int64_t>(0, deadline - perseus::now_ns());
    if (::poll(&entry, 1, static_cast<int>(left / perseus::kMillisecond)) <= 0) ::kill(processes[i], SIGKILL);
    endings.push_back(read_report(pipes[i]));
    ::close(pipes[i]);
    ::waitpid(processes[i], nullptr, 0);
  }
  perseus_store_server_destroy(server);
  return endings;
}

}  // namespace perseus_test
