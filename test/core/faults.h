// System calls that fail as a test declares, below the sockets and mappings of the core, which knows nothing of it: the
// test's executable has its own socket(), sendmsg(), mmap() …, and the linker prefers these. Each rank is a process, so
// that a fault hits one rank alone and what it leaves open can be counted.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "perseus/perseus.h"

namespace perseus_test {

enum class Call {
  kSocket,
  kConnect,
  kConnectToRank,  // not to the store, which a rank may connect to at any time
  kAccept,
  kSend,
  kRecv,
  kSendmsg,
  kRecvmsg,
  kEpollCreate,
  kEpollCtl,
  kEventfd,
  kTimerfd,
  kMemfd,
  kFallocate,
  kMmap,
};
constexpr int kCalls = 15;

enum class Effect { kError, kShort, kDelay, kDamage, kForge };

constexpr int kStartUp = -1;
constexpr int kAlways = 1 << 30;

// From the `nth` call (0 = first) that `rank` makes in `step`, `times` calls have the effect.
struct Fault {
  int rank = 0;
  int step = kStartUp;
  Call call = Call::kSocket;
  int nth = 0;
  int times = 1;
  Effect effect = Effect::kError;
  int error = 0;  // of kError: what errno is then
  // After so many effects whoever starts the rank interrupts that.
  int interrupted_after = kAlways;
};

// What became of one rank.
struct Ending {
  bool ended = false;   // by itself and in time
  int steps = 0;        // done with the right bits
  int injected = 0;     // faults that took effect
  int descriptors = 0;  // left open
  int mappings = 0;     // of shared memory, left behind
  int code = 0;         // of the start
  std::string message;  // "" = no error
};

// `size` processes of this host each build a world over `transport`, run `steps` allreduces of `elements` floats, and
// end. Kills those that have not ended after `limit_s`. `timeout_s`: GLOO_TIMEOUT_SECONDS.
// `start_timeouts_s`: HOROVOD_START_TIMEOUT of each rank, 5 where there is none.
std::vector<Ending> run_faulty_world(const std::string& transport, int size, int steps, int64_t elements,
                                     const std::vector<Fault>& faults, int limit_s, int timeout_s = 5,
                                     const std::vector<int>& start_timeouts_s = {});

}  // namespace perseus_test
