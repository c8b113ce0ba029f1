// What messages call things: in the terms of Horovod's API, or of torch.distributed's process groups. Pure functions.
#pragma once

#include <string_view>

#include "base/error.h"
#include "topology/world.h"

namespace perseus {

struct Wording {
  const char* ended;    // the world is over
  const char* left;     // how a rank may have ended it
  const char* again;    // how to go on
  const char* limit;    // what sets how long a rank is waited for
  const char* ends;     // what happens after that
  const char* batches;  // what to do about ranks that take different numbers of steps
  const char* rank;     // before a rank's number in a list
};

inline const Wording& wording(Api api) {
  static constexpr Wording kHorovod = {
      "Horovod has been shut down: ",
      " called shutdown() or ended",
      "shutdown() and init() on every rank make a new world.",
      "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
      "Will shutdown.",
      " give all as many (drop_remainder, steps_per_epoch), or call hvd.join() after the last one.",
      ""};
  static constexpr Wording kProcessGroup = {
      "The process group has ended: ",
      " called destroy_process_group() or ended",
      "destroy_process_group() and init_process_group() or new_group() on every rank make a new group.",
      "timeout= of init_process_group or new_group",
      "The group ends.",
      " give all as many, or train within DistributedDataParallel.join().",
      "rank "};
  return api == Api::kHorovod ? kHorovod : kProcessGroup;
}

// Does a failure's text, read on other ranks, leave open which rank it is about?
inline bool lacks_number(const Error& cause) {
  const std::string_view text = cause.what();
  for (const char* own : {"this process", "this rank"})
    if (text.find(own) != std::string_view::npos) return true;
  if (cause.kind() == ErrorKind::kTimeout) return false;  // of others
  constexpr std::string_view kRank = "rank ";
  for (size_t at = text.find(kRank); at != std::string_view::npos; at = text.find(kRank, at)) {
    at += kRank.size();
    if (at < text.size() && text[at] >= '0' && text[at] <= '9') return false;
  }
  return true;
}

}  // namespace perseus
