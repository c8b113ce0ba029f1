// One run of a collective in a program of XLA, in three parts: start, wait, take.
//
// A program runs its parts one after another, or several at a time, in its own order. Starts return at once, so ranks
// may start calls in different orders. Between its parts a call owns copies of the tensors, because a program that
// fails elsewhere frees its own while the core still uses them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../../world/world.h"
#include "plan.h"

namespace perseus::tensorflow::xla {

struct Failure {
  int code = 0;  // absl's and TensorFlow's
  std::string text;
};

class CompiledCall {
 public:
  // Null with *failure. inputs: of each tensor of the plan, then the learning rate if it has one; copied.
  static CompiledCall* start(Plan plan, const void* const* inputs, Failure* failure);

  // Called once. `ready` runs when the results exist, on any thread, perhaps before this returns. On failure it gets
  // the reason, and the call has been deleted.
  void when_done(std::function<void(const Failure*)> ready);

  // If `ready` got no failure: copies the results, with the outcome last if there is one, and deletes the call.
  void take(void* const* outputs);

 private:
  struct Buffer {
    void operator()(void* memory) const;
  };
  using Memory = std::unique_ptr<void, Buffer>;

  explicit CompiledCall(Plan plan) : plan_(std::move(plan)) {}
  ~CompiledCall();

  bool prepare(const void* const* inputs, std::vector<perseus_tensor>* tensors);
  bool submit(const void* const* inputs, Failure* failure);
  static void done(void* call, perseus_handle handle);
  void finish(perseus_handle handle);
  bool take_gathered(perseus_handle handle);
  void fail(int code, const std::string& what);
  void report(const std::function<void(const Failure*)>& ready);

  const Plan plan_;
  std::optional<WorldUse> world_;  // until the core is done, so a call that is never waited for keeps no world alive
  std::vector<Memory> inputs_;
  std::vector<Memory> results_;  // unless they take the inputs' place
  std::vector<void*> gathered_;  // the core's
  int32_t outcome_ = 0;
  std::optional<Failure> failure_;

  std::mutex mutex_;
  bool done_ = false;                          // by mutex_, like the next
  std::function<void(const Failure*)> ready_;  // who waits
};

}  // namespace perseus::tensorflow::xla
