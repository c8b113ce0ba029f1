// One pass over everything, and what happens to requests as they end.
#include "engine/engine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "base/descriptors.h"
#include "engine/wording.h"
#include "net/auth.h"
#include "net/interfaces.h"

namespace perseus {
namespace {

// Without sockets to read, events (a peer's death, a new ring) need no look in every pass.
constexpr int64_t kLookForEvents = 50 * kMicrosecond;
// What no event announces is looked at this often by a thread that sleeps.
constexpr int64_t kPoll = 50 * kMicrosecond;
// A GPU computes for long, and whoever asks it keeps its driver from the thread that gives it work.
constexpr int64_t kPollDevice = 200 * kMicrosecond;
// Threads that submit need the same locks. What they submit meanwhile is copied to the host together.
constexpr int64_t kLookAgain = 10 * kMicrosecond;
// Whether anything waits for what is told by a call cannot be seen; gradients of one step are not this far apart.
constexpr int64_t kSilentPatience = kSecond;

std::optional<Algorithm> wanted_algorithm(AllreduceAlgorithm choice) {
  switch (choice) {
    case AllreduceAlgorithm::kAuto:
      break;
    case AllreduceAlgorithm::kPairwise:
      return Algorithm::kPairwise;
    case AllreduceAlgorithm::kHalvingDoubling:
      return Algorithm::kHalvingDoubling;
    case AllreduceAlgorithm::kRing:
      return Algorithm::kRing;
    case AllreduceAlgorithm::kRecursiveDoubling:
      return Algorithm::kRecursiveDoubling;
  }
  return std::nullopt;
}

ExecutionSettings settings_of(const Config& config) {
  ExecutionSettings settings;
  settings.tuner = tuner_settings(config);
  settings.timeout_ns = config.integer(Var::kTimeout) * kSecond;
  const double gbit = config.number(Var::kLinkGbit);
  if (gbit > 0) settings.link_seconds_per_byte = 8e-9 / gbit;
  settings.link_check_ns = config.integer(Var::kLinkCheck) * kSecond;
  settings.gpu_operations = config.choice<GpuOperations>();
  settings.gpu_codecs = config.flag(Var::kGpuCodecs);
  settings.nccl_library = config.text(Var::kNcclLibrary);
  settings.algorithm = AlgorithmChoice(wanted_algorithm(config.choice<AllreduceAlgorithm>()));
  // A ring's bits depend on buckets, and trials may change none.
  if (settings.algorithm.wanted() == Algorithm::kRing)
    settings.tuner.buckets = settings.tuner.streams = settings.tuner.nccl = false;
  return settings;
}

// By default, most cores are left to the computation of gradients. More than four threads would only wait for memory.
int codec_threads(const Config& config, Cores cores) {
  const auto wanted = static_cast<int>(config.integer(Var::kCodecThreads));
  return wanted > 0 ? wanted : std::clamp(cores.usable / cores.ranks / 4, 1, 4);
}

// Work that nobody waits for is picked up by the engine thread after a while: setting a timer costs the submitter
// 0.5 µs, waking a thread 6–9. Without a core to spare it would only interrupt the one who is submitting.
constexpr int64_t kPickUp = 100 * kMicrosecond;
constexpr int64_t kPickUpWithoutCore = kMillisecond;

// A rank gives signs of life this often. The last one is never older than half of the limit.
int64_t heartbeat_pause(const Config& config) {
  const int64_t limit = config.integer(Var::kTimeout);
  return limit == 0 ? kSecond : std::min(kSecond, limit * kSecond / 4);
}

ProgressEngine::Settings driving(const Config& config, Cores cores) {
  const int spare_cores = cores.usable - cores.ranks;
  ProgressEngine::Settings settings;
  const int64_t microseconds = config.integer(Var::kSpin);
  settings.spin_ns = microseconds >= 0 ? microseconds * kMicrosecond : spare_cores >= 0 ? 200 * kMicrosecond : 0;
  settings.pick_up_ns = spare_cores > 0 ? kPickUp : kPickUpWithoutCore;
  settings.longest_sleep_ns = heartbeat_pause(config);
  return settings;
}

TransportKind kind_of(const Transport* transport) {
  return transport == nullptr ? TransportKind::kNone : transport->kind();
}

std::vector<TransportKind> kinds_of(const std::vector<Transport*>& route) {
  std::vector<TransportKind> kinds;
  for (const Transport* transport : route) kinds.push_back(kind_of(transport));
  return kinds;
}

// Tells a world from others without telling its secret. Jobs that a user gives one secret have the same.
std::string identity_of(const World& world) {
  const Digest digest = prove(world.secret, {"identity", world.job, std::to_string(world.epoch)});
  uint64_t identity = 0;
  std::memcpy(&identity, digest.data(), sizeof identity);
  return std::to_string(identity);
}

bool changes_groups(const Entry& entry) {
  return entry.description.kind == Kind::kAddGroup || entry.description.kind == Kind::kRemoveGroup;
}

}  // namespace

Engine::Engine(const World& world, const Config& config, const Log& log, std::unique_ptr<Waker> waker,
               std::vector<std::unique_ptr<Transport>> transports, std::vector<Transport*> route, Cores cores)
    : world_(world),
      log_(log),
      flight_recorder_(world, config.text(Var::kFlightRecorder)),
      timeout_ns_(config.integer(Var::kTimeout) * kSecond),
      housekeeping_pause_ns_(heartbeat_pause(config) / 2),
      cycle_ns_(static_cast<int64_t>(config.number(Var::kCycleTime) * kMillisecond)),
      stall_ns_(config.flag(Var::kStallCheckDisable) ? 0 : config.integer(Var::kStallCheckTime) * kSecond),
      // Process groups have a time limit whatever is checked for Horovod's API.
      stall_shutdown_ns_(config.flag(Var::kStallCheckDisable) && world.api == Api::kHorovod
                             ? 0
                             : config.integer(Var::kStallShutdownTime) * kSecond),
      schedules_(config.flag(Var::kOfflineNegotiation)),
      codec_threads_(codec_threads(config, cores)),
      execution_settings_(settings_of(config)),
      waker_(std::move(waker)),
      transports_(std::move(transports)),
      route_(std::move(route)),
      timeline_(world, identity_of(world), config, kinds_of(route_), log),
      accumulation_(static_cast<int>(config.integer(Var::kAccumulateSteps))),
      gradient_codecs_(config),
      topology_(config),
      nan_check_(config.flag(Var::kNanCheck), config.choice<NanAction>()),
      perf_check_(config.integer(Var::kPerfCheckSteps)),
      nccl_order_(order_of_nccl()),
      point_to_point_(
          world_,
          [this](int peer)
              PERSEUS_REQUIRES(progress_lock) -> Link& { return route_[peer]->link(peer, kPointToPointChannel); },
          [this](int peer) PERSEUS_REQUIRES(progress_lock) { tell_of_link(peer); },
          [this](int peer) {
            const int first = first_left_.load();
            return shutdown_text(first >= 0 || closing_.load(std::memory_order_relaxed) ? first : peer);
          }),
      left_(static_cast<size_t>(world.size), false),
      tuner_log_(world.rank == 0 ? config.text(Var::kAutotuneLog) : ""),
      progress_(*waker_, driving(config, cores), *this) {
  interfaces_ = interfaces_at_once(InterfaceChoice(config));
  if (world.rank == 0 && config.flag(Var::kNcclEnable) && interfaces_ == 1 && !may_try_nccl())
    log_.warning(
        "[config] PERSEUS_NCCL_ENABLE=1 alone changes nothing without GPUs and NCCL: name the links to be used at once "
        "in PERSEUS_GLOO_NETWORK_INTERFACE, separated by commas");
  const int64_t streams = config.integer(Var::kStreams);
  if (world.rank == 0 && interfaces_ > streams)
    log_.warning("[config] PERSEUS_ALLREDUCE_STREAMS=" + std::to_string(streams) + " uses " + std::to_string(streams) +
                 " of the " + std::to_string(interfaces_) +
                 " interfaces that are named: set it to their number, or a multiple of it");
  if (execution_settings_.gpu_operations == GpuOperations::kNccl) nccl::connect_when_joining();
  answer_inspections(static_cast<int>(config.integer(Var::kInspectSignal)));
  begin_tuner_log();
  execution_settings_.observer = &timeline_;
  execution_settings_.threads = &codec_threads_;
  execution_settings_.residuals = &residuals_;
  execution_settings_.precision = gradient_codecs_.precision();
  execution_settings_.precision_chosen = gradient_codecs_.precision_chosen();
  execution_settings_.auto_codecs = gradient_codecs_.auto_codecs();
  execution_settings_.log = [this](const std::string& text) { log_.write(LogLevel::kInfo, text); };
  execution_settings_.warn = [this](const std::string& text) { log_.warning(text); };
  execution_settings_.poll = [this]() PERSEUS_REQUIRES(progress_lock) {
    const bool woken = waker_->take_events();
    for (auto& transport : transports_) transport->poll(woken);
  };
  execution_settings_.topology = &topology_;
  execution_settings_.silent_ns = [this](int rank) PERSEUS_REQUIRES(progress_lock) {
    return now_ns() - route_[rank]->last_alive_ns(rank);
  };
  const ProgressLock lock(progress_);
  for (const auto& transport : transports_) tcp_ |= transport->kind() == TransportKind::kTcp;
  std::vector<int> all(static_cast<size_t>(world_.size));
  for (int rank = 0; rank < world_.size; ++rank) all[rank] = rank;
  add_group(0, std::move(all));
}

// Of all ranks where NCCL may join those of several hosts, else of those of this host.
NcclOrder::Settings Engine::order_of_nccl() {
  NcclOrder::Settings settings;
  settings.rank = world_.rank;
  settings.ranks = [this] {
    const bool everywhere = execution_settings_.gpu_operations == GpuOperations::kNccl || topology_.nccl_between();
    std::vector<int> ranks;
    for (int rank = 0; rank < world_.size; ++rank)
      if (everywhere || !topology_.spans_nodes({rank, world_.rank})) ranks.push_back(rank);
    return ranks;
  };
  settings.epoch = world_.epoch;
  settings.link_to = [this](int rank) PERSEUS_REQUIRES(progress_lock) -> Link& {
    return route_[rank]->link(rank, kNcclOrderChannel);
  };
  settings.call = [this](int rank) PERSEUS_REQUIRES(progress_lock) { call_about_nccl(rank); };
  settings.over = [this] { return failed_.load(std::memory_order_relaxed); };
  return settings;
}

Engine::~Engine() {
  shutdown();
  progress_.stop();
}

const char* Engine::transport_name(int peer) const { return perseus::transport_name(kind_of(route_[peer])); }

Location Engine::own_location() const {
  Location location;
  while (location.node != world_.rank && route_[location.node]->kind() == TransportKind::kTcp) ++location.node;
  location.interfaces = interfaces_;
  location.nccl = may_try_nccl();
  return location;
}

// NCCL sends between hosts from GPU to GPU where networks have RDMA. Elsewhere our own exchange has been faster
// wherever both were measured, so that a trial is not worth its time unless somebody asks for it.
bool Engine::may_try_nccl() const {
  const TunerSettings& tuner = execution_settings_.tuner;
  if (execution_settings_.gpu_operations != GpuOperations::kAuto) return false;
  if (tuner.start.nccl_percent == 0 && !(tuner.nccl && (tuner.shares || has_rdma()))) return false;
  try {
    cuda::Driver::get();
    nccl::Library::get(execution_settings_.nccl_library);
    nccl::connect_when_joining();
    return true;
  } catch (const Error&) {
    return false;  // there are no GPUs, or whoever brings tensors of one gets to know what is missing
  }
}

void Engine::set_locations(std::vector<Location> locations) {
  const int node = locations[static_cast<size_t>(world_.rank)].node;
  const auto is_here = [node](const Location& location) { return location.node == node; };
  if (execution_settings_.gpu_operations == GpuOperations::kAuto &&
      std::count_if(locations.begin(), locations.end(), is_here) > 1)
    nccl::connect_when_joining();
  const ProgressLock lock(progress_);
  topology_.set_locations(std::move(locations));
}

void Engine::use_mpi(int64_t deadline_ns, const std::function<bool()>& interrupted) {
  mpi_ = std::make_unique<MpiWorld>(world_, ProcessSet::streams(execution_settings_), deadline_ns, interrupted);
}

void Engine::add_group(int id, std::vector<int> ranks) {
  const uint32_t channels = groups_made_++;
  // Connecting to the members may take a while, or fail: neither must be with the list locked or changed.
  std::shared_ptr<ProcessSet> group;
  if (std::find(ranks.begin(), ranks.end(), world_.rank) != ranks.end()) {
    make_room(ranks);
    group = make_group(id, channels, ranks);
  }
  const MutexLock lock(groups_mutex_);
  members_[id] = std::move(ranks);
  if (group) groups_[id] = std::move(group);
}

// For descriptors of the connections of a new process set and of the others, of which most are made at first use.
void Engine::make_room(const std::vector<int>& ranks) const {
  size_t remote = 0;
  const auto count = [&](const std::vector<int>& members) {
    remote += static_cast<size_t>(std::count_if(members.begin(), members.end(), [this](int rank) {
      return kind_of(route_[static_cast<size_t>(rank)]) == TransportKind::kTcp;
    }));
  };
  count(ranks);
  for (const auto& [id, group] : groups_) count(group->ranks());
  // Of each stream, and for agreements.
  const size_t each = static_cast<size_t>(ProcessSet::streams(execution_settings_)) + 2;
  // Where the hard limit is too low, the error of the connection that is one too many says so.
  if (remote > 0) static_cast<void>(make_room_for_descriptors(each * remote));
}

std::shared_ptr<ProcessSet> Engine::make_group(int id, uint32_t channels, const std::vector<int>& ranks) {
  ExecutionSettings settings = execution_settings_;
  if (id != 0) {  // its members may be busy elsewhere
    settings.tuner.buckets = settings.tuner.streams = settings.tuner.nccl = false;
    settings.tuner.start.nccl_percent = 0;
  }
  return std::make_shared<ProcessSet>(
      channels, ranks, world_.rank, world_.epoch, settings, cycle_ns_,
      [this](int rank, Channel channel)
          PERSEUS_REQUIRES(progress_lock) -> Link& { return route_[rank]->link(rank, channel); },
      [this, id](uint32_t stream)
          PERSEUS_REQUIRES(progress_lock) { return id == 0 && mpi_ ? mpi_->group(stream) : nullptr; },
      &nccl_order_,
      [this, id] {
        Entry* entry = take_entry();
        entry->group = id;
        return entry;
      },
      [this](Entry* entry) -> std::vector<Output>& { return handles_.at(entry->handle)->outputs; },
      schedules_ ? [this](const Entry& entry) { return caller_waits_for(entry); } : Negotiation::Awaited());
}

bool Engine::busy() noexcept {
  if (failed_.load(std::memory_order_relaxed)) return ending_;
  if (loading_.any()) return true;
  for (auto& [id, group] : groups_)
    if (group->busy()) return true;
  return point_to_point_.moving();
}

bool Engine::has_submissions() const noexcept {
  if (point_to_point_.has_submissions() || loading_.any()) return true;
  const MutexLock lock(groups_mutex_);
  for (auto& [id, group] : groups_)
    if (group->negotiation().has_submissions()) return true;
  return false;
}

bool Engine::pass(bool eager) {
  bool moved = false;
  // What has ended is completed even where going on fails.
  progress_.guard([&]() PERSEUS_REQUIRES(progress_lock) { moved = advance(eager); });
  if (ending_) {
    tell_peers();
    end_everything();
  }
  return complete_ended() || moved;
}

void Engine::on_failure(const Error& cause) noexcept {
  if (!failed_.load(std::memory_order_relaxed)) number_lacks_ = lacks_number(cause);
  try {
    abort(cause, true);
  } catch (const std::exception&) {
    // There was no memory even for that. Passes go on with the rest until there is some.
    {
      const MutexLock lock(cause_mutex_);
      if (cause_.ok) {
        cause_.kind = cause.kind();
        cause_.message = "out of memory";  // so short that it needs none
      }
      cause_.ok = false;
    }
    failed_.store(true, std::memory_order_release);
    drained_.store(true, std::memory_order_release);
    ending_ = true;
  }
}

bool Engine::complete_ended() {
  if (finished_.empty() && mismatched_.empty() && point_to_point_.ended().empty()) return false;
  progress_.guard([this]() PERSEUS_REQUIRES(progress_lock) {
    count();  // who sees its request finished sees it counted
    nan_check_.scan_sums(finished_);
    nan_check_.report(finished_, log_);
  });
  // Group changes touch the map that passes walk and end what a group still has under way, so they come last.
  size_t changes = 0;
  for (Entry* entry : finished_) {
    if (changes_groups(*entry)) finished_[changes++] = entry;
    else finish(entry, Status());
  }
  for (auto& [entry, text] : mismatched_) finish(entry, Status{false, ErrorKind::kMismatch, std::move(text)});
  for (auto& [entry, status] : point_to_point_.ended()) finish(entry, status);
  point_to_point_.ended().clear();
  for (size_t i = 0; i < changes; ++i) finish(finished_[i], Status());
  finished_.clear();
  mismatched_.clear();
  return true;
}

// Moves everything that is in flight; true when anything moved.
bool Engine::advance(bool eager) {
  const int64_t now = now_ns();
  bool moved = false, woken = false;
  if (tcp_ || now - events_ns_ > kLookForEvents) {
    woken = waker_->take_events();
    events_ns_ = now;
  }
  for (auto& transport : transports_) transport->poll(woken);
  read_peer_events();
  // Asked once: a shutdown that begins amid a pass must not find sends over that nobody has told to end.
  const bool closing = closing_.load(std::memory_order_acquire);
  if (!failed_.load(std::memory_order_relaxed)) {
    if (!removed_.empty()) forget_removed();
    moved |= nccl_order_.step();
    if (loading_.any() && now >= look_again_ns_) moved |= announce_computed(now, eager);
    else if (loading_.any()) waker_->arm_timer(kPollDevice);
    for (auto& [id, group] : groups_) {
      const uint64_t rounds = group->rounds();
      moved |= group->step(now, eager, kBucketsWorth, &finished_, &mismatched_);
      if (group->rounds() != rounds && timeline_.marks_cycles()) timeline_.round(id, group->rounds());
      if (group->called()) waker_->arm_timer(ProcessSet::kJoinWithin);
      if (eager && group->holds()) waker_->arm_timer(Negotiation::kPatience);
      if (group->polls()) waker_->arm_timer(kPoll);
      if (id == 0) keep_tuning(group.get());
    }
    if (closing) point_to_point_.close(shutdown_text());
    moved |= point_to_point_.step(now, woken);
    if (cycle_ns_ > 0 && !moved && busy()) waker_->arm_timer(cycle_ns_);
  }
  if (now - housekeeping_ns_ > housekeeping_pause_ns_) housekeeping(now);
  if (closing) wind_down();
  return moved;
}

bool Engine::announce_computed(int64_t now, bool eager) {
  std::vector<Loading::Request> computed;
  const auto announce = [&]() PERSEUS_REQUIRES(progress_lock) {
    for (const Loading::Request& request : computed) {
      const Kind kind = request.entry->description.kind;
      Status status;
      progress_.guard([&]() PERSEUS_REQUIRES(progress_lock) { announce_to_peers(request, &status); }, &status);
      if (!status.ok) finish(request.entry, status);
      loading_.announced(kind);
    }
  };
  bool settled = true;
  devices_.for_each([&](cuda::Device& device) {
    if (eager) cuda::Staging::launch(&device);
    else settled = cuda::Staging::launch_settled(&device) && settled;
  });
  try {
    loading_.take_computed(&computed);
  } catch (...) {
    announce();  // what has been taken must not be lost
    throw;
  }
  announce();
  if (!computed.empty()) perf_check_.computing_until(loading_.any() ? INT64_MAX : now_ns());
  if (loading_.any()) waker_->arm_timer(settled ? kPollDevice : kLookAgain);
  look_again_ns_ = computed.empty() ? now + kLookAgain : 0;
  return !computed.empty();
}

void Engine::announce_to_peers(const Loading::Request& request, Status* status) {
  Entry* entry = request.entry;
  entry->submitted_ns = now_ns();  // the stall watch does not count the time for which a device computes
  if (!request.group) {
    if (!point_to_point_.submit(entry)) *status = Status::from(ended());
    return;
  }
  const Negotiation::Submitted submitted = request.group->negotiation().submit(request.name.c_str(), entry);
  if (submitted != Negotiation::Submitted::kYes) *status = Status::from(not_taken(submitted, request.name));
}

bool Engine::caller_waits_for(const Entry& entry) const {
  const bool patient = now_ns() - entry.submitted_ns < kSilentPatience;
  // It has submitted more than other ranks know of: a GPU computes the rest of its step.
  if (patient && loading_.any()) return false;
  if (handles_.at(entry.handle)->awaited.load(std::memory_order_acquire)) return true;
  return entry.done.call != nullptr && !patient;
}

void Engine::finish(Entry* entry, const Status& status) {
  if (timeline_.on()) timeline_.operation(*entry, status.ok);
  if (entry->stand_in) {
    const auto group = groups_.find(entry->group);
    if (group != groups_.end()) group->second->negotiation().retire(entry);
    entry->stand_in = false;
    entry->zeros.reset();
    recycle(entry);
    return;
  }
  HandleTable::Slot* slot = handles_.at(entry->handle);
  // An exception may leave the status as it was, but never as a success.
  const bool fine = progress_.guard(
      [&]() PERSEUS_REQUIRES(progress_lock) {
        slot->status = status;
        if (status.ok && nan_check_.judge(*entry, slot) && entry->staging) entry->staging->store_again();
        // No optimizer applies it.
        if (slot->gradient == GradientOutcome::kSkipped) residuals_.spoil_momenta(entry->gradient_of);
        flight_recorder_.record(*entry, *entry->text, status.ok);
      },
      &slot->status);
  // Its group may be the one that goes.
  const auto group = groups_.find(entry->group);
  if (entry->name != nullptr && group != groups_.end()) group->second->negotiation().retire(entry);
  if (status.ok && fine)
    progress_.guard([&]() PERSEUS_REQUIRES(progress_lock) { give_result(*entry, slot); }, &slot->status);
  if (entry->staging)
    progress_.guard([&]() PERSEUS_REQUIRES(progress_lock) { end_storing(entry, slot); }, &slot->status);
  const Completion done = entry->done;
  if (perf_check_.on() && entry->gradient_of != 0 && done.call != nullptr)
    perf_check_.ended(entry->gradient_of, entry->group, now_ns());
  const int64_t handle = HandleTable::handle_of(*slot, entry->handle);
  recycle(entry);
  operations_.fetch_add(1, std::memory_order_relaxed);
  HandleTable::complete(slot);
  progress_.completed();
  if (done.call == nullptr) return;
  silent_batch_.done();
  progress_.guard([&] { done.call(done.arg, handle); });
}

// Parts of what has failed may have been stored, too: whoever uses that memory again has to wait for them.
void Engine::end_storing(Entry* entry, HandleTable::Slot* slot) {
  // An allgather of sizes that differ has not taken the caller's memory.
  const bool gathers = entry->description.kind == Kind::kAllgather;
  const bool elsewhere = gathers && (slot->outputs.empty() || slot->outputs[0].data != nullptr);
  entry->staging->end(slot->status.ok && !elsewhere);
  slot->staging = std::move(entry->staging);
}

void Engine::give_result(const Entry& entry, HandleTable::Slot* slot) {
  const Kind kind = entry.description.kind;
  if (!changes_groups(entry) && kind != Kind::kJoin && kind != Kind::kReceive) return;
  slot->outputs.resize(1);
  if (changes_groups(entry)) slot->status = change_groups(entry, &slot->outputs[0]);
  else slot->outputs[0].bytes = static_cast<size_t>(entry.description.root);  // the last to join, or the sender
  if (kind != Kind::kJoin) return;
  // Those who went on while others had joined have counted further.
  const auto group = groups_.find(entry.group);
  if (group != groups_.end()) group->second->restart_numbers();
}

// Every rank of the world gets here with the same request in the same order, so ids agree.
Status Engine::change_groups(const Entry& entry, Output* output) {
  const std::vector<int>& ranks = entry.description.ranks;
  if (entry.description.kind == Kind::kAddGroup) {
    for (auto& [id, members] : members_)
      if (members == ranks)
        return Status{false, ErrorKind::kInvalidArgument,
                      "Attempted to add a duplicate process set (it has id " + std::to_string(id) + ")."};
    int id = next_id_;
    if (free_ids_.empty()) {
      ++next_id_;
    } else {
      id = free_ids_.front();
      free_ids_.pop_front();
    }
    add_group(id, ranks);
    output->bytes = static_cast<size_t>(id);
    return Status();
  }
  const int id = ranks.empty() ? -1 : ranks[0];
  if (id <= 0 || members_.count(id) == 0)
    return Status{false, ErrorKind::kInvalidArgument,
                  "Process set provided does not exist, or has not been registered."};
  const auto group = groups_.find(id);
  if (group != groups_.end()) {
    const Status removed{false, ErrorKind::kAborted, "The process set was removed."};
    fail_pending(group->second.get(), true, removed);
    // Its channels are never used again, so what peers still send or miss there harms nobody.
    give_up(group->second.get(), removed);
    removed_[group->second->id()] = Removed{group->second, group->second->ranks()};
  }
  accumulation_.forget_group(id);
  perf_check_.forget_group(id);
  const MutexLock lock(groups_mutex_);
  groups_.erase(id);
  members_.erase(id);
  free_ids_.push_back(id);
  return Status();
}

HandleTable::Slot* Engine::wait(int64_t handle, int64_t deadline_ns) {
  HandleTable::Slot* slot = handles_.find(handle);
  const WaitTimer timer(perf_check_);
  if (slot == nullptr) return slot;
  slot->awaited.store(true, std::memory_order_release);
  const auto over = [slot, handle] { return HandleTable::is_over(*slot, handle); };
  if (over()) return slot;
  callers_.begins_wait(handle, now_ns());
  progress_.wait(over, deadline_ns);
  callers_.ends_wait(over(), now_ns());
  return slot;
}

HandleTable::Slot* Engine::poll(int64_t handle) {
  HandleTable::Slot* slot = handles_.find(handle);
  if (slot != nullptr && !HandleTable::is_done(*slot)) {
    slot->awaited.store(true, std::memory_order_release);
    progress_.nudge();
  }
  return slot;
}

void Engine::start_timeline(const std::string& path, bool mark_cycles) {
  timeline_.start(path, mark_cycles, progress_);
}

void Engine::stop_timeline() { timeline_.stop(progress_); }

std::vector<int> Engine::group_ranks(int id) const {
  const MutexLock lock(groups_mutex_);
  const auto found = members_.find(id);
  return found == members_.end() ? std::vector<int>() : found->second;
}

int64_t Engine::next_number(int group) const {
  const MutexLock lock(groups_mutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? -1 : found->second->next_number();
}

Speeds Engine::speeds(int group) {
  const ProgressLock lock(progress_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? Speeds() : found->second->speeds();
}

void Engine::count() {
  EngineStats stats;
  for (const auto& transport : transports_) {
    const bool tcp = transport->kind() == TransportKind::kTcp;
    (tcp ? stats.tcp_sent : stats.shm_sent) += transport->bytes_sent();
    (tcp ? stats.tcp_received : stats.shm_received) += transport->bytes_received();
    stats.staging_bytes += transport->staging_bytes();
  }
  for (auto& [id, group] : groups_) {
    stats.rounds += group->rounds();
    stats.messages += group->messages();
    stats.buckets += group->buckets();
    stats.staging_bytes += group->staging_bytes();
  }
  stats.staging_bytes +=
      devices_.pinned_bytes() + accumulation_.bytes() + residuals_.bytes() + point_to_point_.staging_bytes();
  const MutexLock lock(stats_mutex_);
  stats_ = stats;
}

EngineStats Engine::stats() const {
  const MutexLock lock(stats_mutex_);
  EngineStats stats = stats_;
  stats.operations = operations_.load(std::memory_order_relaxed);
  stats.sleeps = progress_.sleeps();
  return stats;
}

}  // namespace perseus
