// One rank of one world: configuration, identity, transports and engine under one owner. Thread-safe after creation.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "engine/engine.h"

namespace perseus {

class MemFabric;
class Store;

struct ContextOptions {
  World world;
  int local_rank = 0, local_size = 0;  // local_size 0 = find out
  int cross_rank = 0, cross_size = 0;
  std::string store_host;
  int store_port = 0;
  std::string memory_world;  // ranks as threads of this process meet under this name
  std::vector<std::string> overrides;
  std::function<bool()> interrupted;
};

// Ends the start of a world for all that still wait for its rank, which will not come. Throws Error when the store does
// not answer by the deadline.
void abandon_start(Store& store, const World& world, const std::string& why, int64_t deadline_ns);

class Context {
 public:
  // Blocks until the world is complete or the start timeout passes; throws Error, naming missing ranks.
  explicit Context(const ContextOptions& options);
  ~Context();

  int rank() const { return world_.rank; }
  int size() const { return world_.size; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  int cross_rank() const { return cross_rank_; }
  int cross_size() const { return cross_size_; }
  bool homogeneous() const { return homogeneous_; }
  // See perseus_context_setting.
  int64_t setting(const std::string& name) const;
  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }

  // Throws Error(kAborted) in a child that was forked after creation: threads and connections stayed with the parent.
  void check_process() const;
  bool in_creating_process() const;

 private:
  void pass_begun_worlds(Store& store, const ContextOptions& options, int64_t deadline_ns);
  void exchange_entries(Store& store, const ContextOptions& options, int64_t deadline_ns);
  std::string job_prefix() const;
  [[noreturn]] void refuse(Store& store, const ContextOptions& options, const std::string& why);
  [[noreturn]] void give_up(Store& store, const Error& error);
  void tell_others(Store& store, const std::string& why, bool at_once);
  std::function<bool()> watching_others(const ContextOptions& options, int64_t deadline_ns);
  std::string reason_of_another(Store& store, int64_t patience_ns) const;
  [[noreturn]] void report_missing(Store& store, const ContextOptions& options, std::vector<int> missing,
                                   const std::string& ours) const;
  std::string read_entry(Store& store, const ContextOptions& options, int rank, const std::string& entry,
                         const std::string& settings);
  void find_location(const ContextOptions& options, const std::vector<std::string>& hosts);
  void make_room(int remote);
  void connect(Store& store, const ContextOptions& options, int64_t deadline_ns);
  void await_all(Store& store, const ContextOptions& options, int64_t deadline_ns);
  void use_mpi(const ContextOptions& options, int64_t deadline);
  std::vector<std::string> await_word(Store& store, const std::string& word, int first, const ContextOptions& options,
                                      int64_t deadline_ns);
  bool all_said(Store& store, const std::string& word, const std::vector<int>& ranks,
                const std::function<void(int rank, const std::string& text)>& on_word,
                const ContextOptions& options) const;

  World world_;
  Config config_;
  Log log_;
  uint32_t fork_generation_;
  int local_rank_ = 0, local_size_ = 1, cross_rank_ = 0, cross_size_ = 1;
  int ranks_here_ = 1;  // sharing this host's cores, whatever local_size the launcher says
  bool homogeneous_ = true;
  std::shared_ptr<Store> store_;
  std::unique_ptr<Engine> engine_;
  bool entered_ = false;        // our entry is in the store
  bool gave_up_ = false;        // this start, and the others know or find out
  std::string ended_by_other_;  // why another rank has given up this start, if so
};

}  // namespace perseus
