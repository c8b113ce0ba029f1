// How a world comes together: find each other, compare settings, choose transports.
#include "api/context.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <numeric>
#include <set>

#include "base/clock.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "bootstrap/store.h"
#include "execution/tuner.h"
#include "kernels/kernels.h"
#include "net/auth.h"
#include "topology/host.h"

namespace perseus {
namespace {

// Worlds of threads: the one other place where contexts of a process meet.
struct MemoryWorld {
  std::shared_ptr<Store> store;
  std::shared_ptr<MemFabric> fabric;
};

// One for each epoch: a rank may be in the next before all have left the last.
std::shared_ptr<MemoryWorld> memory_world(const std::string& name, uint32_t epoch, int size) {
  static Mutex mutex;
  static std::map<std::pair<std::string, uint32_t>, std::weak_ptr<MemoryWorld>> worlds;
  const MutexLock lock(mutex);
  std::shared_ptr<MemoryWorld> world = worlds[{name, epoch}].lock();
  if (!world) {
    world = std::make_shared<MemoryWorld>();
    world->store = make_memory_store();
    world->fabric = make_mem_fabric(size);
    worlds[{name, epoch}] = world;
    for (auto it = worlds.begin(); it != worlds.end();) it = it->second.expired() ? worlds.erase(it) : std::next(it);
  }
  return world;
}

// Keeps the shared world alive as long as its store is held.
class MemoryWorldStore final : public Store {
 public:
  explicit MemoryWorldStore(std::shared_ptr<MemoryWorld> world) : world_(std::move(world)) {}
  void set(const std::string& key, const std::string& value, int64_t deadline_ns,
           const Interrupted& interrupted) override {
    world_->store->set(key, value, deadline_ns, interrupted);
  }
  std::string get(const std::string& key, int64_t deadline_ns, const Interrupted& interrupted) override {
    return world_->store->get(key, deadline_ns, interrupted);
  }
  std::vector<int> get_all(const std::string& prefix, const std::vector<int>& numbers, int64_t deadline_ns,
                           const OnValue& on_value, const Interrupted& interrupted) override {
    return world_->store->get_all(prefix, numbers, deadline_ns, on_value, interrupted);
  }
  std::vector<int> get_present(const std::string& prefix, const std::vector<int>& numbers, int64_t deadline_ns,
                               const OnValue& on_value, const Interrupted& interrupted) override {
    return world_->store->get_present(prefix, numbers, deadline_ns, on_value, interrupted);
  }
  const std::shared_ptr<MemFabric>& fabric() const { return world_->fabric; }

 private:
  std::shared_ptr<MemoryWorld> world_;
};

constexpr size_t kMostNamed = 16;
// What a rank says in the store when it is connected to all, and when it knows that all are.
constexpr char kReady[] = "ready", kLeft[] = "left";
// Stands before the reason where a rank's entry was.
constexpr char kGaveUp[] = "gave up\n";
// The reason alone, for those who have read the entry before and ask again and again: entries are long.
constexpr char kGaveUpWhy[] = "gave_up/";
// Stands before the version in a rank's entry.
constexpr char kEntry[] = "perseus ";

// Cores this process may use: its affinity, and the container's quota.
int usable_cores() {
  cpu_set_t set;
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota, period;
  if (file >> quota >> period && period > 0) cores = std::min(cores, std::max(1, static_cast<int>(quota / period)));
  return cores;
}

// "NAME=value" lines of every variable that affects results, to be compared across ranks.
std::string settings_text(const Config& config) {
  std::string text;
  for (int i = 0; i < static_cast<int>(Var::kCount); ++i) {
    const Variable& entry = variable(static_cast<Var>(i));
    if (entry.affects_results) text += std::string(entry.name) + "=" + config.text(entry.id) + "\n";
  }
  return text + "tuner: " + tuner_settings(config).text() + "\n";
}

std::string encode(const Location& location) {
  return std::to_string(location.node) + " " + std::to_string(location.interfaces) + " " +
         std::to_string(static_cast<int>(location.nccl));
}

Location decode_location(const std::string& text) {
  Location location;
  int nccl = 0;
  if (std::sscanf(text.c_str(), "%d %d %d", &location.node, &location.interfaces, &nccl) != 3)
    fail(ErrorKind::kInternal, "[rendezvous] '" + text + "' is not the location of a rank");
  location.nccl = nccl != 0;
  return location;
}

std::vector<int> ranks_from(int first, int size) {
  std::vector<int> ranks(static_cast<size_t>(std::max(size - first, 0)));
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

std::string entry_version(const std::string& entry) {
  if (entry.rfind(kEntry, 0) != 0) return "of a version before versions were compared";
  return entry.substr(sizeof kEntry - 1, entry.find('\n') - (sizeof kEntry - 1));
}

std::string first_difference(const std::string& a, const std::string& b) {
  size_t begin = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()) && a[i] == b[i]; ++i)
    if (a[i] == '\n') begin = i + 1;
  const auto line = [begin](const std::string& text) { return text.substr(begin, text.find('\n', begin) - begin); };
  return line(a) + " against " + line(b);
}

std::string prefix_of(const World& world) { return world.job + "/" + std::to_string(world.epoch) + "/"; }

std::string entry_key(const World& world) { return prefix_of(world) + "rank/" + std::to_string(world.rank); }

// Kernels are the process's, not the context's: only an explicit wish changes them.
void force_variant(const Config& config) {
  if (config.choice<Simd>() != Simd::kAuto) kernels::select_variant(config.text(Var::kSimd).c_str());
}

}  // namespace

namespace {

// Those that this process has not been told yet. A process may have many worlds.
std::vector<std::string> news_of(std::vector<std::string> texts) {
  static Mutex mutex;
  static std::set<std::string>& told = *new std::set<std::string>;  // contexts may outlive main()
  const MutexLock lock(mutex);
  texts.erase(std::remove_if(texts.begin(), texts.end(), [](const auto& text) { return !told.insert(text).second; }),
              texts.end());
  return texts;
}

}  // namespace

void abandon_start(Store& store, const World& world, const std::string& why, int64_t deadline) {
  store.set(entry_key(world), kGaveUp + why, deadline);
  store.set(prefix_of(world) + kGaveUpWhy + std::to_string(world.rank), why, deadline);
}

Context::Context(const ContextOptions& options)
    : world_(options.world),
      config_(options.overrides),
      log_(config_.choice<LogLevel>(), config_.flag(Var::kLogHideTime), options.world.rank),
      fork_generation_(fork_generation()) {
  occupy_standard_descriptors();
  if (world_.size < 1 || world_.rank < 0 || world_.rank >= world_.size)
    fail(ErrorKind::kInvalidArgument, "[context] rank " + std::to_string(world_.rank) + " of " +
                                          std::to_string(world_.size) + ": expected 0 <= rank < size");
  if (world_.rank == 0)
    for (const std::string& text : news_of(doubtful_variables())) log_.warning("[config] " + text);
  force_variant(config_);
  const int64_t deadline = now_ns() + config_.integer(Var::kStartTimeout) * kSecond;
  if (!options.memory_world.empty() || world_.size == 1) {
    // A world of one needs nobody; a private name keeps it to itself.
    static std::atomic<uint64_t> singles{0};
    const std::string name =
        !options.memory_world.empty() ? options.memory_world : "\n" + std::to_string(singles.fetch_add(1));
    store_ = std::make_shared<MemoryWorldStore>(memory_world(name, world_.epoch, world_.size));
  } else {
    store_ = connect_store(options.store_host, options.store_port, world_.secret, deadline, options.interrupted);
  }
  try {
    if (options.memory_world.empty() && world_.size > 1) pass_begun_worlds(*store_, options, deadline);
    exchange_entries(*store_, options, deadline);
    connect(*store_, options, deadline);
  } catch (const Error& error) {
    if (!gave_up_) give_up(*store_, error);
    throw;
  } catch (const std::bad_alloc&) {
    tell_others(*store_, "[context] out of memory", true);
    throw;
  } catch (const std::exception& error) {
    tell_others(*store_, error.what(), true);
    throw;
  }
}

Context::~Context() = default;

// A script may run several programs as one rank, one after the other. Each numbers its worlds from 0, but the store
// still has those of the others. Where any rank has left a world's start, this rank was in it: its own word may be
// missing if it was killed, and rank 1's if that is slow.
void Context::pass_begun_worlds(Store& store, const ContextOptions& options, int64_t deadline) {
  std::vector<int> witnesses{1};
  if (world_.rank > 1) witnesses.push_back(world_.rank);
  const auto ignore = [](int, const std::string&) {};
  const auto begun = [&] {
    const std::string prefix = job_prefix() + kLeft + "/";
    const int64_t answered = Store::answer_by(deadline);
    return store.get_present(prefix, witnesses, answered, ignore, options.interrupted).size() < witnesses.size();
  };
  while (begun()) ++world_.epoch;
}

void Context::exchange_entries(Store& store, const ContextOptions& options, int64_t deadline) {
  const std::string settings = settings_text(config_);
  // Version, host, a number that tells this process from others, settings. The version's place never changes.
  uint64_t number;
  std::memcpy(&number, random_bytes(sizeof number).data(), sizeof number);
  const std::string ours =
      kEntry + world_.version + "\n" + host_identity() + "\n" + std::to_string(number) + "\n" + settings;
  store.set(entry_key(world_), ours, Store::answer_by(deadline), options.interrupted);
  entered_ = true;
  std::vector<std::string> hosts(static_cast<size_t>(world_.size));
  const auto on_entry = [&](int rank, const std::string& entry) {
    hosts[rank] = read_entry(store, options, rank, entry, settings);
  };
  const std::vector<int> missing =
      store.get_all(job_prefix() + "rank/", ranks_from(0, world_.size), deadline, on_entry, options.interrupted);
  if (!missing.empty()) report_missing(store, options, missing, ours);
  find_location(options, hosts);
}

// Returns the rank's host; throws when it does not fit.
std::string Context::read_entry(Store& store, const ContextOptions& options, int rank, const std::string& entry,
                                const std::string& settings) {
  if (entry.rfind(kGaveUp, 0) == 0)
    fail(ErrorKind::kAborted, "[rendezvous] rank " + std::to_string(rank) + " has given up this start (world " +
                                  std::to_string(world_.epoch) + "): " + entry.substr(sizeof kGaveUp - 1));
  const std::string version = entry_version(entry);
  if (version != world_.version)
    refuse(store, options,
           "[context] rank " + std::to_string(world_.rank) + " runs Perseus " + world_.version + ", rank " +
               std::to_string(rank) + " runs Perseus " + version + ": install the same Perseus on every host");
  const size_t host = entry.find('\n') + 1, line = entry.find('\n', host), next = entry.find('\n', line + 1);
  if (line == std::string::npos || next == std::string::npos)
    fail(ErrorKind::kIo, "[rendezvous] rank " + std::to_string(rank) + " left an entry that cannot be read");
  if (entry.compare(next + 1, std::string::npos, settings) != 0)
    refuse(store, options,
           "[context] ranks " + std::to_string(world_.rank) + " and " + std::to_string(rank) +
               " are configured differently: " + first_difference(settings, entry.substr(next + 1)));
  return entry.substr(host, line - host);
}

// Every rank finds out by itself that the ranks do not fit, and need not be told. Rank 0 goes last: the store may end
// with its process. In memory it ends with whoever leaves it last, and all wait: one that comes later would find an
// empty one.
void Context::refuse(Store& store, const ContextOptions& options, const std::string& why) {
  gave_up_ = true;
  try {
    const std::string prefix = job_prefix() + "refused/";
    const int64_t deadline = now_ns() + Store::kAnswerTime;
    store.set(prefix + std::to_string(world_.rank), "", deadline, options.interrupted);
    const auto ignore = [](int, const std::string&) {};
    if (world_.rank == 0 || !options.memory_world.empty())
      static_cast<void>(store.get_all(prefix, ranks_from(0, world_.size), deadline, ignore, options.interrupted));
  } catch (const Error&) {
    // A rank is late, or the server is gone: what is to be said is the same.
  }
  fail(ErrorKind::kInvalidArgument, why);
}

// `missing` have not appeared in time as far as this rank knows, which may itself be late. The store says which of them
// have appeared, and that another is rank r, too.
void Context::report_missing(Store& store, const ContextOptions& options, std::vector<int> missing,
                             const std::string& ours) const {
  bool twice = false;
  std::string trouble;
  const auto on_present = [&](int rank, const std::string& entry) {
    if (rank == world_.rank) twice = entry != ours;
  };
  try {
    missing = store.get_present(job_prefix() + "rank/", ranks_from(0, world_.size), now_ns() + Store::kAnswerTime,
                                on_present, options.interrupted);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kAborted) throw;
    // Without an answer this rank knows of nobody's entry, its own included.
    missing.erase(std::remove(missing.begin(), missing.end(), world_.rank), missing.end());
    trouble = std::string("; ") + error.what();
  }
  std::string names;
  for (size_t i = 0; i < std::min(missing.size(), kMostNamed); ++i)
    names += (i == 0 ? "" : ", ") + std::to_string(missing[i]);
  const std::string size = std::to_string(world_.size);
  const std::string limit = std::to_string(config_.integer(Var::kStartTimeout)) + " s (HOROVOD_START_TIMEOUT)";
  std::string text = "[rendezvous] rank " + names + " of " + size + " did not appear within " + limit + trouble;
  if (missing.empty())
    text = "[rendezvous] all " + size + " ranks have appeared, but rank " + std::to_string(world_.rank) +
           " learnt of it only after its " + limit +
           ": raise that limit if they start far apart, or look for what has paused this rank";
  if (twice)
    text += "; another process says that it is rank " + std::to_string(world_.rank) +
            ", too: look at the variables that number the ranks";
  fail(ErrorKind::kTimeout, text);
}

std::string Context::job_prefix() const { return prefix_of(world_); }

// Throws the error of this start, after the others can read it. One that has come later must not wait for us here: we
// may be waiting in the next epoch already.
void Context::give_up(Store& store, const Error& error) {
  gave_up_ = true;
  // The others know that already. What this rank could not do meanwhile may be why the other one gave up.
  if (!ended_by_other_.empty() && error.kind() == ErrorKind::kAborted)
    fail(ErrorKind::kIo,
         "[rendezvous] world " + std::to_string(world_.epoch) + " did not begin: " + error.what() + ended_by_other_);
  std::string text = error.what();
  // It may have ended because another did, and seen it first.
  if (error.kind() == ErrorKind::kIo) {
    const std::string other = reason_of_another(store, Store::kAnswerTime);
    text += other.empty() ? ended_by_other_ : other;
  }
  tell_others(store, text, error.kind() != ErrorKind::kInvalidArgument);
  fail(error.kind(), text);
}

// A setting may be wrong on this rank alone, or on all of them. Where its entry is there, those who have not read it
// yet go on (`at_once` is false) and say of their own setting what is wrong; whoever waits for this rank then asks.
void Context::tell_others(Store& store, const std::string& why, bool at_once) {
  const int64_t deadline = now_ns() + Store::kAnswerTime;
  try {
    if (at_once || !entered_) abandon_start(store, world_, why, deadline);
    else store.set(job_prefix() + kGaveUpWhy + std::to_string(world_.rank), why, deadline);
  } catch (const std::exception&) {
    // The server is gone, and the others know; or there is no memory for telling them.
  }
}

// Of the ranks that have given up this start, the one with the shortest reason knows best: the others repeat it.
std::string Context::reason_of_another(Store& store, int64_t patience_ns) const {
  std::string shortest;
  const auto on_reason = [&](int rank, const std::string& why) {
    if (rank == world_.rank) return;
    const std::string text = "; rank " + std::to_string(rank) + " has given up this start: " + why;
    if (shortest.empty() || text.size() < shortest.size()) shortest = text;
  };
  try {
    static_cast<void>(
        store.get_present(job_prefix() + kGaveUpWhy, ranks_from(0, world_.size), now_ns() + patience_ns, on_reason));
  } catch (const Error&) {
    // The server is gone.
  }
  return shortest;
}

void Context::find_location(const ContextOptions& options, const std::vector<std::string>& hosts) {
  std::map<std::string, int> members;
  std::vector<std::string> order;  // hosts by their lowest rank
  std::vector<int> local_ranks;
  for (const std::string& host : hosts) {
    if (members[host] == 0) order.push_back(host);
    local_ranks.push_back(members[host]++);
  }
  const std::string& here = hosts[world_.rank];
  ranks_here_ = members[here];
  for (const auto& entry : members) homogeneous_ = homogeneous_ && entry.second == members.begin()->second;
  local_rank_ = options.local_rank;
  local_size_ = options.local_size;
  cross_rank_ = options.cross_rank;
  cross_size_ = options.cross_size;
  if (local_size_ == 0) {
    local_rank_ = local_ranks[world_.rank];
    local_size_ = ranks_here_;
    cross_size_ = 0;
  }
  if (cross_size_ == 0) {
    // This host's place among those that have a rank with our local rank.
    cross_rank_ = 0;
    bool before = true;
    for (const std::string& host : order) {
      if (host == here) before = false;
      if (members[host] <= local_rank_) continue;
      ++cross_size_;
      if (before) ++cross_rank_;
    }
  }
}

// For descriptors of connections with `remote` ranks that are reached by TCP and with the others of this host, and with
// all of them where this rank runs the store.
void Context::make_room(int remote) {
  constexpr size_t kOwn = 64, kOfNeighbour = 2, kOfEveryPeer = 1;
  // A control connection, and links: of each stream, of which the tuner tries twice as many, and for agreements.
  const size_t of_remote = 3 + 2 * static_cast<size_t>(config_.integer(Var::kStreams));
  // On their way between all pairs of this host at once, to which the limit applies, too: where it is too low for that,
  // they wait for each other.
  static_cast<void>(make_room_for_descriptors(static_cast<size_t>(ranks_here_) * static_cast<size_t>(ranks_here_)));
  const std::string missing = make_room_for_descriptors(kOwn + kOfEveryPeer * static_cast<size_t>(world_.size) +
                                                        kOfNeighbour * static_cast<size_t>(ranks_here_) +
                                                        of_remote * static_cast<size_t>(remote));
  if (!missing.empty() && local_rank_ == 0)
    log_.warning("[context] with " + std::to_string(world_.size) + " ranks " + missing);
}

void Context::connect(Store& store, const ContextOptions& options, int64_t deadline) {
  auto waker = std::make_unique<Waker>();
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<Transport*> route(static_cast<size_t>(world_.size), nullptr);
  const auto interrupted = [&transports, ended = watching_others(options, deadline)]() PERSEUS_REQUIRES(progress_lock) {
    // Of this host's ranks, those that are connected to all others already watch over this one.
    for (const auto& transport : transports) transport->send_heartbeats();
    return ended && ended();
  };
  const ConnectOptions connecting{deadline, interrupted, [&](const Error& error) { give_up(store, error); }};
  const auto choice = config_.choice<TransportChoice>();
  const auto* threads = dynamic_cast<const MemoryWorldStore*>(&store);
  make_room(choice != TransportChoice::kTcp ? world_.size - ranks_here_ : world_.size - 1);
  if (world_.size > 1) {
    if (threads != nullptr && choice == TransportChoice::kAuto) {
      transports.push_back(connect_mem(world_, threads->fabric(), *waker));
    } else if (choice != TransportChoice::kTcp) {
      auto shm = connect_shm(world_, store, *waker, config_, connecting);
      if (shm) transports.push_back(std::move(shm));
    }
  }
  std::vector<int> remote;
  for (int peer = 0; peer < world_.size; ++peer) {
    if (peer == world_.rank) continue;
    if (!transports.empty() && transports[0]->reaches(peer)) route[peer] = transports[0].get();
    else remote.push_back(peer);
  }
  if (!remote.empty()) {
    if (choice == TransportChoice::kShm)
      fail(ErrorKind::kInvalidArgument, "[context] PERSEUS_TRANSPORT=shm, but rank " + std::to_string(remote[0]) +
                                            " runs on another host: unset it");
    transports.push_back(connect_tcp(world_, store, *waker, config_, remote, connecting));
    for (int peer : remote) route[peer] = transports.back().get();
  }
  const Cores cores{usable_cores(), ranks_here_};
  engine_ =
      std::make_unique<Engine>(world_, config_, log_, std::move(waker), std::move(transports), std::move(route), cores);
  if (world_.size > 1 && config_.choice<CpuOperations>() == CpuOperations::kMpi) use_mpi(options, deadline);
  await_all(store, options, deadline);
}

// Also asks once a second whether another rank has given up this start: whoever has read its entry before would wait
// for its connection. The store's own connection may be in use, so it has another one, which most starts do not need.
std::function<bool()> Context::watching_others(const ContextOptions& options, int64_t deadline) {
  if (options.store_port == 0 || !options.memory_world.empty()) return options.interrupted;
  auto store = std::make_shared<std::shared_ptr<Store>>();
  // Heartbeats wait for the answer.
  const int64_t limit = config_.integer(Var::kTimeout) * kSecond;
  const int64_t patience = limit == 0 ? Store::kAnswerTime : std::min(Store::kAnswerTime, limit / 4);
  return [this, options, deadline, store, patience, ask_at = now_ns() + kSecond]() mutable {
    if (options.interrupted && options.interrupted()) return true;
    if (now_ns() < ask_at) return false;
    try {
      if (*store == nullptr)
        *store = connect_store(options.store_host, options.store_port, world_.secret,
                               std::min(deadline, now_ns() + patience));
      ended_by_other_ = reason_of_another(**store, patience);
    } catch (const Error&) {
      // The server is busy or gone, which is no news of another rank.
    }
    ask_at = now_ns() + kSecond;
    return !ended_by_other_.empty();
  };
}

void Context::use_mpi(const ContextOptions& options, int64_t deadline) {
  try {
    engine_->use_mpi(deadline,
                     [&] { return !engine_->failure().ok || (options.interrupted && options.interrupted()); });
  } catch (const Error& error) {
    const Status cause = engine_->failure();
    if (error.kind() != ErrorKind::kAborted || cause.ok) throw;
    fail(ErrorKind::kIo, cause.message);
  }
}

// Only when all are connected may anybody go on: a rank that leaves early must not take the others' rendezvous with it.
void Context::await_all(Store& store, const ContextOptions& options, int64_t deadline) {
  const std::string prefix = job_prefix();
  const std::string own = "/" + std::to_string(world_.rank);
  store.set(prefix + kReady + own, encode(engine_->own_location()), Store::answer_by(deadline), options.interrupted);
  std::vector<Location> locations;
  for (const std::string& text : await_word(store, kReady, 0, options, deadline))
    locations.push_back(decode_location(text));
  engine_->set_locations(std::move(locations));
  // Rank 0 goes last: its process may be the one that runs the server.
  if (world_.rank == 0) {
    await_word(store, kLeft, 1, options, deadline);
  } else {
    try {
      store.set(prefix + kLeft + own, "", Store::answer_by(deadline), options.interrupted);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kAborted) throw;
      // It was received, but rank 0 was gone before the answer.
    }
  }
}

// After the end of a rank that knew of all others and has continued: all are ready then, but those that live may still
// be about to leave.
bool Context::all_said(Store& store, const std::string& word, const std::vector<int>& ranks,
                       const std::function<void(int rank, const std::string& text)>& on_word,
                       const ContextOptions& options) const {
  const std::string prefix = job_prefix() + word + "/";
  const int64_t deadline = now_ns() + Store::kAnswerTime;
  try {
    const std::vector<int> missing = word == kLeft
                                         ? store.get_all(prefix, ranks, deadline, on_word, options.interrupted)
                                         : store.get_present(prefix, ranks, deadline, on_word, options.interrupted);
    return missing.empty();
  } catch (const Error&) {
    return false;  // the server is gone, or does not answer
  }
}

// Returns what the ranks from `first` on leave under a word once they have come so far.
std::vector<std::string> Context::await_word(Store& store, const std::string& word, int first,
                                             const ContextOptions& options, int64_t deadline) {
  const std::string prefix = job_prefix() + word + "/";
  std::vector<std::string> words(static_cast<size_t>(world_.size - first));
  const std::vector<int> ranks = ranks_from(first, world_.size);
  const auto on_word = [&](int rank, const std::string& text) { words[static_cast<size_t>(rank - first)] = text; };
  // Connected to all, the engine knows of a rank's death at once.
  const auto hopeless = [&] { return !engine_->failure().ok || (options.interrupted && options.interrupted()); };
  try {
    const std::vector<int> missing = store.get_all(prefix, ranks, deadline, on_word, hopeless);
    if (!missing.empty())
      fail(ErrorKind::kTimeout, "[rendezvous] rank " + std::to_string(missing[0]) +
                                    " did not finish its start within " +
                                    std::to_string(config_.integer(Var::kStartTimeout)) +
                                    " s (HOROVOD_START_TIMEOUT): look at what it printed last");
  } catch (const Error& error) {
    const Status cause = engine_->failure();
    if (error.kind() != ErrorKind::kAborted || cause.ok) throw;
    if (!all_said(store, word, ranks, on_word, options)) fail(ErrorKind::kIo, cause.message);
  }
  return words;
}

int64_t Context::setting(const std::string& name) const {
  for (int i = 0; i < static_cast<int>(Var::kCount); ++i) {
    const Variable& entry = variable(static_cast<Var>(i));
    const bool numbered = entry.type == VarType::kInt || entry.type == VarType::kBool || entry.type == VarType::kChoice;
    if (numbered && name == entry.name) return config_.integer(entry.id);
  }
  return -1;
}

bool Context::in_creating_process() const { return fork_generation() == fork_generation_; }

void Context::check_process() const {
  if (!in_creating_process())
    fail(ErrorKind::kAborted,
         "[context] this process was forked after init(): Perseus stays with the parent. Call "
         "init() in the process that communicates, or use the spawn start method.");
}

}  // namespace perseus
