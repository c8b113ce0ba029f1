// Greetings, the communicator, and whose turn it is.
#include "collective/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace perseus {
namespace {

constexpr unsigned kNonBlockingStream = 1;
constexpr int kHighestPriority = -5;
constexpr const char* kCollective = "a collective";
constexpr int64_t kPatience = kSecond;  // with members that do not take leave, too
constexpr std::chrono::seconds kAbortPatience{5};
// May two ranks share a GPU? Whether they do is NCCL's own variable to say.
bool shares_gpus(const nccl::Library& library) {
  constexpr int kSince = 23000;
  return library.version() >= kSince;
}

// Those whose tensors a communicator of this process takes.
struct TakenGpus {
  Mutex mutex;
  std::set<int> numbers PERSEUS_GUARDED_BY(mutex);
};
TakenGpus& taken_gpus() {
  static TakenGpus& taken = *new TakenGpus;  // contexts may outlive main()
  return taken;
}

bool all(const std::vector<bool>& values) {
  return std::all_of(values.begin(), values.end(), [](bool value) { return value; });
}

void write(const std::string& text, Letter* letter) {
  std::strncpy(letter->text, text.c_str(), sizeof letter->text - 1);
}

}  // namespace

// Of ncclCommAbort, on its thread.
struct NcclCommunicator::Ending {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> then;  // what follows, where nobody waits any more
  bool over = false;
};

NcclCommunicator::NcclCommunicator(NcclSettings settings, MakeLetters make_letters)
    : settings_(std::move(settings)), make_letters_(std::move(make_letters)) {}

NcclCommunicator::~NcclCommunicator() PERSEUS_NO_THREAD_ANALYSIS {
  if (state() == State::kJoined) take_leave();
  abort();
  const auto give_back = [claimed = claimed_.load(), streams = std::vector<cuda::Handle>{stream_, to_host_}] {
    for (cuda::Handle stream : streams)
      if (stream != nullptr) cuda::Driver::get().call().stream_destroy(stream);
    if (claimed == kNoDevice) return;
    const MutexLock lock(taken_gpus().mutex);
    taken_gpus().numbers.erase(claimed);
  };
  if (ending_) {
    const std::lock_guard<std::mutex> lock(ending_->mutex);
    ending_->then = give_back;  // for the thread that still waits for the GPU
    if (!ending_->over) return;
  }
  try {
    std::optional<cuda::Device::Current> current;
    if (device_ != nullptr) current.emplace(*device_);
    give_back();
  } catch (const std::exception&) {
    // The process ends, and the driver has ended before it.
  }
}

bool NcclCommunicator::claims(int device) {
  int claimed = claimed_.load(std::memory_order_acquire);
  if (claimed == kNoDevice) {
    const MutexLock lock(taken_gpus().mutex);
    claimed = claimed_.load(std::memory_order_relaxed);
    if (claimed == kNoDevice && taken_gpus().numbers.insert(device).second) claimed_ = claimed = device;
  }
  return claimed == device;
}

bool NcclCommunicator::takes(int device) {
  if (missing_.load(std::memory_order_relaxed) || state() == State::kRefused || unable_ >= kMostUnable) return false;
  if (!claims(device)) return false;
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
    nccl::Result result = nccl::kSuccess;
    const nccl::Result asked = library().call().state(handle_, &result);
    if (asked != nccl::kSuccess) result = asked;
    // NCCL would wait for ever for one that cannot join.
    if (result == nccl::kInProgress && failed() != nullptr) result = nccl::kRemoteError;
    const bool late = settings_.join_ns > 0 && now_ns() - joining_since_ns_ > settings_.join_ns;
    if (result != nccl::kInProgress) conclude(result);
    else if (late)
      conclude(result, "not done within half of GLOO_TIMEOUT_SECONDS: see NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO");
    moved |= result != nccl::kInProgress || late;
  }
  if (state() == State::kConcluding && all(concluded_)) {
    if (const Letter* why = failed(); why != nullptr) refuse(why->text);
    else state_ = State::kJoined;
    moved = true;
  }
  if (state() == State::kJoined) give_turns();
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
  waiting_.assign(kMostStreams, none);
  able_.assign(kMostStreams, true);
  const cuda::Device::Current current(*device_);
  const cuda::Driver& driver = cuda::Driver::get();
  for (cuda::Handle* stream : {&stream_, &to_host_})
    driver.check(driver.call().stream_create(stream, kNonBlockingStream, kHighestPriority),
                 "cuStreamCreateWithPriority");
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
      break;
  }
  if (letter.stream >= kMostStreams)
    fail(ErrorKind::kInternal,
         "[nccl] member " + std::to_string(from) + " speaks of stream " + std::to_string(letter.stream));
  if (letter.kind == Letter::Kind::kReady) note_ready(from, letter.stream, letter.code == 0);
  else turns_.push_back({letter.stream, letter.code == 0});
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
  const cuda::Device::Current current(*device_);
  nccl::CommunicatorConfig config;
  const nccl::Result result = library().call().join(&handle_, members(), hellos_[0].id, me(), &config);
  if (result != nccl::kSuccess && result != nccl::kInProgress) conclude(result);
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
  abort();
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

void NcclCommunicator::check() {
  const nccl::Result result = ask();
  if (result == nccl::kRemoteError) {
    const int64_t now = now_ns();
    if (remote_error_since_ns_ == 0) remote_error_since_ns_ = now;
    if (now - remote_error_since_ns_ < 2 * kPatience) return;
  }
  library().check(result, kCollective, handle_);
}

void NcclCommunicator::note_ready(int member, uint32_t stream, bool able) {
  waiting_[stream][static_cast<size_t>(member)] = true;
  if (!able) able_[stream] = false;
}

void NcclCommunicator::ready(uint32_t stream, bool able) {
  if (me() == 0) return note_ready(0, stream, able);
  Letter letter;
  letter.kind = Letter::Kind::kReady;
  letter.stream = stream;
  letter.code = able ? 0 : 1;
  letters_->send(0, letter);
}

void NcclCommunicator::give_turns() {
  if (me() != 0) return;
  for (uint32_t stream = 0; stream < kMostStreams; ++stream) {
    std::vector<bool>& waiting = waiting_[stream];
    if (!all(waiting)) continue;
    std::fill(waiting.begin(), waiting.end(), false);
    Letter letter;
    letter.kind = Letter::Kind::kLaunch;
    letter.stream = stream;
    letter.code = able_[stream] ? 0 : 1;
    able_[stream] = true;
    letters_->send_to_all(letter);
    on_letter(0, letter);
  }
}

NcclCommunicator::Turn NcclCommunicator::turn(uint32_t stream) {
  if (in_turn_ || turns_.empty() || turns_.front().stream != stream) return Turn::kWait;
  const bool by_nccl = turns_.front().by_nccl;
  turns_.pop_front();
  in_turn_ = by_nccl;
  if (by_nccl) unable_ = 0;
  else if (++unable_ == kMostUnable && me() == 0)
    settings_.log("[nccl] a GPU has too little memory for NCCL: the tensors of the ranks " + settings_.of_whom +
                  " go through host memory from now on");
  return by_nccl ? Turn::kNccl : Turn::kHost;
}

bool NcclCommunicator::enqueued() {
  const nccl::Result result = ask();
  library().check(result, kCollective, handle_);
  if (result == nccl::kInProgress) return false;
  in_turn_ = false;
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
    else if (state() == State::kJoined && me() == 0) here = waiting_[stream][at];
    if (member != me() && !here) missing.push_back(member);
  }
  return missing;
}

// The memory of this member's GPU is mapped by the others, which may still be at the end of the last collective.
void NcclCommunicator::take_leave() noexcept {
  try {
    Letter farewell;
    farewell.kind = Letter::Kind::kFarewell;
    letters_->send_to_all(farewell);
    left_[static_cast<size_t>(me())] = true;
    for (const int64_t deadline = now_ns() + kPatience; now_ns() < deadline;) {
      settings_.poll();
      letters_->flush();
      read();
      if (all(left_)) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    // Whoever is gone needs nothing.
  }
}

bool NcclCommunicator::abort() noexcept {
  state_ = State::kRefused;
  turns_.clear();
  in_turn_ = false;
  if (handle_ == nullptr) return !stuck_;
  // On a thread of its own: it may wait for all that the GPU does, such as another library's kernel that never ends.
  try {
    const auto ending = ending_ = std::make_shared<Ending>();
    std::thread([ending, device = device_, handle = handle_, stream = stream_, library = &library()] {
      try {
        const cuda::Device::Current current(*device);
        library->call().abort(handle);
        cuda::Driver::get().call().stream_synchronize(stream);
        const std::lock_guard<std::mutex> lock(ending->mutex);
        if (ending->then) ending->then();
        ending->over = true;
      } catch (const std::exception&) {
        // The process ends, and the driver has ended before it.
      }
      const std::lock_guard<std::mutex> lock(ending->mutex);
      ending->over = true;
      ending->changed.notify_all();
    }).detach();
    std::unique_lock<std::mutex> lock(ending->mutex);
    stuck_ = !ending->changed.wait_for(lock, kAbortPatience, [&] { return ending->over; });
  } catch (const std::exception&) {
    stuck_ = true;  // no thread
  }
  if (stuck_) device_->give_up();
  handle_ = nullptr;
  return !stuck_;
}

}  // namespace perseus
