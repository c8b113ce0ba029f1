// Finds the library, and the handles that its header would have named.
#include "mpi/library.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/look_up.h"
#include "base/processes.h"

namespace perseus::mpi {
namespace {

// Open MPI 4 and 5; MPICH and all that keep its ABI (Intel MPI, MVAPICH, Cray); Debian's name for MPICH.
constexpr const char* kNames[] = {"libmpi.so.40", "libmpi.so.12", "libmpich.so.12"};
// Values of the standard, which both have.
constexpr int kSuccess = 0, kSerialized = 2, kMultiple = 3, kMostText = 512;

// MPICH's handles, which its ABI fixes.
constexpr uintptr_t kMpichWorld = 0x44000000, kMpichByte = 0x4c00010d, kMpichErrorsReturn = 0x54000001;
constexpr uintptr_t kMpichMax = 0x58000001, kMpichMin = 0x58000002, kMpichSum = 0x58000003, kMpichProduct = 0x58000004;

struct TypeNames {
  DType dtype;
  const char* open_mpi;
  uintptr_t mpich;
};
constexpr TypeNames kTypes[] = {
    {DType::kFloat32, "ompi_mpi_float", 0x4c00040a}, {DType::kFloat64, "ompi_mpi_double", 0x4c00080b},
    {DType::kUInt8, "ompi_mpi_uint8_t", 0x4c00013b}, {DType::kInt8, "ompi_mpi_int8_t", 0x4c000137},
    {DType::kInt16, "ompi_mpi_int16_t", 0x4c000238}, {DType::kInt32, "ompi_mpi_int32_t", 0x4c000439},
    {DType::kInt64, "ompi_mpi_int64_t", 0x4c00083a},
};

Handle handle(uintptr_t value) { return reinterpret_cast<Handle>(value); }

std::vector<std::string> candidates() {
  std::vector<std::string> paths;
  for (const char* name : kNames)
    for (const std::string& path : loaded_libraries("self", name)) paths.push_back(path);
  // mpirun and the processes between it and us lie in bin/, beside which lib/ is.
  for (const std::string& pid : ancestors()) {
    const std::string program = executable(pid);
    const size_t bin = program.rfind("/bin/");
    if (bin == std::string::npos) continue;
    for (const char* name : kNames) {
      const std::string path = program.substr(0, bin) + "/lib/" + name;
      if (::access(path.c_str(), R_OK) == 0) paths.push_back(path);
    }
  }
  paths.insert(paths.end(), std::begin(kNames), std::end(kNames));
  return paths;
}

// MPI can be ended once in the life of a process, whatever worlds come and go meanwhile, and by then everybody's
// requests must have ended.
std::atomic<bool> may_finalize{true}, has_failed{false};
constexpr int64_t kLeaving = 5 * kSecond;

// What the end of the process needs; libraries have been closed by then.
struct AtExit {
  Functions call{};
  Handle world = nullptr, ignored = nullptr;
};
AtExit at_exit;

// Whether failures end all ranks within seconds. Those that end well go on to MPI_Finalize, and are not waited for.
bool all_leave() {
  Handle request = nullptr;
  if (at_exit.call.barrier(at_exit.world, &request) != kSuccess) return false;
  const int64_t deadline = now_ns() + kLeaving;
  for (int done = 0; at_exit.call.test(&request, &done, at_exit.ignored) == kSuccess;) {
    if (done != 0) return true;
    if (now_ns() > deadline) return false;
    const timespec pause{0, 10 * kMillisecond};
    ::nanosleep(&pause, nullptr);
  }
  return false;
}

void finalize_at_exit() {
  int done = 1;
  if (!may_finalize || at_exit.call.finalized(&done) != kSuccess || done != 0) return;
  // MPI_Finalize would wait for a rank that hangs. mpirun ends the job of a process that leaves without it.
  if (has_failed && !all_leave()) return;
  at_exit.call.finalize();
}

}  // namespace

void leave_unfinished() { may_finalize = false; }
void leave_after_failure() { has_failed = true; }

std::unique_ptr<Library> Library::open() {
  std::unique_ptr<Library> made(new Library);
  for (const std::string& path : candidates()) {
    // Its plug-ins look for its names among those of all libraries.
    made->library_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    made->path_ = path;
    if (made->library_ != nullptr) break;
  }
  if (made->library_ == nullptr) {
    const char* why = ::dlerror();
    fail(ErrorKind::kIo, std::string("[mpi] PERSEUS_CPU_OPERATIONS=mpi, but there is no MPI library (") +
                             (why == nullptr ? kNames[0] : why) +
                             "): install Open MPI or MPICH, or put the library's directory into LD_LIBRARY_PATH");
  }
  made->find_handles();
  made->initialise();
  return made;
}

Handle Library::at(const char* name) const {
  Handle found = ::dlsym(library_, name);
  if (found == nullptr) fail(ErrorKind::kIo, "[mpi] " + path_ + " has no " + name);
  return found;
}

void Library::find_handles() {
  const auto find = [this](const char* name, auto* function) {
    look_up(library_, "[mpi] " + path_, name, "install an Open MPI or MPICH that knows MPI 3.1", function);
  };
  find("MPI_Initialized", &functions_.initialized);
  find("MPI_Finalized", &functions_.finalized);
  find("MPI_Init_thread", &functions_.init);
  find("MPI_Query_thread", &functions_.query_thread);
  find("MPI_Finalize", &functions_.finalize);
  find("MPI_Ibarrier", &functions_.barrier);
  find("MPI_Comm_set_errhandler", &functions_.set_errors);
  find("MPI_Error_string", &functions_.error_text);
  find("MPI_Comm_rank", &functions_.rank);
  find("MPI_Comm_size", &functions_.size);
  find("MPI_Comm_idup", &functions_.duplicate);
  find("MPI_Comm_free", &functions_.free);
  find("MPI_Test", &functions_.test);
  find("MPI_Iallreduce", &functions_.allreduce);
  find("MPI_Ireduce_scatter", &functions_.reduce_scatter);
  find("MPI_Ibcast", &functions_.broadcast);
  find("MPI_Iallgatherv", &functions_.allgather);
  find("MPI_Ialltoallv", &functions_.alltoall);
  const bool open_mpi = ::dlsym(library_, "ompi_mpi_comm_world") != nullptr;
  for (const TypeNames& type : kTypes)
    types_[static_cast<int>(type.dtype)] = open_mpi ? at(type.open_mpi) : handle(type.mpich);
  if (open_mpi) {
    world_ = at("ompi_mpi_comm_world");
    bytes_ = at("ompi_mpi_byte");
    errors_return_ = at("ompi_mpi_errors_return");
    sum_ = at("ompi_mpi_op_sum");
    min_ = at("ompi_mpi_op_min");
    max_ = at("ompi_mpi_op_max");
    product_ = at("ompi_mpi_op_prod");
    in_place_ = handle(1);
    ignored_ = nullptr;
  } else {
    world_ = handle(kMpichWorld);
    bytes_ = handle(kMpichByte);
    errors_return_ = handle(kMpichErrorsReturn);
    sum_ = handle(kMpichSum);
    min_ = handle(kMpichMin);
    max_ = handle(kMpichMax);
    product_ = handle(kMpichProduct);
    in_place_ = handle(UINTPTR_MAX);
    ignored_ = handle(1);
  }
}

void Library::initialise() const {
  int flag = 0, provided = 0;
  check("MPI_Finalized", functions_.finalized(&flag));
  if (flag != 0) fail(ErrorKind::kIo, "[mpi] MPI_Finalize has been called already, and MPI cannot begin anew");
  check("MPI_Initialized", functions_.initialized(&flag));
  static std::atomic<bool> is_ours{false};
  if (flag == 0) {
    check("MPI_Init_thread", functions_.init(nullptr, nullptr, kMultiple, &provided));
    at_exit = {functions_, world_, ignored_};
    std::atexit(finalize_at_exit);
    is_ours = true;
  } else {
    check("MPI_Query_thread", functions_.query_thread(&provided));
  }
  // Our calls come from one thread at a time. Where others call MPI, too, it must bear several at once.
  const int needed = is_ours ? kSerialized : kMultiple;
  if (provided < needed)
    fail(ErrorKind::kInvalidArgument,
         "[mpi] " + path_ + " was initialised for fewer threads than PERSEUS_CPU_OPERATIONS=mpi needs: call " +
             "MPI_Init_thread with MPI_THREAD_MULTIPLE, which is mpi4py's default");
}

Handle Library::type_of(DType dtype) const { return types_[static_cast<int>(dtype)]; }

Handle Library::op_of(DType dtype, ReduceOp op) const {
  if (type_of(dtype) == nullptr) return nullptr;
  switch (op) {
    case ReduceOp::kSum:
      return sum_;
    case ReduceOp::kProduct:
      return product_;
    case ReduceOp::kMin:
      return dtype_is_float(dtype) ? nullptr : min_;
    case ReduceOp::kMax:
      return dtype_is_float(dtype) ? nullptr : max_;
    default:
      return nullptr;
  }
}

void Library::check_ranks(int rank, int size) const {
  int found_rank = -1, found_size = -1;
  check("MPI_Comm_rank", functions_.rank(world_, &found_rank));
  check("MPI_Comm_size", functions_.size(world_, &found_size));
  if (found_rank == rank && found_size == size) return;
  fail(ErrorKind::kInvalidArgument, "[mpi] PERSEUS_CPU_OPERATIONS=mpi: this is rank " + std::to_string(rank) + " of " +
                                        std::to_string(size) + " for Perseus, but rank " + std::to_string(found_rank) +
                                        " of " + std::to_string(found_size) + " for " + path_ +
                                        ": start the job with that library's mpirun, or with perseusrun --mpi");
}

void Library::check(const char* name, int code) const {
  if (code == kSuccess) return;
  char text[kMostText] = "";
  int length = 0;
  functions_.error_text(code, text, &length);
  fail(ErrorKind::kIo, std::string("[mpi] ") + name + ": " + text);
}

bool Library::test(Handle* request) const {
  int done = 0;
  check("MPI_Test", functions_.test(request, &done, ignored_));
  return done != 0;
}

Handle Library::duplicate(Handle communicator, int64_t deadline_ns, const std::function<bool()>& interrupted) const {
  Handle made = nullptr, request = nullptr;
  check("MPI_Comm_idup", functions_.duplicate(communicator, &made, &request));
  while (!test(&request)) {
    const bool late = now_ns() > deadline_ns;
    if (late || (interrupted && interrupted())) {
      leave_unfinished();
      if (!late) fail(ErrorKind::kAborted, "[mpi] interrupted");
      fail(ErrorKind::kTimeout,
           "[mpi] some rank did not begin to use MPI in time (HOROVOD_START_TIMEOUT): look at what it printed last");
    }
    ::sched_yield();
  }
  check("MPI_Comm_set_errhandler", functions_.set_errors(made, errors_return_));
  return made;
}

void Library::free(Handle communicator) const noexcept {
  int ended = 1;
  if (!may_finalize) return;
  if (functions_.finalized(&ended) == kSuccess && ended == 0) functions_.free(&communicator);
}

}  // namespace perseus::mpi
