// Waiting blocks the thread that runs the program. Any thread.
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "compiled_call.h"
#include "question.h"
#include "targets.h"
#include "xla/service/custom_call_status_internal.h"
#include "xla/service/custom_call_target_registry.h"

namespace perseus::tensorflow::xla {
namespace {

constexpr int kStatusReturningUnified = 3;

// TensorFlow exports no function for it.
void fail(XlaCustomCallStatus* status, const std::string& text) { status->message = text; }

CompiledCall* call_in(const void* buffer) {
  int64_t number;
  std::memcpy(&number, buffer, sizeof(number));
  return reinterpret_cast<CompiledCall*>(number);
}

void start(void* call, const void** tensors, const char* text, size_t length, XlaCustomCallStatus* status) {
  Failure failure;
  CompiledCall* started = CompiledCall::start(from_text({text, length}), tensors, &failure);
  const auto number = reinterpret_cast<int64_t>(started);
  std::memcpy(call, &number, sizeof(number));
  if (started == nullptr) fail(status, failure.text);
}

void wait(void* same_call, const void** call, const char*, size_t, XlaCustomCallStatus* status) {
  std::memcpy(same_call, call[0], sizeof(int64_t));
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::optional<std::string> problem;
  call_in(call[0])->when_done([&](const Failure* failure) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure != nullptr) problem = failure->text;
    done = true;
    changed.notify_one();
  });
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return done; });
  if (problem) fail(status, *problem);
}

void take(void* results, const void** call, const char*, size_t, XlaCustomCallStatus*) {
  call_in(call[0])->take(static_cast<void* const*>(results));
}

void ask(void* number, const void**, const char* text, size_t length, XlaCustomCallStatus* status) {
  const WorldUse world;
  if (world.context() == nullptr) return fail(status, kNotInitialized);
  std::istringstream words{std::string(text, length)};
  int fact = 0, group = 0;
  words >> fact >> group;
  int32_t value = 0;
  if (!answer(world.context(), {static_cast<Fact>(fact), group}, &value)) return fail(status, kNoGroup);
  std::memcpy(number, &value, sizeof(value));
}

bool register_all() {
  auto* registry = ::xla::CustomCallTargetRegistry::Global();
  registry->Register(kStart, reinterpret_cast<void*>(&start), "Host");
  registry->Register(kWait, reinterpret_cast<void*>(&wait), "Host");
  registry->Register(kTake, reinterpret_cast<void*>(&take), "Host");
  registry->Register(kAsk, reinterpret_cast<void*>(&ask), "Host");
  return true;
}

[[maybe_unused]] const bool registered = register_all();

}  // namespace

int interface_version() { return kStatusReturningUnified; }

std::string as_argument(const std::string& text) { return text; }

}  // namespace perseus::tensorflow::xla
