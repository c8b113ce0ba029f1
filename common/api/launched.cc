// A launcher answers a process once, so what it said is kept here: like the environment, it is the process's.
#include "api/launched.h"

#include <cstring>
#include <list>
#include <map>
#include <optional>

#include "base/config.h"
#include "base/error.h"
#include "base/mutex.h"

namespace perseus {
namespace {

// What the launcher of one identity said. A process has two where torch's variables do not count for all of its worlds.
struct Answer {
  Identity identity;
  std::optional<Rendezvous> rendezvous;
  std::optional<Error> failure;
};

struct Launched {
  Mutex mutex;
  std::list<Answer> answers PERSEUS_GUARDED_BY(mutex);               // none is removed: pointers into them live on
  const Answer* own PERSEUS_GUARDED_BY(mutex) = nullptr;             // to who this process was in its first world
  std::map<std::string, uint32_t> epochs PERSEUS_GUARDED_BY(mutex);  // worlds built, by job

  const Answer& find(const Environment& environment) PERSEUS_REQUIRES(mutex) {
    Answer& answer = answer_to(identify(environment));
    if (answer.failure) throw Error(*answer.failure);
    if (answer.rendezvous) return answer;
    try {
      answer.rendezvous = perseus::bootstrap(answer.identity, environment, Config());
    } catch (const Error& error) {
      // A setting can be changed; a launcher that we have begun to talk to cannot be asked again.
      if (error.kind() != ErrorKind::kInvalidArgument) answer.failure = error;
      throw;
    }
    return answer;
  }

 private:
  Answer& answer_to(const Identity& identity) PERSEUS_REQUIRES(mutex) {
    for (Answer& answer : answers)
      if (answer.identity == identity) return answer;
    return answers.emplace_back(Answer{identity, std::nullopt, std::nullopt});
  }
};

Launched& launched() {
  static Launched instance;
  return instance;
}

// Null = this process's environment.
Environment given_or_own(const char* const* environment) {
  if (environment == nullptr) return environment_value;
  return [environment](const std::string& name) -> std::string {
    for (const char* const* text = environment; *text != nullptr; ++text)
      if (std::strncmp(*text, name.c_str(), name.size()) == 0 && (*text)[name.size()] == '=')
        return *text + name.size() + 1;
    return "";
  };
}

}  // namespace

std::unique_ptr<Context> create_launched(const std::string& job) {
  ContextOptions options;
  {
    Launched& known = launched();
    const MutexLock lock(known.mutex);
    if (known.own == nullptr) known.own = &known.find(environment_value);
    const Answer& answer = *known.own;
    const Identity& identity = answer.identity;
    options.world.rank = identity.rank;
    options.world.size = identity.size;
    options.world.secret = answer.rendezvous->secret;
    options.world.job = job;
    // Only attempts that the others see count.
    options.world.epoch = known.epochs[job]++;
    options.local_rank = identity.local_rank;
    options.local_size = identity.local_size;
    options.cross_rank = identity.cross_rank;
    options.cross_size = identity.cross_size;
    options.store_host = answer.rendezvous->host;
    options.store_port = answer.rendezvous->port;
  }
  return std::make_unique<Context>(options);
}

const Rendezvous& launched_rendezvous(const char* const* environment) {
  Launched& known = launched();
  const MutexLock lock(known.mutex);
  return *known.find(given_or_own(environment)).rendezvous;
}

Identity launched_identity(const char* const* environment) { return identify(given_or_own(environment)); }

}  // namespace perseus
