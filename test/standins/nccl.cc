// A stand-in for NCCL, with its names and its order of things, for machines without a GPU: a collective is work of a
// stream of the stand-in driver, and exchanges pieces through memory that all ranks share, be they threads or
// processes. It is stricter than NCCL where NCCL forgives: calls need a current context, a stream of the communicator's
// device and a communicator with nothing in progress, and ranks that disagree fail. All functions are thread-safe.
#include "nccl.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "nccl_reductions.h"

namespace {

using namespace standin_nccl;

constexpr int kVersion = 22807, kMostRanks = 64, kMostDelay = 2000;  // microseconds
constexpr size_t kHalfBytes = 128 << 10;
constexpr char kNamePrefix[] = "/standin_nccl.";

constexpr int kSharesThreads = 22800;

std::atomic<int> init_code{0}, async_code{0}, calls{0};
std::atomic<bool> held{false}, aborts_held{false};

int version() {
  static const char* const told = std::getenv("STANDIN_NCCL_VERSION");
  return told == nullptr ? kVersion : std::atoi(told);
}

void pause() { std::this_thread::sleep_for(std::chrono::microseconds(30)); }

// ---- the last error ----

struct LastError {
  std::mutex mutex;
  std::string text;
};
LastError& last_error() {
  static LastError& made = *new LastError;
  return made;
}

ncclResult_t failed(ncclResult_t code, const std::string& text) {
  const std::lock_guard<std::mutex> lock(last_error().mutex);
  last_error().text = text;
  return code;
}

// ---- what ranks share ----

enum Kind { kAllReduce, kReduceScatter, kAllGather };

// What all ranks must agree on.
struct Terms {
  Kind kind;
  ncclDataType_t type;
  ncclRedOp_t op;
  size_t count;

  bool operator==(const Terms& other) const {
    return kind == other.kind && type == other.type && op == other.op && count == other.count;
  }
};

struct Half {
  Terms terms;
  alignas(64) unsigned char data[kHalfBytes];
};

enum State { kAbsent, kJoined, kLeft, kAborted };

// A rank writes a round's piece into one half, while the others may still read the last round's piece in the other.
struct RankPart {
  std::atomic<int> state;
  char gpu[16];
  std::atomic<uint64_t> published;  // rounds
  Half halves[2];
};

// New memory is zero. The size is the same for any number of ranks, as pages that nobody touches take no memory.
struct Shared {
  std::atomic<int> ranks, joined;
  std::atomic<bool> unlinked;
  RankPart parts[kMostRanks];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

// A shared-memory object with a name, which goes once all ranks have it or nobody has it. Who has it holds a lock on
// the file, which ends with the process too.
class SharedMemory {
 public:
  ~SharedMemory() {
    if (shared_ != nullptr) ::munmap(shared_, sizeof(Shared));
  }
  bool open(const std::string& name) {
    name_ = name;
    struct stat status;
    for (;;) {
      file_ = ::shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
      if (file_ < 0 || ::flock(file_, LOCK_SH) != 0 || ::fstat(file_, &status) != 0) return false;
      if (status.st_nlink > 0) break;
      ::close(file_);  // the last rank that had it has just left
    }
    if (::ftruncate(file_, sizeof(Shared)) != 0) return false;
    void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) return false;
    shared_ = static_cast<Shared*>(memory);
    return true;
  }
  // All ranks have it.
  void remove_name() {
    if (!shared_->unlinked.exchange(true)) ::shm_unlink(name_.c_str());
    close_file();
  }
  // Keeps the memory, for those who still look at it.
  void leave() {
    struct stat status;  // of two that leave at once, one gets the lock, as both have given theirs up for it
    if (file_ >= 0 && ::flock(file_, LOCK_EX | LOCK_NB) == 0 && ::fstat(file_, &status) == 0 && status.st_nlink > 0)
      ::shm_unlink(name_.c_str());
    close_file();
  }
  Shared* get() const { return shared_; }

 private:
  void close_file() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
  }

  std::string name_;
  int file_ = -1;
  Shared* shared_ = nullptr;
};

// ---- communicators ----

struct Work {
  Terms terms;
  const void* send;
  void* receive;
  void* stream;
  uint64_t turn = 0;
};

struct Membership {
  std::string name;
  int ranks, rank, device;
  bool blocking;
  bool shares_gpus;  // ranks may have the same one
  char gpu[16];
  ncclResult_t told;  // by standin_nccl_fail_init()
};

// Where kernels see memory of the device; null if not all of it is there.
unsigned char* seen(const void* memory, size_t bytes, int device) {
  constexpr int kDeviceOrdinal = 9;
  const auto begin = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(memory));
  const unsigned long long last = begin + (bytes == 0 ? 0 : bytes - 1);
  for (const unsigned long long address : {begin, last}) {
    int owner = -1;
    if (cuPointerGetAttribute(&owner, kDeviceOrdinal, address) != 0 || owner != device) return nullptr;
  }
  auto* const view = static_cast<unsigned char*>(standin_view(begin));
  return standin_view(last) == view + (last - begin) ? view : nullptr;
}

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  explicit Communicator(Membership member) : member_(std::move(member)) {
    static std::atomic<unsigned> made{0};
    random_.seed(static_cast<unsigned>(::getpid()) * 64 + ++made);
  }

  // Blocks until all ranks have come.
  ncclResult_t init() {
    error_ = join();
    ready_ = true;
    return static_cast<ncclResult_t>(error_.load());
  }
  // The same on a thread of its own, which then also puts work into streams.
  void start() {
    in_progress_ = true;
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }

  ncclResult_t async_error() {
    const bool in_progress = in_progress_;  // before the error, which is set first
    if (const int code = async_code; code != ncclSuccess) return static_cast<ncclResult_t>(code);
    if (const int code = error_; code != ncclSuccess) return static_cast<ncclResult_t>(code);
    if (ready_ && peer_aborted()) return failed(ncclRemoteError, "another rank aborted its communicator");
    return in_progress ? ncclInProgress : ncclSuccess;
  }

  // Success: nothing is in progress, and nothing failed.
  ncclResult_t ensure_idle() {
    const ncclResult_t state = async_error();
    return state == ncclInProgress ? refused_as_busy() : state;
  }
  static ncclResult_t refused_as_busy() {
    return failed(ncclInvalidUsage, "a call before the previous one on this communicator was done");
  }

  // Before 2.28, NCCL keeps what a call has begun in variables of the calling thread. False: those of another call are
  // still in use.
  bool takes_thread() {
    thread_local std::weak_ptr<Communicator> last;
    const std::shared_ptr<Communicator> before = last.lock();
    if (version() < kSharesThreads && before && before.get() != this && before->in_progress_) return false;
    last = weak_from_this();
    return true;
  }
  static ncclResult_t refused_thread() {
    return failed(ncclInvalidUsage, "a call before the previous one of this thread was done");
  }

  ncclResult_t begin(Work work) {
    if (!takes_thread()) return refused_thread();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const ncclResult_t state = ensure_idle(); state != ncclSuccess) return state;
    if (standin_stream_device(work.stream) != member_.device)
      return failed(ncclInvalidUsage, "the stream is not one of the communicator's device");
    work.turn = begun_++;
    const bool late = !member_.blocking && (work.turn == 0 || random_() % 3 == 0);
    if (late) {
      in_progress_ = true;
      pending_ = work;
      changed_.notify_all();
    } else if (const ncclResult_t code = launch(work); code != ncclSuccess) {
      --begun_;
      return code;
    }
    ++calls;
    return late ? ncclInProgress : ncclSuccess;
  }

  // All work that was begun is done, or this was aborted.
  void finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ == begun_ || aborted_; });
  }
  // No work of this touches memory any more.
  void end(State as) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      aborted_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0; });
    if (joined_) part(member_.rank).state = as;
    memory_.leave();
  }

 private:
  RankPart& part(int rank) const { return memory_.get()->parts[rank]; }
  Half& half(int rank, uint64_t round) const { return part(rank).halves[round % 2]; }

  bool peer_aborted() const {
    if (memory_.get() == nullptr) return false;
    for (int rank = 0; rank < member_.ranks; ++rank)
      if (rank != member_.rank && part(rank).state == kAborted) return true;
    return false;
  }

  ncclResult_t join() {
    if (member_.told != ncclSuccess) return failed(member_.told, "standin_nccl_fail_init()");
    const std::string me = "rank " + std::to_string(member_.rank);
    if (!memory_.open(member_.name)) return failed(ncclSystemError, "no shared memory for " + me);
    Shared& shared = *memory_.get();
    int ranks = 0, state = kAbsent;
    if (!shared.ranks.compare_exchange_strong(ranks, member_.ranks) && ranks != member_.ranks)
      return failed(ncclInvalidArgument, me + " expects another number of ranks than the first that came");
    if (!part(member_.rank).state.compare_exchange_strong(state, kJoined))
      return failed(ncclInvalidUsage, me + " is there twice");
    joined_ = true;
    std::memcpy(part(member_.rank).gpu, member_.gpu, sizeof member_.gpu);
    ++shared.joined;  // pairs with the loop's look at it
    for (;; pause()) {
      const bool broken = peer_aborted();  // first: a rank joins before it aborts
      if (shared.joined == member_.ranks) break;
      if (broken) return failed(ncclRemoteError, "another rank aborted its communicator before all had come");
      if (aborted_) return failed(ncclInternalError, "aborted before all ranks had come");
    }
    memory_.remove_name();
    return member_.shares_gpus ? ncclSuccess : check_gpus();
  }

  ncclResult_t check_gpus() const {
    for (int a = 0; a < member_.ranks; ++a)
      for (int b = a + 1; b < member_.ranks; ++b)
        if (std::memcmp(part(a).gpu, part(b).gpu, sizeof member_.gpu) == 0)
          return failed(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " +
                                              std::to_string(b) + " both on the same CUDA device");
    return ncclSuccess;
  }

  void run() {
    void* context = nullptr;
    cuDevicePrimaryCtxRetain(&context, member_.device);
    cuCtxPushCurrent_v2(context);
    std::unique_lock<std::mutex> lock(mutex_);
    sleep_at_random(&lock);
    lock.unlock();
    error_ = join();
    ready_ = true;
    in_progress_ = false;
    lock.lock();
    for (;;) {
      changed_.wait(lock, [&] { return aborted_ || pending_; });
      if (pending_) sleep_at_random(&lock);
      if (aborted_) break;
      if (const ncclResult_t code = launch(*pending_); code != ncclSuccess) {
        error_ = code;
        --begun_;
      }
      pending_.reset();
      in_progress_ = false;
    }
    cuCtxPopCurrent_v2(&context);
    cuDevicePrimaryCtxRelease_v2(member_.device);
  }

  void sleep_at_random(std::unique_lock<std::mutex>* lock) {
    const std::chrono::microseconds delay(random_() % kMostDelay);
    lock->unlock();
    std::this_thread::sleep_for(delay);
    lock->lock();
  }

  ncclResult_t launch(const Work& work) {
    auto task = std::make_unique<Task>(Task{shared_from_this(), work});
    const int code = cuLaunchHostFunc(work.stream, Task::run, task.get());
    if (code != 0) return failed(ncclUnhandledCudaError, "cuLaunchHostFunc() gave " + std::to_string(code));
    task.release();  // the stream deletes it
    return ncclSuccess;
  }

  // What the stream does. Work of other streams that was begun before goes first.
  void perform(const Work& work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (aborted_) return;
      ++running_;
    }
    while (done_ != work.turn && !aborted_) pause();
    if (error_ == ncclSuccess && !aborted_)
      if (const ncclResult_t code = exchange(work); code != ncclSuccess) error_ = code;
    while (held && !aborted_) pause();
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    --running_;
    changed_.notify_all();
  }

  ncclResult_t exchange(const Work& work) {
    const Terms& terms = work.terms;
    const size_t size = kTypes[terms.type].bytes, ranks = static_cast<size_t>(member_.ranks);
    const size_t sent_blocks = terms.kind == kReduceScatter ? ranks : 1;
    const size_t received_blocks = terms.kind == kAllGather ? ranks : 1;
    const unsigned char* const send = seen(work.send, sent_blocks * terms.count * size, member_.device);
    unsigned char* const receive = seen(work.receive, received_blocks * terms.count * size, member_.device);
    if (terms.count > 0 && (send == nullptr || receive == nullptr))
      return failed(ncclUnhandledCudaError, "an illegal memory access was encountered");
    const size_t most = kHalfBytes / size / sent_blocks;
    size_t at = 0;
    do {  // at least once, so that ranks disagree about nothing as well
      const size_t count = std::min(most, terms.count - at);
      Half& mine = half(member_.rank, round_ + 1);
      mine.terms = terms;
      for (size_t block = 0; block < sent_blocks && count > 0; ++block)
        std::memcpy(mine.data + block * count * size, send + (block * terms.count + at) * size, count * size);
      if (!meet()) return ncclSuccess;
      for (int rank = 0; rank < member_.ranks; ++rank)
        if (!(half(rank, round_).terms == terms))
          return failed(ncclInvalidUsage, "ranks disagree about kind, count, type or reduction of a collective");
      if (count > 0) take(terms, at, count, receive);
      at += count;
    } while (at < terms.count);
    return ncclSuccess;
  }

  // All ranks have written their pieces of the next round, and so have read those of the last one. False: aborted.
  bool meet() {
    while (held && !aborted_) pause();
    part(member_.rank).published = ++round_;  // pairs with the other ranks' looks at it
    for (int rank = 0; rank < member_.ranks; ++rank)
      while (part(rank).published < round_ && !aborted_) pause();
    return !aborted_;
  }

  void take(const Terms& terms, size_t at, size_t count, unsigned char* receive) const {
    const Type& type = kTypes[terms.type];
    const size_t bytes = count * type.bytes;
    const size_t block = terms.kind == kReduceScatter ? static_cast<size_t>(member_.rank) : 0;
    Pieces pieces;
    for (int rank = 0; rank < member_.ranks; ++rank) pieces.push_back(half(rank, round_).data + block * bytes);
    if (terms.kind != kAllGather) return type.reduce(terms.op, pieces, count, receive + at * type.bytes);
    for (size_t rank = 0; rank < pieces.size(); ++rank)
      std::memcpy(receive + (rank * terms.count + at) * type.bytes, pieces[rank], bytes);
  }

  struct Task {
    std::shared_ptr<Communicator> communicator;
    Work work;

    static void run(void* task) {
      const std::unique_ptr<Task> owned(static_cast<Task*>(task));
      owned->communicator->perform(owned->work);
    }
  };

  const Membership member_;
  SharedMemory memory_;
  bool joined_ = false;
  uint64_t round_ = 0;              // of the work whose turn it is
  std::atomic<bool> ready_{false};  // memory_ stays as it is
  std::atomic<bool> aborted_{false}, in_progress_{false};
  std::atomic<int> error_{ncclSuccess};
  std::atomic<uint64_t> done_{0};

  std::mutex mutex_;
  std::condition_variable changed_;  // aborted_, done_ and what follows
  std::optional<Work> pending_;      // for the thread to put into its stream
  uint64_t begun_ = 0;
  int running_ = 0;
  std::minstd_rand random_;
  std::thread thread_;
};

// By handles, which are never used again.
struct Communicators {
  std::mutex mutex;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> alive;
  uintptr_t made = 0;

  ncclComm_t add(std::shared_ptr<Communicator> communicator) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto handle = reinterpret_cast<ncclComm_t>(++made);
    alive[handle] = std::move(communicator);
    return handle;
  }
  std::shared_ptr<Communicator> find(ncclComm_t handle) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = alive.find(handle);
    if (found != alive.end()) return found->second;
    failed(ncclInvalidArgument, "there is no such communicator");
    return nullptr;
  }
  // False: another thread was first.
  bool remove(ncclComm_t handle) {
    const std::lock_guard<std::mutex> lock(mutex);
    return alive.erase(handle) == 1;
  }
};

// Never destroyed: streams' threads outlive main().
Communicators& communicators() {
  static Communicators& made = *new Communicators;
  return made;
}

ncclResult_t collective(ncclComm_t comm, const Work& work) {
  const std::shared_ptr<Communicator> communicator = communicators().find(comm);
  if (!communicator) return ncclInvalidArgument;
  const Terms& terms = work.terms;
  if (terms.type < ncclInt8 || terms.type > ncclBfloat16 || terms.op < ncclSum || terms.op > ncclAvg)
    return failed(ncclInvalidArgument, "no such type or reduction");
  if (standin_current_device() < 0) return failed(ncclInvalidUsage, "no CUDA context is current");
  return communicator->begin(work);
}

bool is_one(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && std::string(value) == "1";
}

bool valid(const ncclConfig_t& config) {
  return config.magic == ncclConfig_t().magic && config.size >= sizeof(ncclConfig_t) &&
         (config.blocking == 0 || config.blocking == 1 || config.blocking == INT_MIN);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = ::version();
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const kTexts[] = {"no error",
                                       "unhandled cuda error",
                                       "unhandled system error",
                                       "internal error",
                                       "invalid argument",
                                       "invalid usage",
                                       "remote process exited or there was a network error",
                                       "NCCL operation in progress"};
  return result < ncclSuccess || result > ncclInProgress ? "unknown result code" : kTexts[result];
}

const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string text;
  const std::lock_guard<std::mutex> lock(last_error().mutex);
  text = last_error().text;
  return text.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::string name = kNamePrefix + std::to_string(::getpid());
  for (int i = 0; i < 4; ++i) name += "." + std::to_string(random());
  std::memset(id, 0, sizeof *id);
  name.copy(id->internal, sizeof id->internal - 1);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  *comm = nullptr;
  const std::string name(id.internal, ::strnlen(id.internal, sizeof id.internal));
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks || name.rfind(kNamePrefix, 0) != 0 ||
      (config != nullptr && !valid(*config)))
    return failed(ncclInvalidArgument, "invalid number of ranks, rank, id or configuration");
  Membership member{name,
                    ranks,
                    rank,
                    standin_current_device(),
                    config == nullptr || config->blocking != 0,
                    is_one("NCCL_MULTI_RANK_GPU_ENABLE"),
                    {},
                    static_cast<ncclResult_t>(init_code.load())};
  if (member.device < 0) return failed(ncclInvalidUsage, "no CUDA context is current");
  cuDeviceGetUuid_v2(member.gpu, member.device);
  const auto communicator = std::make_shared<Communicator>(member);
  if (!communicator->takes_thread()) return Communicator::refused_thread();
  if (!member.blocking) {
    communicator->start();
    *comm = communicators().add(communicator);
    return ncclInProgress;
  }
  const ncclResult_t code = communicator->init();
  if (code == ncclSuccess) *comm = communicators().add(communicator);
  else communicator->end(kAborted);
  return code;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  const std::shared_ptr<Communicator> communicator = communicators().find(comm);
  if (!communicator) return ncclInvalidArgument;
  *result = communicator->async_error();
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const std::shared_ptr<Communicator> communicator = communicators().find(comm);
  while (aborts_held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (!communicator || !communicators().remove(comm)) return ncclInvalidArgument;
  communicator->end(kAborted);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const std::shared_ptr<Communicator> communicator = communicators().find(comm);
  if (!communicator) return ncclInvalidArgument;
  if (communicator->async_error() == ncclInProgress) return Communicator::refused_as_busy();
  communicator->finish();
  if (!communicators().remove(comm)) return ncclInvalidArgument;  // it was aborted
  communicator->end(kLeft);
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, void* stream) {
  return collective(comm, {{kAllReduce, type, op, count}, send, receive, stream});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, void* stream) {
  return collective(comm, {{kReduceScatter, type, op, count}, send, receive, stream});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           void* stream) {
  return collective(comm, {{kAllGather, type, ncclSum, count}, send, receive, stream});
}

void standin_nccl_fail_init(int code) { init_code = code; }
void standin_nccl_break(int code) { async_code = code; }
void standin_nccl_hold(int on) { held = on != 0; }
void standin_nccl_hold_aborts(int on) { aborts_held = on != 0; }
int standin_nccl_calls() { return calls; }
int standin_nccl_communicators() {
  const std::lock_guard<std::mutex> lock(communicators().mutex);
  return static_cast<int>(communicators().alive.size());
}

}  // extern "C"
