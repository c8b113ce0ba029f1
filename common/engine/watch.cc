// Peers: their control messages, their signs of life, what they have not submitted; and how a world ends.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "base/clock.h"
#include "base/utf8.h"
#include "engine/engine.h"
#include "engine/wording.h"

namespace perseus {
namespace {

constexpr char kAbortMessage = 'A';    // followed by the cause
constexpr char kGoodbyeMessage = 'S';  // followed by who left first and "channel:round " of every group
constexpr char kMoreFollows = '+';     // at the end of such a message: its sender has not left yet
constexpr char kAwaitMessage = 'W';    // the sender waits until the receiver submits: followed by what
constexpr char kLinkMessage = 'L';     // the sender has made its end of the link for sends and receives
constexpr char kNcclMessage = 'N';     // the sender has made its end of the link for turns of NCCL
constexpr char kUnusedMessage = 'U';   // the sender no longer uses these channels, of a removed process set
constexpr int64_t kDrainTime = 10 * kSecond;
// What has been submitted later is probably not waited for.
constexpr int64_t kJustNow = 100 * kMillisecond;
constexpr size_t kMostNames = 3;
constexpr size_t kMostOfAText = 1000;  // in a control message
// We ourselves were stopped or starved for this long, or half of a limit: nobody else's silence proves anything.
constexpr int64_t kOwnPause = 5 * kSecond;
// Half of a short stall limit may be less than a thread with nothing to do sleeps, a second, and housekeeping's pause.
constexpr int64_t kMoreThanASleep = 2 * kSecond;

std::string seconds(int64_t ns) {
  const int64_t tenths = std::max<int64_t>(ns, 0) / (kSecond / 10);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

std::string names_of(const std::vector<Entry*>& entries) {
  std::string text;
  for (size_t i = 0; i < std::min(entries.size(), kMostNames); ++i) text += (i == 0 ? "" : ", ") + *entries[i]->text;
  if (entries.size() > kMostNames) text += " and " + std::to_string(entries.size() - kMostNames) + " more";
  return text;
}

std::string leaver(int rank) { return rank < 0 ? "this rank" : "rank " + std::to_string(rank); }

}  // namespace

// ---- control messages ----

void Engine::read_peer_events() {
  PeerEvent event;
  std::vector<PeerEvent> gone;
  for (auto& transport : transports_)
    while (transport->next_event(&event)) {
      if (event.kind == PeerEvent::Kind::kGone) gone.push_back(event);
      else on_peer_event(event);
    }
  // Who left first comes before who ended because of it.
  for (const PeerEvent& last : gone) on_peer_event(last);
}

void Engine::on_peer_event(const PeerEvent& event) {
  const std::string rank = std::to_string(event.peer);
  if (event.kind == PeerEvent::Kind::kGone) {
    if (left_[event.peer]) return;
    const int first = first_left_.load();
    // Unless the reason says itself where to look.
    const char* hint = !event.text.empty() && event.text.back() == ')' ? "" : " (its own output says why)";
    abort(Error(ErrorKind::kIo, std::string("[") + route_[event.peer]->name() + "] lost rank " + rank + ": " +
                                    event.text + hint +
                                    (first < 0 ? "" : "; before that " + leaver(first) + wording(world_.api).left)),
          true);
  } else if (!event.text.empty() && event.text[0] == kAbortMessage) {
    abort(Error(ErrorKind::kAborted, event.text.substr(1)), true);
  } else if (!event.text.empty() && event.text[0] == kGoodbyeMessage) {
    on_goodbye(event.peer, event.text.substr(1));
  } else if (!event.text.empty() && event.text[0] == kAwaitMessage) {
    on_awaited(event.peer, event.text.substr(1));
  } else if (!event.text.empty() && event.text[0] == kLinkMessage) {
    if (!failed_.load(std::memory_order_relaxed)) point_to_point_.on_link_made(event.peer);
  } else if (!event.text.empty() && event.text[0] == kNcclMessage) {
    if (!failed_.load(std::memory_order_relaxed)) nccl_order_.on_called(event.peer);
  } else if (!event.text.empty() && event.text[0] == kUnusedMessage) {
    unused_by_.emplace(static_cast<uint32_t>(std::strtoul(event.text.c_str() + 1, nullptr, 10)), event.peer);
  }
}

void Engine::call_about_nccl(int peer) { route_[peer]->send_control_message(peer, std::string(1, kNcclMessage)); }

void Engine::tell_of_link(int peer) { route_[peer]->send_control_message(peer, std::string(1, kLinkMessage)); }

void Engine::forget_removed() {
  for (auto at = removed_.begin(); at != removed_.end();) {
    const uint32_t channels = at->first;
    Removed& removed = at->second;
    if (removed.set.use_count() == 1) {
      residuals_.forget_group(channels);
      removed.set.reset();
    }
    if (removed.set == nullptr) {
      if (!removed.told)
        for (int peer : removed.members)
          if (route_[peer] != nullptr)
            route_[peer]->send_control_message(peer, kUnusedMessage + std::to_string(channels));
      removed.told = true;
      const auto over = [&](int peer) PERSEUS_REQUIRES(progress_lock) {
        if (route_[peer] == nullptr) return true;
        if (unused_by_.erase({channels, peer}) == 0) return false;
        route_[peer]->forget(peer, channels);
        return true;
      };
      removed.members.erase(std::remove_if(removed.members.begin(), removed.members.end(), over),
                            removed.members.end());
    }
    at = removed.members.empty() ? removed_.erase(at) : std::next(at);
  }
}

void Engine::on_goodbye(int peer, const std::string& rounds) {
  std::istringstream stream(rounds);
  int first = peer;
  stream >> first;
  uint32_t channels;
  uint64_t round;
  for (char colon; stream >> channels >> colon >> round;) {
    const auto known = last_rounds_.find(channels);
    last_rounds_[channels] = known == last_rounds_.end() ? round : std::min(known->second, round);
  }
  if (!rounds.empty() && rounds.back() == kMoreFollows) return;
  left_[peer] = true;
  if (first_left_ < 0) first_left_ = first < 0 || first >= world_.size ? peer : first;
  point_to_point_.on_left(peer);
  nccl_order_.on_left(peer);
  closing_.store(true, std::memory_order_release);
}

// ---- who waits for whom ----

int Engine::inspection_signal(bool chain) {
  if (chain) call_before_answering();
  return answered_signal();
}

// Asked by a signal. Who is missing is asked for now, and told of in the next pass.
void Engine::answer_inspection(int64_t now) {
  if (inspection_due_) log_.warning("[inspect] " + what_it_waits_for(now));
  const bool asked_now = !inspection_due_ && inspected_ != inspections();
  inspected_ = inspections();
  inspection_due_ = asked_now;
  if (!asked_now) return;
  std::vector<Negotiation::Stalled> asked;
  for (auto& [id, group] : groups_) group->negotiation().find_stalled(now, kJustNow, &asked);
}

std::string Engine::what_it_waits_for(int64_t now) {
  std::string lines;
  const auto add = [&](const std::string& what, int64_t since_ns, const std::string& whom) {
    lines += "\n  " + what + " since " + seconds(now - since_ns) + ": " + whom;
  };
  for (auto& [id, group] : groups_) {
    const std::string set = id == 0 ? "" : " (process set " + std::to_string(id) + ")";
    std::vector<Execution::UnderWay> under_way;
    group->find_under_way(&under_way);
    for (const Execution::UnderWay& operation : under_way)
      add(names_of(operation.entries) + set, operation.begun_ns,
          operation.ranks.empty() ? "it is under way" : "it is under way, and waits for " + listed(operation.ranks));
    std::vector<Negotiation::Stalled> stalled;
    group->negotiation().find_stalled(now, kJustNow, &stalled);
    size_t told = 0;
    for (const Negotiation::Stalled& fact : stalled) {
      if (fact.missing.empty()) continue;
      ++told;
      add(fact.name->text + set, now - fact.age_ns, "it is not submitted by " + listed(fact.missing));
    }
    size_t untold = 0;
    int64_t oldest = now;
    group->negotiation().for_each_pending([&](const Entry& entry) {
      if (entry.description.kind == Kind::kJoin)
        return add("join" + set, entry.submitted_ns, "others have not joined yet");
      oldest = std::min(oldest, entry.submitted_ns);
      ++untold;
    });
    if (untold <= told) continue;
    const std::vector<int> silent = group->round_waits_for();
    add(std::to_string(untold - told) + " more" + set, oldest,
        silent.empty() ? "it is not known yet who has not submitted them"
                       : listed(silent) + " cannot be reached to be asked");
  }
  if (const auto unmatched = point_to_point_.oldest_unmatched())
    add(unmatched->text, unmatched->submitted_ns, "the other half is missing");
  if (loading_.any()) lines += "\n  tensors that a GPU still computes";
  return lines.empty() ? "this rank waits for no other one" : "this rank waits for:" + lines;
}

// By what another rank waits for, this one is busy or stuck elsewhere: Python shows where.
void Engine::on_awaited(int peer, const std::string& names) {
  const int64_t now = now_ns(), patience = stall_ns_ > 0 ? stall_ns_.load() : kSecond;
  if (awaited_ns_ != 0 && now - awaited_ns_ < patience) return;
  awaited_ns_ = now;
  log_.warning("[stall] rank " + std::to_string(peer) + " waits until this rank submits [" + names +
               "]. This rank is alive, but does something else.");
  if (route_[peer]->kind() != TransportKind::kMem) inspect_this_process();  // other ranks would answer, too
}

// ---- clocks ----

void Engine::housekeeping(int64_t now) {
  int64_t pause = kOwnPause;
  if (timeout_ns_ > 0) pause = std::min(pause, timeout_ns_ / 2);
  if (stall_shutdown_ns_ > 0) pause = std::min(pause, std::max(kMoreThanASleep, stall_shutdown_ns_ / 2));
  if (housekeeping_ns_ == 0 || now - housekeeping_ns_ > pause) alive_since_ns_ = now;
  housekeeping_ns_ = now;
  for (auto& transport : transports_) transport->send_heartbeats();
  answer_inspection(now);
  if (failed_.load(std::memory_order_relaxed)) return;
  if (timeout_ns_ > 0) {
    check_liveness(now);
    for (auto& [id, group] : groups_) group->check_progress(now, alive_since_ns_, !never_ends(*group));
    point_to_point_.check_progress(now, alive_since_ns_, timeout_ns_);
  }
  if (stall_ns_ > 0 || stall_shutdown_ns_ > 0) {
    check_stalls(now);
    check_unmatched(now);
  }
  if (stall_ns_ > 0) check_deadlocks(now);
}

void Engine::check_liveness(int64_t now) {
  for (int peer = 0; peer < world_.size; ++peer) {
    if (route_[peer] == nullptr || left_[peer]) continue;
    const int64_t alive = std::max(route_[peer]->last_alive_ns(peer), alive_since_ns_);
    if (now - alive <= timeout_ns_) continue;
    fail(ErrorKind::kTimeout, std::string("[") + route_[peer]->name() + "] no sign of life from rank " +
                                  std::to_string(peer) + " for " + std::to_string((now - alive) / kSecond) +
                                  " s (GLOO_TIMEOUT_SECONDS=" + std::to_string(timeout_ns_ / kSecond) + ")");
  }
}

void Engine::set_stall_limits(int64_t check_ns, int64_t shutdown_ns) {
  stall_ns_ = check_ns;
  stall_shutdown_ns_ = shutdown_ns;
}

void Engine::check_stalls(int64_t now) {
  const int64_t never = std::numeric_limits<int64_t>::max(), check_ns = stall_ns_, shutdown_ns = stall_shutdown_ns_;
  const int64_t warn = check_ns > 0 ? check_ns : never, end = shutdown_ns > 0 ? shutdown_ns : never;
  std::vector<Negotiation::Stalled> stalled;
  // Some rounds before anything has to be said, who is missing is asked for.
  for (auto& [id, group] : groups_)
    group->negotiation().find_stalled(now, std::min(warn, end) / 2, &stalled, alive_since_ns_);
  std::sort(stalled.begin(), stalled.end(), [](const auto& a, const auto& b) { return a.age_ns > b.age_ns; });
  // One rank speaks for all that wait for the same.
  const auto told_here = [&](const Negotiation::Stalled& fact) {
    return fact.first == world_.rank && fact.age_ns >= warn;
  };
  bool warns = false;
  for (const Negotiation::Stalled& fact : stalled) warns |= told_here(fact) && now - fact.name->warned_ns >= warn;
  const bool ends = !stalled.empty() && stalled.front().age_ns >= end;
  if (!warns && !ends) return;
  std::map<int, std::string> missing;
  for (const Negotiation::Stalled& fact : stalled) {
    if (!ends && !told_here(fact)) continue;
    fact.name->warned_ns = now;
    for (int rank : fact.missing)
      missing[rank] += (missing[rank].empty() ? "" : ", ") + fact.name->text + (fact.age_ns >= end ? "!" : "");
  }
  std::string text =
      "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting "
      "for remainder of ranks for more than " +
      std::to_string((ends ? end : warn) / kSecond) + " seconds";
  const Wording& words = wording(world_.api);
  if (ends) text += std::string(" (") + words.limit + "). " + words.ends;
  else if (end == never)
    text += std::string(". A rank that is busy is waited for. ") + words.limit + " would end the job after a while.";
  else text += ". The job ends after " + std::to_string(end / kSecond) + " seconds (" + words.limit + ").";
  text += std::string(" Ranks with different numbers of batches wait like this:") + words.batches + "\nMissing ranks:";
  for (const auto& [rank, names] : missing) text += "\n" + (words.rank + std::to_string(rank)) + ": [" + names + "]";
  if (ends) fail(ErrorKind::kTimeout, text);
  log_.warning(text);
  for (const auto& [rank, names] : missing)
    if (route_[rank] != nullptr)
      route_[rank]->send_control_message(rank,
                                         kAwaitMessage + names.substr(0, fitting_characters(names, kMostOfAText)));
}

// The same for a send or a receive, of which the two ranks alone know.
void Engine::check_unmatched(int64_t now) {
  const std::optional<PointToPoint::Unmatched> oldest = point_to_point_.oldest_unmatched();
  if (!oldest) return;
  const int64_t age = now - std::max(oldest->submitted_ns, alive_since_ns_);
  const int64_t end = stall_shutdown_ns_, warn = stall_ns_;
  const bool ends = end > 0 && age >= end;
  if (!ends && (warn <= 0 || age < warn || now - warned_of_unmatched_ns_ < warn)) return;
  warned_of_unmatched_ns_ = now;
  const std::string text = "[p2p] " + oldest->text + " within " + std::to_string((ends ? end : warn) / kSecond) + " s";
  const char* limit = wording(world_.api).limit;
  if (ends) fail(ErrorKind::kTimeout, text + " (" + limit + "). Start both halves with the same tag, in time.");
  log_.warning(text + (end > 0 ? ". The job ends after " + std::to_string(end / kSecond) + " s (" + limit + ")."
                               : std::string(". It is waited for. ") + limit + " would end the job after a while."));
}

// Does all that this rank could still submit wait for others? As long as a stall takes to be told of, so that a thread
// that we do not know of yet has its time.
void Engine::check_deadlocks(int64_t now) {
  std::vector<int64_t> handles;
  bool blocked = callers_.all_wait(now, stall_ns_, &handles);
  for (auto& [id, group] : groups_) blocked &= !group->executing();
  std::vector<std::pair<int, std::string>> awaited;  // by process set
  for (auto& [id, group] : groups_) {
    if (!blocked) break;
    // A schedule hides what ranks wait for.
    if (group->negotiation().scheduled() && group->negotiation().has_pending()) group->negotiation().break_schedule();
    blocked &= !group->negotiation().scheduled();
    group->negotiation().for_each_pending([&, id = id](const Entry& entry) {
      for (const int64_t handle : handles)
        if (HandleTable::index_of(handle) == entry.handle) awaited.emplace_back(id, *entry.text);
    });
  }
  // Else one of the handles is done, or about to be.
  blocked &= awaited.size() == handles.size();
  for (auto& [id, group] : groups_) {
    std::string names;
    bool within = blocked;  // the world, or a set that others cannot help to go on
    for (const auto& [set, name] : awaited) {
      within &= id == 0 || set == id;
      names += (names.empty() ? "" : ", ") + name + (set == 0 ? "" : " (process set " + std::to_string(set) + ")");
    }
    group->negotiation().set_blocked(within ? names : "");
  }
}

// ---- the end ----

void Engine::abort(const Error& cause, bool tell) {
  if (failed_.load(std::memory_order_relaxed)) return;
  untold_ = tell ? 0 : world_.size;
  note_cause(cause.kind() == ErrorKind::kMismatch ? ErrorKind::kAborted : cause.kind(), cause.what());
  failed_.store(true, std::memory_order_release);
  drained_.store(true, std::memory_order_release);
  ending_ = true;  // until all is done: passes go on where memory runs out
  tell_peers();
  log_.debug(std::string("the world failed: ") + cause.what());
  end_everything();
  if (!tell) return;
  flight_recorder_.write(cause.what(), log_);
}

void Engine::tell_peers() {
  for (; untold_ < world_.size; ++untold_) {
    if (route_[untold_] == nullptr) continue;
    const std::string whose = number_lacks_ ? "rank " + std::to_string(world_.rank) + ": " : "";
    const std::string cause = failure().message;
    const std::string text = kAbortMessage + whose + cause.substr(0, fitting_characters(cause, kMostOfAText));
    try {
      route_[untold_]->send_control_message(untold_, text);
    } catch (const Error&) {
      // Its link is what has failed.
    }
  }
}

void Engine::end_everything() {
  const Status status = failure();
  fail_loading(status);
  for (auto& [id, group] : groups_) {
    fail_pending(group.get(), true, status);
    give_up(group.get(), status);
  }
  end([this](std::vector<Entry*>* taken) PERSEUS_REQUIRES(progress_lock) { point_to_point_.abandon(taken); }, status);
  ending_ = false;
}

template <class Take>
void Engine::end(const Take& take, const Status& status) {
  std::vector<Entry*> taken;
  try {
    take(&taken);
  } catch (...) {
    for (Entry* entry : taken) finish(entry, status);
    throw;
  }
  for (Entry* entry : taken) finish(entry, status);
}

void Engine::fail_loading(const Status& status) {
  end([this](std::vector<Entry*>* taken) PERSEUS_REQUIRES(progress_lock) { loading_.close(taken); }, status);
}

void Engine::fail_pending(ProcessSet* group, bool close, const Status& status) {
  Negotiation& negotiation = group->negotiation();
  end([&](std::vector<Entry*>* taken) PERSEUS_REQUIRES(progress_lock) { negotiation.take_pending(close, taken); },
      status);
}

void Engine::give_up(ProcessSet* group, const Status& status) {
  end([&](std::vector<Entry*>* taken) PERSEUS_REQUIRES(progress_lock) { group->abandon(taken); }, status);
}

// While closing: rounds that all ranks take part in are finished, and what they made ready; the rest fails.
void Engine::wind_down() {
  if (failed_.load(std::memory_order_relaxed)) return;
  bool moving = point_to_point_.moving() || nccl_order_.waits();
  for (auto& [id, group] : groups_) {
    group->close();
    const bool peer_left = first_left_ >= 0;
    // No round has ended on another rank that this rank has not begun: every round has a part of every rank.
    const bool round_goes_on = !group->round_idle() && !never_ends(*group);
    // What some rank has not begun nobody will finish. Who leaves ends a schedule first, unless there is no time.
    const bool scheduled = group->negotiation().scheduled();
    if (scheduled && !peer_left) group->negotiation().break_schedule();
    if (peer_left && !round_goes_on) {
      const Status status{false, ErrorKind::kAborted, shutdown_text()};
      // Whoever learns of it may ask why the world ends, before all groups are done.
      note_cause(status.kind, status.message);
      fail_pending(group.get(), true, status);
      end_rounds(group.get());
      if (scheduled) give_up(group.get(), status);
    }
    moving |= round_goes_on || group->executing() || (scheduled && !peer_left);
  }
  drained_.store(!moving, std::memory_order_release);
  if (!moving && first_left_ >= 0) {
    fail_loading(Status{false, ErrorKind::kAborted, shutdown_text()});
    note_cause(ErrorKind::kAborted, shutdown_text());
    failed_.store(true, std::memory_order_release);
  }
}

// Its other members need not wait until this rank leaves, too, to know that nothing comes of what they submit.
void Engine::end_rounds(ProcessSet* group) {
  if (!group->end_rounds()) return;
  const std::string text = goodbye() + last_round(*group) + kMoreFollows;
  for (const int peer : group->ranks())
    if (route_[peer] != nullptr) route_[peer]->send_control_message(peer, text);
}

// "channel:round ". A round that this rank has begun but could not finish has not had its part in full.
std::string Engine::last_round(const ProcessSet& group) const {
  const uint64_t last = group.rounds() - (group.round_idle() ? 0 : 1);
  return std::to_string(group.id()) + ":" + std::to_string(last) + " ";
}

// How the message begins.
std::string Engine::goodbye() const {
  return kGoodbyeMessage + std::to_string(first_left_ < 0 ? world_.rank : first_left_.load()) + " ";
}

// It is one after the last one of somebody who left.
bool Engine::never_ends(const ProcessSet& group) const {
  const auto last = last_rounds_.find(group.id());
  return last != last_rounds_.end() && !group.round_idle() && group.rounds() > last->second;
}

void Engine::note_cause(ErrorKind kind, const std::string& text) {
  const MutexLock lock(cause_mutex_);
  cause_ = Status{false, kind, text};
}

std::string Engine::shutdown_text(int first) const {
  const Wording& words = wording(world_.api);
  return words.ended + leaver(first) + words.left + ". Operations that not all ranks had submitted by then fail; " +
         words.again + (first < 0 ? "" : std::string(" If it had fewer batches than the others:") + words.batches);
}

void Engine::shutdown() {
  if (sent_goodbye_.exchange(true)) return;
  closing_.store(true, std::memory_order_release);
  const int64_t deadline = now_ns() + kDrainTime;
  for (bool said = false; !said;) {
    progress_.wait([this] { return drained_.load(std::memory_order_acquire); }, deadline);
    const ProgressLock lock(progress_);
    // Since the wait ended another pass may have joined a round: what all have agreed on there is finished first.
    said = drained_.load(std::memory_order_relaxed) || now_ns() >= deadline;
    if (said) progress_.guard([this]() PERSEUS_REQUIRES(progress_lock) { send_goodbye(); });
  }
}

void Engine::abort_world(const std::string& reason) {
  const ProgressLock lock(progress_);
  abort(Error(ErrorKind::kAborted, "rank " + std::to_string(world_.rank) + " called abort(): " + reason), true);
}

void Engine::send_goodbye() {
  const auto tell_all = [&](const std::string& text) PERSEUS_REQUIRES(progress_lock) {
    for (int peer = 0; peer < world_.size; ++peer)
      if (route_[peer] != nullptr) route_[peer]->send_control_message(peer, text);
  };
  std::string rounds = goodbye();
  for (auto& [id, group] : groups_) {
    if (rounds.size() > 900) {  // a control message holds little more
      tell_all(rounds + kMoreFollows);
      rounds = goodbye();
    }
    rounds += last_round(*group);
  }
  tell_all(rounds);
  abort(Error(ErrorKind::kAborted, shutdown_text()), false);
}

Status Engine::failure() const {
  const MutexLock lock(cause_mutex_);
  return cause_;
}

}  // namespace perseus
