// PMIx through its library, of which only what is called here is declared: what the PMIx Standard gives these names has
// been the same since its version 2. Written from the standard, https://pmix.github.io.
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "base/blocked_signals.h"
#include "base/error.h"
#include "base/look_up.h"
#include "base/mutex.h"
#include "base/processes.h"
#include "bootstrap/launcher_space.h"

namespace perseus {
namespace {

constexpr const char* kRemedy = "; start the job with perseusrun";
constexpr const char* kLibrary = "libpmix.so.2";
constexpr auto kLookAgain = std::chrono::milliseconds(100);

// ---- the standard's names ----

constexpr int kSuccess = 0, kOperationSucceeded = -157;
constexpr uint16_t kBool = 1, kString = 3;
constexpr uint8_t kGlobal = 3;
constexpr size_t kMostValue = 4096;

struct Process {
  char space[256];
  uint32_t rank;
};
struct Value {
  uint16_t type;
  union {
    bool flag;
    char* string;
    unsigned char room[64];  // for kinds that are larger
  } data;
};
struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};
using OperationDone = void (*)(int, void*);
using ValueDone = void (*)(int, Value*, void*);

struct Library {
  int (*init)(Process*, Info*, size_t);
  int (*finalize)(const Info*, size_t);
  int (*put)(uint8_t, const char*, Value*);
  int (*commit)();
  int (*fence)(const Process*, size_t, const Info*, size_t, OperationDone, void*);
  int (*get)(const Process*, const char*, const Info*, size_t, ValueDone, void*);
  const char* (*error_text)(int);
};

// ---- finding it ----

void* open_library() {
  // The launcher's own speaks the launcher's version, and is there even where the loader would not look for it.
  std::vector<std::string> paths;
  for (const std::string& pid : ancestors()) {
    const std::vector<std::string> loaded = loaded_libraries(pid, kLibrary);
    paths.insert(paths.end(), loaded.begin(), loaded.end());
  }
  paths.emplace_back(kLibrary);
  for (const std::string& path : paths)
    if (void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  const char* why = ::dlerror();
  fail(ErrorKind::kIo, std::string("[rendezvous] ranks started by this launcher bootstrap through its library, which "
                                   "cannot be opened (") +
                           (why == nullptr ? kLibrary : why) +
                           "): put its directory into LD_LIBRARY_PATH, or start the job with perseusrun");
}

// Stays loaded: it has threads.
Library load() {
  void* handle = open_library();
  Library library{};
  const auto find = [handle](const char* name, auto* function) {
    look_up(handle, std::string("[rendezvous] ") + kLibrary, name, "start the job with perseusrun", function);
  };
  find("PMIx_Init", &library.init);
  find("PMIx_Finalize", &library.finalize);
  find("PMIx_Put", &library.put);
  find("PMIx_Commit", &library.commit);
  find("PMIx_Fence_nb", &library.fence);
  find("PMIx_Get_nb", &library.get);
  find("PMIx_Error_string", &library.error_text);
  return library;
}

// ---- talking to it ----

// What is asked, which the library may read until it answers, and the answer that its thread brings; it may do so after
// we have given up.
struct Answer {
  Process process{};
  std::string key;
  Info info{};

  Mutex mutex;
  ConditionVariable came;
  bool done PERSEUS_GUARDED_BY(mutex) = false;
  int status PERSEUS_GUARDED_BY(mutex) = kSuccess;
  std::string text PERSEUS_GUARDED_BY(mutex);

  void finish(int code, std::string value) {
    const MutexLock lock(mutex);
    done = true;
    status = code;
    text = std::move(value);
    came.notify_all();
  }
};
using Shared = std::shared_ptr<Answer>;

void operation_done(int status, void* argument) {
  const std::unique_ptr<Shared> answer(static_cast<Shared*>(argument));
  (*answer)->finish(status, "");
}

void value_done(int status, Value* value, void* argument) {
  const std::unique_ptr<Shared> answer(static_cast<Shared*>(argument));
  const bool text = status == kSuccess && value != nullptr && value->type == kString && value->data.string != nullptr;
  (*answer)->finish(status, text ? value->data.string : "");
}

class PmixSpace final : public LauncherSpace {
 public:
  explicit PmixSpace(const SpaceOptions& options) : options_(options) {
    if (options.environment("PMIX_RANK").empty())
      fail(
          ErrorKind::kInvalidArgument,
          std::string("[rendezvous] this launcher has not set PMIX_RANK, through which its ranks bootstrap") + kRemedy);
    library_ = load();
    int code = 0;
    {
      const BlockedSignals blocked;  // for its threads
      code = library_.init(&self_, nullptr, 0);
    }
    check("PMIx_Init", code);
    if (self_.rank != static_cast<uint32_t>(options.identity.rank))
      fail(ErrorKind::kIo, "[rendezvous] PMIx says that this is rank " + std::to_string(self_.rank) +
                               ", the variables of the environment say rank " + std::to_string(options.identity.rank) +
                               kRemedy);
  }

  void put(const std::string& key, const std::string& value) override {
    std::string copy = value;
    Value made{};
    made.type = kString;
    made.data.string = copy.data();
    check("PMIx_Put", library_.put(kGlobal, ("perseus." + key).c_str(), &made));
    check("PMIx_Commit", library_.commit());
  }
  size_t most_bytes() const override { return kMostValue; }
  void fence() override {
    const Shared answer = std::make_shared<Answer>();
    Info& collect = answer->info;
    std::strcpy(collect.key, "pmix.collect");
    collect.value.type = kBool;
    collect.value.data.flag = true;
    await(answer, "PMIx_Fence", "some rank",
          [&](Shared* passed) { return library_.fence(nullptr, 0, &collect, 1, operation_done, passed); });
  }
  std::string get(int rank, const std::string& key) override {
    const Shared answer = std::make_shared<Answer>();
    answer->process = self_;
    answer->process.rank = static_cast<uint32_t>(rank);
    answer->key = "perseus." + key;
    return await(answer, "PMIx_Get", "the launcher's PMIx", [&](Shared* passed) {
      return library_.get(&answer->process, answer->key.c_str(), nullptr, 0, value_done, passed);
    });
  }
  void finish() override { check("PMIx_Finalize", library_.finalize(nullptr, 0)); }

 private:
  void check(const char* call, int code) const {
    if (code == kSuccess) return;
    const char* text = library_.error_text(code);
    fail(ErrorKind::kIo, std::string("[rendezvous] ") + call + ": " + (text == nullptr ? "?" : text) + " (" +
                             std::to_string(code) + ")" + kRemedy);
  }

  template <class Call>
  std::string await(const Shared& answer, const char* name, const char* what, Call call) {
    auto passed = std::make_unique<Shared>(answer);
    const int code = call(passed.get());
    if (code == kOperationSucceeded) return "";  // nothing will be brought
    check(name, code);
    passed.release();  // the answer's to free
    const MutexLock lock(answer->mutex);
    while (!answer->done)
      if (!answer->came.wait_for(answer->mutex, kLookAgain) && !answer->done) check_patience(options_, what);
    check(name, answer->status);
    return answer->text;
  }

  SpaceOptions options_;
  Library library_{};
  Process self_{};
};

}  // namespace

std::unique_ptr<LauncherSpace> open_pmix_space(const SpaceOptions& options) {
  return std::make_unique<PmixSpace>(options);
}

}  // namespace perseus
