// A launcher answers a process once, so what it said is kept here: like the environment, it is the process's.
#include "api/launched.h"

#include <cstring>
#include <map>
#include <optional>

#include "base/config.h"
#include "base/error.h"
#include "base/mutex.h"

namespace perseus {
namespace {

struct Launched {
  Mutex mutex;
  Identity identity PERSEUS_GUARDED_BY(mutex);
  std::optional<Rendezvous> rendezvous PERSEUS_GUARDED_BY(mutex);
  std::optional<Error> failure PERSEUS_GUARDED_BY(mutex);
  std::map<std::string, uint32_t> epochs PERSEUS_GUARDED_BY(mutex);  // worlds built, by job

  const Rendezvous& find_rendezvous() PERSEUS_REQUIRES(mutex) {
    if (failure) throw Error(*failure);
    if (rendezvous) return *rendezvous;
    identity = identify(environment_value);
    try {
      return rendezvous.emplace(perseus::bootstrap(identity, environment_value, Config()));
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
    const MutexLock lock(known.mutex);
    const Rendezvous& rendezvous = known.find_rendezvous();
    options.world.rank = known.identity.rank;
    options.world.size = known.identity.size;
    options.world.secret = rendezvous.secret;
    options.world.job = job;
    // Only attempts that the others see count.
    options.world.epoch = known.epochs[job]++;
    options.local_rank = known.identity.local_rank;
    options.local_size = known.identity.local_size;
    options.cross_rank = known.identity.cross_rank;
    options.cross_size = known.identity.cross_size;
    options.store_host = rendezvous.host;
    options.store_port = rendezvous.port;
  }
  return std::make_unique<Context>(options);
}

const Rendezvous& launched_rendezvous() {
  Launched& known = launched();
  const MutexLock lock(known.mutex);
  return known.find_rendezvous();
}

Identity launched_identity(const char* const* environment) {
  if (environment == nullptr) return identify(environment_value);
  return identify([environment](const std::string& name) -> std::string {
    for (const char* const* text = environment; *text != nullptr; ++text)
      if (std::strncmp(*text, name.c_str(), name.size()) == 0 && (*text)[name.size()] == '=')
        return *text + name.size() + 1;
    return "";
  });
}

}  // namespace perseus
