// The threads that submit requests, and which of them wait: a rank whose every such thread waits in vain submits
// nothing more until one of them is served. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace perseus {

class Callers {
 public:
  Callers();
  ~Callers();
  Callers(const Callers&) = delete;
  Callers& operator=(const Callers&) = delete;

  // By the thread that submits something.
  void submits();
  // By a thread that waits for `handle`, in slices or at once; of one that has never submitted nothing is known.
  void begins_wait(int64_t handle, int64_t now);
  void ends_wait(bool served, int64_t now);

  // Has every thread that has submitted something, and lives, waited for one handle for `ns`? Then `handles` are these.
  bool all_wait(int64_t now, int64_t ns, std::vector<int64_t>* handles) const;

 private:
  struct Caller;
  struct List;
  struct OfThread;
  static OfThread& of_thread();
  Caller* find() const;

  const std::shared_ptr<List> list_;
};

}  // namespace perseus
