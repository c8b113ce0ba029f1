// Who could begin, whose turn it is, and whose GPU.
#include "collective/nccl/order.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "collective/nccl/communicator.h"

namespace perseus {
namespace {

constexpr unsigned kNonBlockingStream = 1;
constexpr int kHighestPriority = -5;
constexpr int64_t kOnItsWay = kSecond;

// Those of which a world of this process gives tensors to NCCL.
struct TakenGpus {
  Mutex mutex;
  std::set<int> numbers PERSEUS_GUARDED_BY(mutex);
};
TakenGpus& taken_gpus() {
  static TakenGpus& taken = *new TakenGpus;  // contexts may outlive main()
  return taken;
}

void give_back(int device) {
  const MutexLock lock(taken_gpus().mutex);
  taken_gpus().numbers.erase(device);
}

}  // namespace

NcclStreams::~NcclStreams() {
  for (cuda::Handle stream : {sums, to_host})
    if (stream != nullptr) cuda::Driver::get().call().stream_destroy(stream);
  if (device >= 0) give_back(device);
}

NcclOrder::~NcclOrder() PERSEUS_NO_THREAD_ANALYSIS {
  if (!streams_) {
    if (claimed_ != kNoDevice) give_back(claimed_);
    return;
  }
  try {
    const cuda::Device::Current current(*device_);
    streams_.reset();
  } catch (const std::exception&) {
    // The process ends, and the driver has ended before it.
  }
}

const std::vector<int>& NcclOrder::ranks() {
  std::call_once(ranks_known_, [this] { ranks_ = settings_.ranks(); });
  return ranks_;
}

int NcclOrder::index_of(int rank) {
  const auto found = std::lower_bound(ranks().begin(), ranks().end(), rank);
  return found == ranks().end() || *found != rank ? -1 : static_cast<int>(found - ranks().begin());
}

bool NcclOrder::serves(const std::vector<int>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [this](int rank) { return index_of(rank) >= 0; });
}

bool NcclOrder::claims(int device) {
  int claimed = claimed_.load(std::memory_order_acquire);
  if (claimed == kNoDevice) {
    const MutexLock lock(taken_gpus().mutex);
    claimed = claimed_.load(std::memory_order_relaxed);
    if (claimed == kNoDevice && taken_gpus().numbers.insert(device).second) claimed_ = claimed = device;
  }
  return claimed == device;
}

Letters& NcclOrder::letters() {
  if (!letters_) {
    letters_ = std::make_unique<Letters>(std::vector<Link*>(ranks().size(), nullptr), me(), settings_.epoch);
    if (me() != 0) {
      letters_->open(0, &settings_.link_to(ranks()[0]));
      settings_.call(ranks()[0]);
    }
  }
  return *letters_;
}

void NcclOrder::on_called(int rank) {
  if (me() != 0 || index_of(rank) <= 0) return;
  letters().open(index_of(rank), &settings_.link_to(rank));
}

void NcclOrder::on_left(int rank) {
  if (left_ns_ == 0 && index_of(rank) == 0) left_ns_ = now_ns();
}

void NcclOrder::attach(uint32_t set, NcclCommunicator* communicator, cuda::Device* device) {
  if (!streams_) {
    device_ = device;
    const cuda::Device::Current current(*device);
    auto streams = std::make_shared<NcclStreams>();
    const cuda::Driver& driver = cuda::Driver::get();
    for (cuda::Handle* stream : {&streams->sums, &streams->to_host})
      driver.check(driver.call().stream_create(stream, kNonBlockingStream, kHighestPriority),
                   "cuStreamCreateWithPriority");
    streams->device = claimed_;
    streams_ = std::move(streams);
  }
  letters();
  communicators_[set] = communicator;
}

void NcclOrder::detach(uint32_t set) noexcept {
  communicators_.erase(set);
  turns_.erase(
      std::remove_if(turns_.begin(), turns_.end(), [set](const Given& given) { return given.collective.set == set; }),
      turns_.end());
  if (in_turn_ && set_in_turn_ == set) in_turn_ = false;
  if (me() == 0) return forget(0, set);
  try {
    Letter farewell;
    farewell.kind = Letter::Kind::kFarewell;
    farewell.set = set;
    if (letters_) letters_->send(0, farewell);
  } catch (const std::exception&) {
    // There is no memory: the first rank waits a little longer when it leaves.
  }
}

// A rank does not wait for its turns in a process set any more.
void NcclOrder::forget(int from, uint32_t set) noexcept {
  for (auto at = waiting_.lower_bound({set, 0, 0}); at != waiting_.end() && at->first.set == set;) {
    std::vector<int>& ready = at->second.ready;
    ready.erase(std::remove(ready.begin(), ready.end(), from), ready.end());
    at = ready.empty() ? waiting_.erase(at) : std::next(at);
  }
}

void NcclOrder::abort_all() noexcept {
  if (!settings_.over()) return;
  while (!communicators_.empty()) communicators_.begin()->second->begin_abort();
}

void NcclOrder::ready(const Collective& collective, int members, bool able) {
  if (me() == 0) return note_ready(0, collective, members, able);
  Letter letter;
  letter.kind = Letter::Kind::kReady;
  letter.set = collective.set;
  letter.first = collective.first;
  letter.stream = collective.stream;
  letter.members = static_cast<uint32_t>(members);
  letter.code = able ? 0 : 1;
  letters().send(0, letter);
}

void NcclOrder::on_letter(int from, const Letter& letter) {
  const Collective collective{letter.set, letter.first, letter.stream};
  const bool asks = letter.kind == Letter::Kind::kReady || letter.kind == Letter::Kind::kFarewell;
  const bool known = (asks && me() == 0) || (letter.kind == Letter::Kind::kLaunch && from == 0);
  if (!known || letter.stream >= kMostStreams || letter.members > ranks().size())
    fail(ErrorKind::kInternal, "[nccl] rank " + std::to_string(ranks()[static_cast<size_t>(from)]) +
                                   " sent a letter about turns that it does not send");
  if (letter.kind == Letter::Kind::kReady)
    note_ready(from, collective, static_cast<int>(letter.members), letter.code == 0);
  else if (letter.kind == Letter::Kind::kLaunch) give_turn(collective, letter.code == 0);
  else forget(from, letter.set);
}

void NcclOrder::note_ready(int from, const Collective& collective, int members, bool able) {
  Waiting& waiting = waiting_[collective];
  if (waiting.ready.empty()) waiting.members = members;
  const bool again = std::count(waiting.ready.begin(), waiting.ready.end(), from) > 0;
  if (again || members != waiting.members)
    fail(ErrorKind::kInternal, "[nccl] rank " + std::to_string(ranks()[static_cast<size_t>(from)]) +
                                   " does not agree with others about a collective");
  waiting.ready.push_back(from);
  waiting.able = waiting.able && able;
  if (static_cast<int>(waiting.ready.size()) < members) return;
  Letter letter;
  letter.kind = Letter::Kind::kLaunch;
  letter.set = collective.set;
  letter.first = collective.first;
  letter.stream = collective.stream;
  letter.code = waiting.able ? 0 : 1;
  const std::vector<int> all = std::move(waiting.ready);
  waiting_.erase(collective);
  for (const int member : all) {
    if (member == 0) give_turn(collective, letter.code == 0);
    else letters().send(member, letter);
  }
}

void NcclOrder::give_turn(const Collective& collective, bool by_nccl) {
  // Of a process set that has been removed meanwhile, nobody takes turns.
  if (communicators_.count(collective.set) > 0) turns_.push_back({collective, by_nccl});
}

NcclOrder::Turn NcclOrder::turn(const Collective& collective) {
  if (in_turn_ || turns_.empty() || !(turns_.front().collective == collective)) {
    const bool comes =
        std::any_of(turns_.begin(), turns_.end(), [&](const Given& given) { return given.collective == collective; });
    // A turn is given to all members or to none; one that was given may still be on its way.
    const bool never = has_left() && !comes && now_ns() - left_ns_ > kOnItsWay;
    return never ? Turn::kHost : Turn::kWait;
  }
  in_turn_ = turns_.front().by_nccl;
  set_in_turn_ = collective.set;
  turns_.pop_front();
  return in_turn_ ? Turn::kNccl : Turn::kHost;
}

bool NcclOrder::is_ready(const Collective& collective, int rank) {
  const auto found = waiting_.find(collective);
  if (found == waiting_.end()) return false;
  const std::vector<int>& ready = found->second.ready;
  return std::find(ready.begin(), ready.end(), index_of(rank)) != ready.end();
}

bool NcclOrder::step() {
  if (!letters_) return false;
  bool moved = false;
  Letter letter;
  for (int rank = 0; rank < letters_->members(); ++rank)
    while (letters_->receive(rank, &letter)) {
      on_letter(rank, letter);
      moved = true;
    }
  return letters_->flush() || moved;
}

}  // namespace perseus
