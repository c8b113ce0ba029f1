// Greetings, the communicator, and its end.
#include "collective/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace perseus {
namespace {

constexpr const char* kCollective = "a collective";
constexpr int64_t kPatience = kSecond;  // with members that do not take leave, too
constexpr std::chrono::seconds kAbortPatience{5}, kAlonePatience{1};
// May two ranks share a GPU? Whether they do is NCCL's own variable to say.
bool shares_gpus(const nccl::Library& library) {
  constexpr int kSince = 23000;
  return library.version() >= kSince;
}

bool all(const std::vector<bool>& values) {
  return std::all_of(values.begin(), values.end(), [](bool value) { return value; });
}

void write(const std::string& text, Letter* letter) {
  std::strncpy(letter->text, text.c_str(), sizeof letter->text - 1);
}

}  // namespace

NcclCommunicator::NcclCommunicator(NcclSettings settings, NcclOrder* order, uint32_t number, MakeLetters make_letters)
    : settings_(std::move(settings)), order_(*order), number_(number), make_letters_(std::move(make_letters)) {}

NcclCommunicator::~NcclCommunicator() PERSEUS_NO_THREAD_ANALYSIS {
  begin_abort(state() == State::kJoined && take_leave());
  end_abort();
}

bool NcclCommunicator::takes(int device) {
  if (missing_.load(std::memory_order_relaxed) || state() == State::kRefused || unable_ >= kMostUnable) return false;
  if (!order_.claims(device)) return false;
  try {
    library();
    return true;
  } catch (const Error& error) {
    if (!missing_.exchange(true)) settings_.log(error.what());
    return false;
  }
}

bool NcclCommunicator::step(cuda::Device* device) {
  bool moved = false;
  if (state() == State::kNew) {
    device_ = device;
    greet();
    moved = true;
  }
  moved |= read();
  if (state() == State::kGreeting && all(greeted_)) {
    join();
    moved = true;
  }
  if (state() == State::kJoining) {
    nccl::Result result = joined();
    // NCCL would wait for ever for one that cannot join.
    if (result == nccl::kInProgress && failed() != nullptr) result = nccl::kRemoteError;
    const bool late = settings_.join_ns > 0 && now_ns() - joining_since_ns_ > settings_.join_ns;
    if (result != nccl::kInProgress) conclude(result);
    else if (late)
      conclude(result, "not done within " + settings_.join_limit + ": see NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO");
    moved |= result != nccl::kInProgress || late;
  }
  if (state() == State::kConcluding && all(concluded_)) {
    if (const Letter* why = failed(); why != nullptr) refuse(why->text);
    else state_ = State::kJoined;
    moved = true;
  }
  moved |= order_.step();
  return letters_->flush() || moved;
}

// The first member that could not join by itself, or else the first that could not; null = there is none.
const Letter* NcclCommunicator::failed() const {
  const Letter* found = nullptr;
  for (const Letter& outcome : outcomes_)
    if (outcome.code != nccl::kSuccess && (found == nullptr || found->code == nccl::kRemoteError)) found = &outcome;
  return found;
}

// A greeting has what all members need to know to decide alike.
void NcclCommunicator::greet() {
  letters_ = make_letters_();
  const std::vector<bool> none(static_cast<size_t>(members()), false);
  greeted_ = concluded_ = left_ = none;
  hellos_.resize(none.size());
  outcomes_.resize(none.size());
  order_.attach(number_, this, device_);
  streams_ = order_.streams();
  if (!device_->has_kernels())
    settings_.log("[cuda] GPU " + std::to_string(device_->index()) +
                  " packs tensors with a copy each, which takes the host longer: " + device_->no_kernels());
  Letter hello;
  hello.kind = Letter::Kind::kHello;
  const std::array<char, 16> gpu = device_->uuid();
  std::copy(gpu.begin(), gpu.end(), hello.gpu);
  hello.shares_gpus = shares_gpus(library()) ? 1 : 0;
  if (me() == 0) {
    const nccl::Result result = library().call().unique_id(&hello.id);
    hello.code = result;
    if (result != nccl::kSuccess) write(library().text_of(result, nullptr), &hello);
  }
  letters_->send_to_all(hello);
  on_letter(me(), hello);
  state_ = State::kGreeting;
}

bool NcclCommunicator::read() {
  bool moved = false;
  Letter letter;
  for (int member = 0; member < members(); ++member)
    while (member != me() && letters_->receive(member, &letter)) {
      on_letter(member, letter);
      moved = true;
    }
  return moved;
}

void NcclCommunicator::on_letter(int from, const Letter& letter) {
  switch (letter.kind) {
    case Letter::Kind::kHello:
      hellos_[static_cast<size_t>(from)] = letter;
      greeted_[static_cast<size_t>(from)] = true;
      return;
    case Letter::Kind::kOutcome:
      outcomes_[static_cast<size_t>(from)] = letter;
      concluded_[static_cast<size_t>(from)] = true;
      return;
    case Letter::Kind::kFarewell:
      left_[static_cast<size_t>(from)] = true;
      return;
    case Letter::Kind::kReady:
    case Letter::Kind::kLaunch:
      break;  // for the order, on links of its own
  }
  fail(ErrorKind::kInternal, "[nccl] member " + std::to_string(from) + " sent a letter that it does not send");
}

void NcclCommunicator::join() {
  if (hellos_[0].code != 0) return refuse(hellos_[0].text);
  const bool shares = std::all_of(hellos_.begin(), hellos_.end(), [](const Letter& l) { return l.shares_gpus != 0; });
  for (size_t a = 0; a < hellos_.size() && !shares; ++a)
    for (size_t b = 0; b < a; ++b)
      if (std::memcmp(hellos_[a].gpu, hellos_[b].gpu, sizeof hellos_[a].gpu) == 0)
        return refuse("two ranks use the same GPU");
  state_ = State::kJoining;
  joining_since_ns_ = now_ns();
  made_ = std::make_shared<nccl::Handle>(nullptr);
  const auto call = [made = made_, device = device_, join = library().call().join, members = members(),
                     id = hellos_[0].id, me = me()] {
    const cuda::Device::Current current(*device);
    nccl::CommunicatorConfig config;
    return join(made.get(), members, id, me, &config);
  };
  if (library().wants_threads()) {
    try {
      return call_apart(call);
    } catch (const std::system_error& error) {  // no thread
      return conclude(nccl::kInternalError, error.what());
    }
  }
  const nccl::Result result = call();
  handle_ = *made_;
  if (result != nccl::kSuccess && result != nccl::kInProgress) conclude(result);
}

nccl::Result NcclCommunicator::joined() {
  if (caller_ && handle_ == nullptr) {
    nccl::Result called = nccl::kSuccess;
    if (!caller_->over(&called)) return nccl::kInProgress;
    if (called != nccl::kSuccess && called != nccl::kInProgress) return called;
    handle_ = *made_;
  }
  nccl::Result result = nccl::kSuccess;
  const nccl::Result asked = library().call().state(handle_, &result);
  return asked == nccl::kSuccess ? result : asked;
}

void NcclCommunicator::conclude(nccl::Result result, const std::string& why) {
  Letter outcome;
  outcome.kind = Letter::Kind::kOutcome;
  outcome.code = result;
  if (result != nccl::kSuccess) write(why.empty() ? library().text_of(result, handle_) : why, &outcome);
  state_ = State::kConcluding;
  letters_->send_to_all(outcome);
  on_letter(me(), outcome);
}

void NcclCommunicator::refuse(const std::string& why) {
  begin_abort(true);
  if (me() == 0)
    settings_.log("[nccl] NCCL does not join the ranks " + settings_.of_whom +
                  ", whose tensors go through host memory: " + why);
}

nccl::Result NcclCommunicator::ask() {
  nccl::Result result = nccl::kSuccess;
  if (handle_ == nullptr) return result;
  library().check(library().call().state(handle_, &result), "ncclCommGetAsyncError", handle_);
  return result;
}

void NcclCommunicator::call_apart(std::function<nccl::Result()> call) {
  if (!caller_) caller_ = std::make_unique<CallThread>();
  caller_->give(std::move(call));
}

void NcclCommunicator::call(const char* what, const Call& call) {
  const nccl::Functions& functions = library().call();
  if (!library().wants_threads()) return library().check(call(functions, handle_), what, handle_);
  call_apart([call, &functions, device = device_, handle = handle_] {
    const cuda::Device::Current current(*device);
    return call(functions, handle);
  });
}

void NcclCommunicator::check() {
  nccl::Result called = nccl::kSuccess;
  if (caller_ && !caller_->over(&called)) return;  // of another collective
  const nccl::Result result = ask();
  if (result == nccl::kRemoteError) {
    const int64_t now = now_ns();
    if (remote_error_since_ns_ == 0) remote_error_since_ns_ = now;
    if (now - remote_error_since_ns_ < 2 * kPatience) return;
  }
  library().check(result, kCollective, handle_);
}

NcclOrder::Turn NcclCommunicator::turn(uint32_t stream) {
  const NcclOrder::Turn turn = order_.turn(collective_on(stream));
  if (turn == NcclOrder::Turn::kNccl) unable_ = 0;
  else if (turn == NcclOrder::Turn::kHost && !order_.has_left() && ++unable_ == kMostUnable && me() == 0)
    settings_.log("[nccl] a GPU has too little memory for NCCL: the tensors of the ranks " + settings_.of_whom +
                  " go through host memory from now on");
  return turn;
}

bool NcclCommunicator::enqueued() {
  if (handle_ == nullptr) fail(ErrorKind::kIo, "[nccl] the communicator has been ended");
  nccl::Result called = nccl::kSuccess;
  if (caller_ && !caller_->over(&called)) return false;
  library().check(called, kCollective, handle_);
  const nccl::Result result = ask();
  library().check(result, kCollective, handle_);
  if (result == nccl::kInProgress) return false;
  order_.end_turn();
  remote_error_since_ns_ = 0;
  return true;
}

std::vector<int> NcclCommunicator::waiting_for(uint32_t stream) const {
  std::vector<int> missing;
  if (!letters_) return missing;
  for (int member = 0; member < members(); ++member) {
    const size_t at = static_cast<size_t>(member);
    bool here = false;
    if (state() == State::kGreeting) here = greeted_[at];
    else if (state() == State::kConcluding) here = concluded_[at];
    else if (state() == State::kJoined && order_.gives_turns())
      here = order_.is_ready(collective_on(stream), settings_.rank_of(member));
    if (member != me() && !here) missing.push_back(member);
  }
  return missing;
}

// The memory of this member's GPU is mapped by the others, which may still be at the end of the last collective.
bool NcclCommunicator::take_leave() noexcept {
  try {
    Letter farewell;
    farewell.kind = Letter::Kind::kFarewell;
    letters_->send_to_all(farewell);
    left_[static_cast<size_t>(me())] = true;
    for (const int64_t deadline = now_ns() + kPatience; now_ns() < deadline;) {
      settings_.poll();
      letters_->flush();
      read();
      order_.step();
      if (all(left_)) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    // Whoever is gone needs nothing.
  }
  return false;
}

bool NcclCommunicator::abort() noexcept {
  begin_abort();
  if (await_end(kAlonePatience)) return true;
  order_.abort_all();
  return end_abort();
}

void NcclCommunicator::begin_abort(bool is_idle) noexcept {
  state_ = State::kRefused;
  order_.detach(number_);
  if (!made_) return;
  // It may wait for all that the GPU does, such as another library's kernel that never ends.
  try {
    call_apart([is_idle, device = device_, made = made_, streams = streams_, abort = library().call().abort]() mutable {
      const cuda::Device::Current current(*device);
      const nccl::Result result = *made == nullptr ? nccl::kSuccess : abort(*made);
      if (!is_idle) cuda::Driver::get().call().stream_synchronize(streams->sums);
      streams.reset();
      return result;
    });
  } catch (const std::exception&) {
    stuck_ = true;  // no thread
  }
  made_.reset();
  handle_ = nullptr;
}

// Has what begin_abort() began come to its end?
bool NcclCommunicator::await_end(std::chrono::nanoseconds patience) noexcept {
  return !stuck_ && (!caller_ || caller_->wait(patience));
}

bool NcclCommunicator::end_abort() noexcept {
  stuck_ = !await_end(kAbortPatience);
  if (stuck_) device_->give_up();
  return !stuck_;
}

}  // namespace perseus
