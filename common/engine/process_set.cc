// Wires negotiation, rounds and execution of one process set together.
#include "engine/process_set.h"

#include <algorithm>

#include "base/error.h"
#include "collective/hierarchical_group.h"
#include "collective/link_group.h"
#include "collective/nccl/nccl_group.h"

namespace perseus {
namespace {

int index_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// After so long without a word from other ranks we tell them that we wait: maybe they wait for us, elsewhere.
constexpr int64_t kTellAfter = 5 * kSecond;
// In a round that stands still most ranks wait for ranks that wait themselves. The one whose bytes do not arrive knows
// where it breaks, and is given so much time to name the cause first.
constexpr int64_t kForTheCause = 500 * kMillisecond;
// A rank that has stopped answers neither rounds nor heartbeats. Its last heartbeat came a little later than its last
// word in a round: the liveness clock is about to name it, and knows better why.
constexpr int64_t kNearlyDead = 2 * kSecond;
// For NCCL to join what the tuner wants to try, which everybody waits for.
constexpr int64_t kJoinTrial = 30 * kSecond;

ExecutionSettings aside(ExecutionSettings settings) {
  settings.first_stream = static_cast<uint32_t>(Tuner(settings.tuner).most_streams());
  settings.tuner.start.streams = 1;
  settings.tuner.buckets = settings.tuner.streams = settings.tuner.nccl = false;
  settings.measures = false;
  return settings;
}

// Links to the members at distance 1, 2, 4, … in the given direction.
std::vector<Link*> dissemination_links(const std::vector<int>& ranks, int me, int direction, uint32_t group,
                                       const ProcessSet::LinkTo& link_to) {
  std::vector<Link*> links;
  const int size = static_cast<int>(ranks.size());
  for (int distance = 1; distance < size; distance *= 2) {
    const int other = ((me + direction * distance) % size + size) % size;
    links.push_back(&link_to(ranks[static_cast<size_t>(other)], Channel{group, kControlStream}));
  }
  return links;
}

}  // namespace

// Members whose GPUs NCCL may join.
struct ProcessSet::Joined {
  std::vector<int> members;  // with levels()
  bool served = false;       // likewise: by the order of all communicators
  std::unique_ptr<NcclCommunicator> communicator;
};

ProcessSet::ProcessSet(uint32_t id, std::vector<int> ranks, int my_rank, uint32_t epoch,
                       const ExecutionSettings& settings, int64_t cycle_ns, LinkTo link_to, Preferred preferred,
                       NcclOrder* nccl_order, MakeEntry make_entry, Execution::OutputsOf outputs_of,
                       Negotiation::Awaited awaited)
    : id_(id),
      ranks_(std::move(ranks)),
      me_(index_in(ranks_, my_rank)),
      epoch_(epoch),
      cycle_ns_(cycle_ns),
      timeout_ns_(settings.timeout_ns),
      silent_ns_(settings.silent_ns),
      link_to_(std::move(link_to)),
      topology_(settings.topology),
      gpu_operations_(settings.gpu_operations),
      nccl_order_(*nccl_order),
      inside_(joined(Level::kInner, settings)),
      everywhere_(joined(Level::kAll, settings)),
      nccl_percent_(settings.tuner.start.nccl_percent),
      negotiation_(me_, ranks_, std::move(make_entry), ranks_.size() > 1 ? std::move(awaited) : nullptr),
      round_(dissemination_links(ranks_, me_, +1, id, link_to_), dissemination_links(ranks_, me_, -1, id, link_to_),
             static_cast<int>(ranks_.size()), me_, epoch, id),
      automatic_(settings.auto_codecs, settings.link_seconds_per_byte > 0 ? 0 : settings.link_check_ns),
      execution_(with_nccl(settings), ranks_, me_, id, groups_over(preferred), outputs_of, &automatic_),
      aside_(aside(settings), ranks_, me_, id, groups_over(preferred), outputs_of, &automatic_) {}

ProcessSet::~ProcessSet() = default;

int ProcessSet::streams(const ExecutionSettings& settings) {
  return static_cast<int>(aside(settings).first_stream) + 1;
}

bool ProcessSet::keeps_on(int device, bool gradients) {
  levels();
  const bool by_tuner = gradients && nccl_percent_ > 0 && topology_->nccl_between();
  Joined* const by = joined_at(gpu_operations_ == GpuOperations::kNccl || by_tuner ? Level::kAll : Level::kInner);
  return by != nullptr && by->served && by->members.size() > 1 && by->communicator->takes(device);
}

const Levels& ProcessSet::levels() const {
  std::call_once(levels_known_, [this] {
    levels_ = topology_->of(ranks_, me_);
    const auto fill = [this](Joined* by, Level level) {
      if (by == nullptr) return;
      by->members = levels_.members_of(level);
      std::vector<int> ranks;
      for (const int member : by->members) ranks.push_back(ranks_[static_cast<size_t>(member)]);
      by->served = nccl_order_.serves(ranks);
    };
    fill(inside_.get(), Level::kInner);
    fill(everywhere_.get(), Level::kAll);
  });
  return levels_;
}

ExecutionSettings ProcessSet::with_nccl(ExecutionSettings settings) const {
  settings.nccl_between = [this] {
    if (everywhere_ == nullptr || !topology_->nccl_between()) return false;
    return everywhere_->communicator->state() != NcclCommunicator::State::kRefused;
  };
  return settings;
}

// Null where NCCL joins nobody at that level.
std::unique_ptr<ProcessSet::Joined> ProcessSet::joined(Level level, const ExecutionSettings& settings) {
  const bool all = level == Level::kAll, by_tuner = gpu_operations_ == GpuOperations::kAuto;
  if (gpu_operations_ == GpuOperations::kPerseus || (!all && !by_tuner)) return nullptr;
  auto made = std::make_unique<Joined>();
  Joined* const by = made.get();
  NcclSettings nccl;
  nccl.library = settings.nccl_library;
  nccl.of_whom = all ? "of all hosts" : "of this host";
  nccl.rank_of = [this, by](int member) {
    levels();
    return ranks_[static_cast<size_t>(by->members[static_cast<size_t>(member)])];
  };
  nccl.join_ns = settings.timeout_ns / 2;
  nccl.join_limit = "half of GLOO_TIMEOUT_SECONDS";
  if (all && by_tuner && (nccl.join_ns == 0 || nccl.join_ns > kJoinTrial)) {
    nccl.join_ns = kJoinTrial;
    nccl.join_limit = std::to_string(kJoinTrial / kSecond) + " s";
  }
  nccl.poll = settings.poll;
  // Ranks of a host mostly have the same reason, so one of them gives it. Nobody need have asked for a trial.
  const bool asked = !all || !by_tuner || settings.tuner.shares || settings.tuner.start.nccl_percent > 0;
  nccl.log = [this, say = asked ? settings.warn : settings.log](const std::string& text) {
    if (levels().inner_me == 0) say(text);
  };
  const auto make_letters = [this, by, all]() PERSEUS_REQUIRES(progress_lock) {
    const Channel channel{id_, all ? kWideLettersStream : kLettersStream};
    std::vector<Link*> links;
    for (int member : by->members)
      links.push_back(member == me_ ? nullptr : &link_to_(ranks_[static_cast<size_t>(member)], channel));
    return std::make_unique<Letters>(links, index_in(by->members, me_), epoch_);
  };
  const uint32_t number = 2 * id_ + (all ? 1 : 0);
  by->communicator = std::make_unique<NcclCommunicator>(std::move(nccl), &nccl_order_, number, make_letters);
  return made;
}

// Those whose GPUs NCCL joins at the level, or null: of all members, where all are on this host, those of the host.
ProcessSet::Joined* ProcessSet::joined_at(Level level) {
  if (level == Level::kAcross) return nullptr;
  const bool all = level == Level::kAll && (inside_ == nullptr || levels().groups > 1);
  return all ? everywhere_.get() : inside_.get();
}

Execution::MakeGroup ProcessSet::groups_over(const Preferred& preferred) {
  return [this, preferred](uint32_t stream, const Levels& levels) {
    const Channel channel{id_, stream};
    const auto make = [this, preferred, channel, levels](Level level) {
      std::vector<std::unique_ptr<Group>> groups;
      if (level == Level::kAll)
        if (std::unique_ptr<Group> group = preferred(channel.stream)) groups.push_back(std::move(group));
      const std::vector<int> members = levels.members_of(level);
      std::vector<Link*> links;
      for (int member : members)
        links.push_back(member == me_ ? nullptr : &link_to_(ranks_[static_cast<size_t>(member)], channel));
      auto host = std::make_unique<LinkGroup>(std::move(links), index_in(members, me_), epoch_, channel);
      if (Joined* const nccl = joined_at(level); nccl != nullptr && nccl->served && nccl->members.size() > 1)
        groups.push_back(std::make_unique<NcclGroup>(nccl->communicator.get(), host.get(), channel.stream));
      groups.push_back(std::move(host));
      return groups;
    };
    return std::make_unique<HierarchicalGroup>(levels, make);
  };
}

bool ProcessSet::may_begin(int64_t now, bool eager, size_t enough_bytes) const {
  if (negotiation_.has_urgent_news()) return true;
  if (closed_ || !negotiation_.has_news()) return false;
  if (cycle_ns_ > 0 && now - begun_ns_ < cycle_ns_) return false;
  const bool idle = negotiation_.scheduled() ? !aside_.busy() : !execution_.busy();
  return eager || idle || negotiation_.news_bytes() >= enough_bytes;
}

// Is a peer's round to be joined now? Without anything of ours to offer, nothing can become ready in it: then it is
// cheaper to wait until we submit something, so that one round serves both. Not for long: peers want to know who is
// missing, and what is wrong.
bool ProcessSet::joins(int64_t now) {
  if (!round_.called()) {
    called_ns_ = 0;
    return false;
  }
  if (closed_ || negotiation_.has_pending()) return true;
  if (called_ns_ == 0) called_ns_ = now;
  return now - called_ns_ >= kJoinWithin;
}

bool ProcessSet::step(int64_t now, bool eager, size_t enough_bytes, std::vector<Entry*>* finished,
                      std::vector<std::pair<Entry*, std::string>>* failed) {
  bool moved = negotiation_.collect();
  if (!rounds_over_ && round_.idle() && (may_begin(now, eager, enough_bytes) || joins(now))) {
    called_ns_ = 0;
    negotiation_.snapshot(&round_.content());
    begun_ns_ = round_moved_ns_ = now;
    round_.begin();
    moved = true;
    if (round_.idle()) apply(finished, failed);  // a group of one
  }
  if (!rounds_over_ && !round_.idle() && round_.step()) {
    moved = true;
    round_moved_ns_ = now;
    if (round_.idle()) apply(finished, failed);
  }
  if (negotiation_.scheduled()) keep_schedule(finished);
  moved |= execution_.step(finished);
  moved |= aside_.step(finished);
  return moved;
}

void ProcessSet::check_progress(int64_t now, int64_t since_ns, bool round_ends) const {
  if (round_ends) check_round(now, since_ns);
  execution_.check_progress(now, since_ns);
  aside_.check_progress(now, since_ns);
}

void ProcessSet::check_round(int64_t now, int64_t since_ns) const {
  if (timeout_ns_ == 0 || round_.idle()) return;
  const int64_t silence = now - std::max(round_moved_ns_, since_ns);
  if (silence <= timeout_ns_) return;
  std::vector<int> members;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const int64_t silent_for = static_cast<int>(i) == me_ ? 0 : silent_ns_(ranks_[i]);
    if (silent_for > timeout_ns_ - std::min(kNearlyDead, timeout_ns_ / 2)) return;
    if (silent_for > timeout_ns_ / 2) members.push_back(static_cast<int>(i));
  }
  std::string why;
  if (members.empty()) {
    members = round_.unreached();
    if (!members.empty())
      why = ": its host has not acknowledged what rank " + std::to_string(ranks_[static_cast<size_t>(me_)]) + " sent";
  }
  if (members.empty()) {
    if (silence <= timeout_ns_ + kForTheCause) return;
    members = round_.waiting_for();
  }
  std::string who;
  for (int member : members) who += (who.empty() ? "" : ", ") + std::to_string(ranks_[static_cast<size_t>(member)]);
  fail(ErrorKind::kTimeout, "[negotiation] agreeing on what is ready: no data to or from rank " + who + " for " +
                                std::to_string(timeout_ns_ / kSecond) + " s (GLOO_TIMEOUT_SECONDS)" + why +
                                "; a living rank answers whatever its script does, so look at the network");
}

void ProcessSet::apply(std::vector<Entry*>* finished, std::vector<std::pair<Entry*, std::string>>* failed) {
  // A schedule begins behind what the round that froze it made ready; up to the one that ends it it has the streams.
  Execution& execution = negotiation_.scheduled() ? aside_ : execution_;
  // Trials and a schedule would not know of each other: what is tried changes with rounds, and a schedule has none.
  negotiation_.learn_order(!execution_.tuner().trying());
  negotiation_.apply(round_.content(), &ready_, failed);
  if (!ready_.empty()) add_ready(&execution, Batch(), finished);
  if (negotiation_.broken()) end_schedule(finished, failed);
}

void ProcessSet::add_ready(Execution* execution, const Batch& batch, std::vector<Entry*>* finished) {
  execution->add(ready_, finished, batch);
  ready_.clear();
  if (execution_.tuner().between_steps()) nccl_percent_ = execution_.tuner().in_force().tuning.nccl_percent;
}

void ProcessSet::keep_schedule(std::vector<Entry*>* finished) {
  Batch batch;
  while (negotiation_.begin_batch(&batch, &ready_)) add_ready(&execution_, batch, finished);
  const int64_t now = now_ns();
  negotiation_.watch_schedule(now);
  if (execution_.waits_since(now - kTellAfter)) negotiation_.break_schedule();
}

void ProcessSet::end_schedule(std::vector<Entry*>* finished, std::vector<std::pair<Entry*, std::string>>* failed) {
  // The order of buckets stays the same on all ranks: what others have begun has its place here too.
  Batch batch;
  while (negotiation_.stand_in_batch(&batch, &ready_)) add_ready(&execution_, batch, finished);
  execution_.roll_back(negotiation_.begun(), &ready_);
  for (Entry* entry : ready_) {
    if (!entry->stand_in) continue;
    failed->emplace_back(entry, "not begun by this rank");
    entry->executions_left = 0;
  }
  ready_.erase(std::remove_if(ready_.begin(), ready_.end(), [](const Entry* entry) { return entry->stand_in; }),
               ready_.end());
  negotiation_.thaw(ready_);
  ready_.clear();
}

void ProcessSet::abandon(std::vector<Entry*>* entries) {
  give_up(&ready_, entries);
  execution_.abandon(entries);
  aside_.abandon(entries);
}

}  // namespace perseus
