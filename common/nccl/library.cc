// Finds NCCL where frameworks have it.
#include "nccl/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "base/config.h"
#include "base/error.h"
#include "base/look_up.h"
#include "base/mutex.h"
#include "base/processes.h"

namespace perseus::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kOldest = 21800;  // with communicators that do not block

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

// pip puts packages beside each other, NVIDIA's into nvidia/.
std::string beside_us() {
  Dl_info us;
  if (::dladdr(kName, &us) == 0 || us.dli_fname == nullptr) return "";
  std::string path = us.dli_fname;  // …/perseus/libperseus.so
  for (int up = 0; up < 2; ++up) path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  return path + "/nvidia/nccl/lib/" + kName;
}

std::vector<std::string> candidates(const std::string& wanted) {
  if (!wanted.empty()) return {wanted};
  std::vector<std::string> paths = loaded_libraries("self", kName);
  if (const std::string path = beside_us(); ::access(path.c_str(), R_OK) == 0) paths.push_back(path);
  paths.emplace_back(kName);
  return paths;
}

}  // namespace

const Library& Library::get(const std::string& wanted) {
  // Not a static Library: an exception leaves it to the next call, for which threads may wait already, and
  // ThreadSanitizer lets such waiters wait for ever.
  static Mutex& mutex = *new Mutex;
  static const Library* library = nullptr;
  const MutexLock lock(mutex);
  if (library == nullptr) library = new Library(wanted);
  return *library;
}

Library::Library(const std::string& wanted) {
  for (const std::string& path : candidates(wanted)) {
    library_ = ::dlopen(path.c_str(), RTLD_NOW);
    path_ = path;
    if (library_ != nullptr) break;
  }
  if (library_ == nullptr) {
    const char* why = ::dlerror();
    fail(ErrorKind::kIo, std::string("[nccl] NCCL cannot be opened (") + (why == nullptr ? kName : why) +
                             "): install nvidia-nccl-cu13 or nvidia-nccl-cu12, or name its libnccl.so.2 in "
                             "PERSEUS_NCCL_LIBRARY");
  }
  const auto find = [this](const char* name, auto* function) {
    look_up(library_, "[nccl] " + path_, name, "install NCCL " + version_text(kOldest) + " or newer", function);
  };
  find("ncclGetVersion", &functions_.version);
  find("ncclGetErrorString", &functions_.error_text);
  if (const Result result = functions_.version(&version_); result != kSuccess)
    fail(ErrorKind::kIo, "[nccl] ncclGetVersion of " + path_ + ": " + functions_.error_text(result));
  if (version_ < kOldest)
    fail(ErrorKind::kIo,
         "[nccl] " + path_ + " is NCCL " + version_text(version_) + ": install " + version_text(kOldest) + " or newer");
  // It outweighs what we ask for: joining would then block the ranks that others wait for.
  if (environment_value("NCCL_COMM_BLOCKING") == "1")
    fail(ErrorKind::kIo, "[nccl] NCCL_COMM_BLOCKING=1 makes NCCL's calls block, which Perseus cannot use: unset it");
  find("ncclGetLastError", &functions_.last_error);
  find("ncclGetUniqueId", &functions_.unique_id);
  find("ncclCommInitRankConfig", &functions_.join);
  find("ncclCommGetAsyncError", &functions_.state);
  find("ncclCommAbort", &functions_.abort);
  find("ncclAllReduce", &functions_.allreduce);
  find("ncclReduceScatter", &functions_.reduce_scatter);
  find("ncclAllGather", &functions_.allgather);
}

std::string Library::text_of(Result code, Handle communicator) const {
  std::string text = functions_.error_text(code);
  const char* last = functions_.last_error(communicator);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

void Library::check(Result code, const char* what, Handle communicator) const {
  if (code != kSuccess && code != kInProgress)
    fail(ErrorKind::kIo, std::string("[nccl] ") + what + ": " + text_of(code, communicator));
}

void connect_when_joining() { set_where_unset("NCCL_RUNTIME_CONNECT", "0"); }

int type_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUInt8:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kInt64:
      return 4;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    case DType::kInt16:
    case DType::kBool:
      return -1;
  }
  return -1;
}

}  // namespace perseus::nccl
