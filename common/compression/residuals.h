// The residuals of lossy codecs, by owner, group and name (error feedback). Thread-safe; a record's content belongs to
// the operation under way, of which a name has at most one.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "compression/terms.h"
#include "kernels/low_rank.h"

namespace perseus {

// Does a reduction also send all residuals? Either as chunks are divided among senders and owners now or, if some
// residuals belong to another division, from every rank to all.
enum class Flush : uint8_t { kNone = 0, kAsDivided = 1, kAmongAll = 2 };
constexpr int kFlushes = 3;

class Residuals {
 public:
  static constexpr double kLeastRate = 0.1;
  static constexpr double kForgets = 0.998;  // what is left of a highest rate after a step: a tenth after 1150

  struct Key {
    uint64_t owner;
    uint32_t group;  // its channels
    const std::string& name;
  };
  // What a request's tensors are.
  struct Tensors {
    std::vector<size_t> sizes;  // in elements
    uint64_t shapes = 0;        // identifies what lies where in memory, the same in every run; 0 = not known
    uint64_t dtypes = 0;        // identifies them; 0 = not known
  };
  struct Record {
    ~Record();
    // For the elements of tensor i; pages that no codec touches take no memory.
    float* sent(size_t i) const { return memory.get() + begins[i]; }
    float* result(size_t i) const { return memory.get() + begins[i] + begins.back(); }
    // The same for momentum correction, once there is one: what this rank's gradients have accumulated, and the last
    // results. Not in what read() gives. All ranks begin with zeros at the same step, which has_momenta() is for.
    float* velocity(size_t i) const { return momenta.get() + begins[i]; }
    float* last_result(size_t i) const { return momenta.get() + begins[i] + begins.back(); }
    // Makes `memory` say what is held back, also of low-rank sums.
    void settle(size_t tensor) { low_rank[tensor].settle(sent(tensor)); }
    void settle();
    // See take().
    void step_with(double rate);
    // To page-locked memory, which a GPU reads and writes: of 2 * begins.back() floats.
    void move_to(std::shared_ptr<float[]> elsewhere);
    // See take().
    void count_by(float new_factor);
    // Moves an owner's residual of results into the residual of its own gradient; a result is `factor` times a sum.
    void join_parts(float factor);

    struct Free {
      void operator()(float* p) const { std::free(p); }
    };
    uint64_t owner = 0;
    uint32_t group = 0;
    std::vector<size_t> begins;  // of each tensor, then the end of the last one
    std::shared_ptr<float[]> memory;
    bool page_locked = false;  // it is
    std::unique_ptr<float[], Free> momenta;
    std::vector<kernels::LowRankMemory> low_rank;  // of each tensor, see LowRankAllreduce
    uint64_t steps = 0;                            // times it was taken
    float carry = 1.0F;                            // what it is multiplied by in the reduction under way, see take()
    std::atomic<size_t>* bytes = nullptr;
    std::atomic<int> leases{0};  // given up with release, read with acquire by idle()
    // Guarded by Residuals::mutex_:
    double learning_rate = 0;  // of the last step that had one, as it counts; see take()
    double rate_before = 0;    // the same of the step before
    double highest_rate = 0;   // of recent steps, without a sign; see kForgets
    CompressionTerms terms;
    uint64_t layout = 0;              // identifies the division of chunks that `memory` belongs to, and the dtypes
    bool holds = false;               // otherwise it is all zeros
    bool flushes = false;             // at the next reduction
    bool loaded = false;              // by write(), and not used yet: `terms` and the tensors' sizes are unknown
    bool momenta_spoilt = false;      // not every optimizer has applied the last result
    uint64_t shapes = 0, dtypes = 0;  // see Tensors
    float factor = 0;                 // that sums are multiplied by, see take(); 0 = not known
    std::vector<bool> held;           // of each tensor: something may be, by what a codec has sent since the last flush
  };

  // Keeps a record for an operation under way; meanwhile nobody else reads or replaces its content.
  class Lease {
   public:
    Lease() = default;
    explicit Lease(std::shared_ptr<Record> record) : record_(std::move(record)) {
      if (record_) record_->leases.fetch_add(1, std::memory_order_relaxed);
    }
    Lease(const Lease& other) : Lease(other.record_) {}
    Lease(Lease&& other) noexcept : record_(std::move(other.record_)) {}
    Lease& operator=(Lease other) noexcept {
      record_.swap(other.record_);
      return *this;
    }
    ~Lease() {
      if (record_) record_->leases.fetch_sub(1, std::memory_order_release);
    }
    void reset() { *this = Lease(); }
    explicit operator bool() const { return record_ != nullptr; }
    Record* operator->() const { return record_.get(); }
    bool operator==(const Lease& other) const { return record_ == other.record_; }

   private:
    std::shared_ptr<Record> record_;
  };

  // The flush that the next reduction of these tensors needs: if `terms` or dtypes have changed, the first reduction
  // with the new ones sends the residuals. `layout` returns the number of the present division. `*dropped`: there is a
  // residual of other shapes, which is dropped once all ranks have agreed on these.
  Flush due(const Key& key, const Tensors& tensors, const CompressionTerms& terms,
            const std::function<uint64_t()>& layout, bool* dropped);
  // For a reduction that is about to start, of tensors that all ranks have agreed on: drops a residual of other shapes.
  void agreed(const Key& key, const Tensors& tensors);
  // For a reduction that may need the residual, which is zero at first, and again when the shapes have changed. Null if
  // the codec keeps no residual and there is none: a flush removes the record of such a codec. What was held back is
  // worth as much to the parameters as in the step that held it back: so it is multiplied by that step's learning rate
  // over this one's (Zheng et al. 2019, "Communication-Efficient Distributed Blockwise Momentum SGD with
  // Error-Feedback"). Rates below kLeastRate of the highest recent one count as that: an optimizer's momentum keeps
  // what it is given until the rate rises again. A `learning_rate` of 0, or one that is not finite, is not known, or
  // moves nothing: then what was held back stays as it is. So it does where the sign changes, because a negative one
  // is something else; see perseus_request. For the same reason what senders hold back, which is multiplied by a
  // step's `factor` once it is sent, is multiplied by the factor of the step that held it back over this one's; what
  // owners hold back has been multiplied. A factor of 0 changes nothing.
  Lease take(const Key& key, const Tensors& tensors, const CompressionTerms& terms, uint64_t layout, Flush flush,
             double learning_rate, float factor = 1.0F);
  // Has a codec held something back of this tensor since the last flush?
  bool holds(const Key& key, size_t tensor);
  // What was taken counts as not taken: the reduction did not begin.
  void give_back(const Lease& lease);
  // Does the record know the momenta of the last step? If some rank's does not, all begin anew: see begin_momenta().
  bool has_momenta(const Key& key);
  // All records, or those of an owner, forget them.
  void spoil_momenta();
  void spoil_momenta(uint64_t owner);
  // For a reduction of this name with momentum correction that has taken `lease`; with `anew`, from zeros.
  void begin_momenta(const Lease& lease, const std::string& name, bool anew);
  // The group's records begin with the first turn again, where codecs send parts in turn: ranks that have joined took
  // fewer.
  void restart_turns(uint32_t group);
  // Has the next reduction of every known name send its residual.
  void flush();
  // The same of this name.
  void flush(const Key& key);
  // Drops an owner's residuals, or a group's.
  void forget(uint64_t owner);
  void forget_group(uint32_t group);
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  // What a residual belongs to, for write().
  struct Place {
    uint64_t layout = 0;  // see Record, like the others
    uint64_t shapes = 0;
    float factor = 0;
  };
  // Returns the number of elements under a name; 0 = no residual. If `data` is not null, it has room for `room` = twice
  // as many floats: for what this rank sends, then for the results that it owns. Throws Error(kInvalidArgument) while
  // an operation of that name is under way, and for another `room`.
  size_t read(const Key& key, float* data, size_t room, Place* place);
  // Replaces the residual under a name, whatever its tensors are.
  void write(const Key& key, const float* data, size_t room, const Place& place);

 private:
  // Null if there is none; key_ is then its key.
  std::shared_ptr<Record> find(const Key& key) PERSEUS_REQUIRES(mutex_);
  Record* idle(const Key& key) PERSEUS_REQUIRES(mutex_);
  template <class Which>
  void forget_if(const Which& which);
  std::shared_ptr<Record> make(const Key& key, const Tensors& tensors);
  std::unique_ptr<float[], Record::Free> zeros(const std::string& name, size_t count);

  std::atomic<size_t> bytes_{0};
  Mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Record>> records_ PERSEUS_GUARDED_BY(mutex_);
  std::string key_ PERSEUS_GUARDED_BY(mutex_);  // keeps its capacity
};

}  // namespace perseus
