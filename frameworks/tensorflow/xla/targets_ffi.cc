// Waiting blocks none of XLA's threads: the program continues when the core calls back. Any thread.
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "compiled_call.h"
#include "question.h"
#include "targets.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
const XLA_FFI_Api* GetXlaFfiApi();  // TensorFlow's; xla/ffi/ffi_api.h takes half a minute to compile
}

namespace perseus::tensorflow::xla {
namespace {

namespace ffi = ::xla::ffi;

constexpr int kTypedFfi = 4;

ffi::Error error_of(const Failure& failure) {
  return ffi::Error(static_cast<ffi::ErrorCode>(failure.code), failure.text);
}

CompiledCall* call_in(const ffi::AnyBuffer& buffer) {
  int64_t number;
  std::memcpy(&number, buffer.untyped_data(), sizeof(number));
  return reinterpret_cast<CompiledCall*>(number);
}

void put(CompiledCall* call, ffi::Result<ffi::AnyBuffer> buffer) {
  const auto number = reinterpret_cast<int64_t>(call);
  std::memcpy(buffer->untyped_data(), &number, sizeof(number));
}

ffi::Error start(ffi::RemainingArgs tensors, ffi::Result<ffi::AnyBuffer> call, std::string_view text) {
  std::vector<const void*> inputs;
  for (size_t i = 0; i < tensors.size(); ++i) inputs.push_back(tensors.get<ffi::AnyBuffer>(i)->untyped_data());
  Failure failure;
  CompiledCall* started = CompiledCall::start(from_text(text), inputs.data(), &failure);
  if (started == nullptr) return error_of(failure);
  put(started, call);
  return ffi::Error::Success();
}

ffi::Future wait(ffi::AnyBuffer call, ffi::Result<ffi::AnyBuffer> same_call) {
  CompiledCall* const waited = call_in(call);
  put(waited, same_call);
  ffi::Promise promise;
  ffi::Future future(promise);
  waited->when_done([promise](const Failure* failure) mutable {
    if (failure == nullptr) promise.SetAvailable();
    else promise.SetError(error_of(*failure));
  });
  return future;
}

ffi::Error take(ffi::AnyBuffer call, ffi::RemainingRets results) {
  std::vector<void*> outputs;
  for (size_t i = 0; i < results.size(); ++i) outputs.push_back((*results.get<ffi::AnyBuffer>(i))->untyped_data());
  call_in(call)->take(outputs.data());
  return ffi::Error::Success();
}

ffi::Error ask(ffi::Result<ffi::AnyBuffer> number, std::string_view text) {
  const WorldUse world;
  if (world.context() == nullptr) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, kNotInitialized);
  std::istringstream words{std::string(text)};
  int fact = 0, group = 0;
  words >> fact >> group;
  int32_t value = 0;
  if (!answer(world.context(), {static_cast<Fact>(fact), group}, &value))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, kNoGroup);
  std::memcpy(number->untyped_data(), &value, sizeof(value));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(perseus_start, start,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<std::string_view>("text"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(perseus_wait, wait, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(perseus_take, take, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(perseus_ask, ask, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>().Attr<std::string_view>("text"));

XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kStart, "Host", perseus_start);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kWait, "Host", perseus_wait);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kTake, "Host", perseus_take);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kAsk, "Host", perseus_ask);

}  // namespace

int interface_version() { return kTypedFfi; }

std::string as_argument(const std::string& text) { return "{text = \"" + text + "\"}"; }

}  // namespace perseus::tensorflow::xla
