// Owns one perseus_context for Python. Methods may be called from any thread that holds the GIL; those that block
// release it.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "perseus/perseus.h"

namespace perseus::python {

struct ContextArguments {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 0;
  int cross_rank = 0, cross_size = 0;
  std::string store_host;
  int store_port = 0;
  std::string secret;
  std::string job = "world";
  uint32_t epoch = 0;
  std::vector<std::string> overrides;
  std::string memory_world;
  perseus_api api = PERSEUS_API_HOROVOD;
  pybind11::object interrupted = pybind11::none();  // called now and then; what it raises ends the wait
};

class ContextOwner {
 public:
  // Blocks until the world has formed; Ctrl-C ends the wait. Throws an exception of perseus.errors, or what
  // `interrupted` has raised.
  explicit ContextOwner(const ContextArguments& arguments);
  ~ContextOwner();
  ContextOwner(const ContextOwner&) = delete;
  ContextOwner& operator=(const ContextOwner&) = delete;

  // NULL once closed.
  perseus_context* raw() const { return raw_; }
  // What to say once closed.
  const char* closed_text() const;
  // Throws AbortedError once closed.
  perseus_context* get() const;
  void shutdown();
  void abort(const std::string& reason);
  void set_stall_limits(int check_s, int shutdown_s) const;
  // Shuts down, waits for other threads inside a ContextUse, frees; idempotent. If this thread is inside of one,
  // because Python that runs there calls this, the last use frees.
  void close();

  pybind11::object failure() const;
  std::map<std::string, uint64_t> stats() const;
  perseus_speeds speeds(int group);
  std::optional<std::vector<int>> group_ranks(int group) const;
  // (layout, bytearray of float32) of the residual, or None. The layout has the tensors' shapes above its 64 bits,
  // and the factor above those.
  pybind11::object read_residual(uint64_t gradient_of, int group, const std::string& name) const;
  void write_residual(uint64_t gradient_of, int group, const std::string& name, const pybind11::int_& layout,
                      const pybind11::buffer& data) const;
  void flush_residuals() const;
  void start_timeline(const std::string& path, bool mark_cycles);
  void stop_timeline();

 private:
  friend class ContextUse;
  void end_use();

  const perseus_api api_;
  perseus_context* raw_ = nullptr;
  // Under the GIL:
  std::vector<std::thread::id> users_;    // the thread of each ContextUse
  perseus_context* left_over_ = nullptr;  // for the last use to free
};

// Keeps the context from being freed while its thread may not hold the GIL, also because it runs Python. Created and
// destroyed with the GIL.
class ContextUse {
 public:
  explicit ContextUse(ContextOwner& owner) : owner_(owner), context_(owner.raw()) {
    owner_.users_.push_back(std::this_thread::get_id());
  }
  ~ContextUse() { owner_.end_use(); }
  ContextUse(const ContextUse&) = delete;
  ContextUse& operator=(const ContextUse&) = delete;
  perseus_context* context() const { return context_; }

 private:
  ContextOwner& owner_;
  perseus_context* context_;
};

// Registers class Context.
void bind_context(pybind11::module_& module);

}  // namespace perseus::python
