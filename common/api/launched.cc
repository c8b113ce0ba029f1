// A launcher answers a process once, so what it said is kept here: like the environment, it is the process's.
#include "api/launched.h"

#include <map>
#include <mutex>
#include <optional>

#include "base/config.h"
#include "base/error.h"
#include "rendezvous/identity.h"
#include "rendezvous/meeting.h"

namespace perseus {
namespace {

struct Launched {
  std::mutex mutex;
  Identity identity;
  std::optional<Meeting> meeting;
  std::optional<Error> failure;
  std::map<std::string, uint32_t> epochs;  // worlds built, by job

  void meet() {
    identity = identify(environment_value);
    try {
      meeting = perseus::meet(identity, environment_value, Config());
    } catch (const Error& error) {
      // A setting can be changed; a launcher that we have begun to talk to cannot be asked again.
      if (error.kind() != ErrorKind::kInvalidArgument) failure = error;
      throw;
    }
  }
};

Launched& launched() {
  static Launched instance;
  return instance;
}

}  // namespace

std::unique_ptr<Context> create_launched(const std::string& job) {
  ContextOptions options;
  {
    Launched& known = launched();
    std::lock_guard<std::mutex> lock(known.mutex);
    if (known.failure) throw Error(*known.failure);
    if (!known.meeting) known.meet();
    options.world.rank = known.identity.rank;
    options.world.size = known.identity.size;
    options.world.secret = known.meeting->secret;
    options.world.job = job;
    // Only attempts that the others see count.
    options.world.epoch = known.epochs[job]++;
    options.local_rank = known.identity.local_rank;
    options.local_size = known.identity.local_size;
    options.cross_rank = known.identity.cross_rank;
    options.cross_size = known.identity.cross_size;
    options.store_host = known.meeting->host;
    options.store_port = known.meeting->port;
  }
  return std::make_unique<Context>(options);
}

}  // namespace perseus
