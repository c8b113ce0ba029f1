// What lossy codecs have held back, by owner, group and name (error feedback). For any thread; a record's content
// belongs to the operation under way, of which a name has one at most.
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

namespace perseus {

// Does all that is held back go along with a reduction? As the chunks are divided among senders and owners now, or,
// where some of it was held elsewhere under another division, from every rank to everybody.
enum class Flush : uint8_t { kNone = 0, kAsDivided = 1, kAmongAll = 2 };
constexpr int kFlushes = 3;

class Residuals {
 public:
  struct Key {
    uint64_t owner;
    uint32_t group;  // its channels
    const std::string& name;
  };
  struct Record {
    ~Record();
    // Of tensor i's elements; pages that no codec touches take no memory.
    float* sent(size_t i) const { return memory.get() + begins[i]; }
    float* result(size_t i) const { return memory.get() + begins[i] + begins.back(); }
    // What an owner holds of results goes with its own gradient, where a result is `factor` times a sum.
    void join_parts(float factor);

    struct Free {
      void operator()(float* p) const { std::free(p); }
    };
    uint64_t owner = 0;
    std::vector<size_t> begins;  // of the tensors, and their end
    std::unique_ptr<float[], Free> memory;
    uint64_t steps = 0;  // times it was taken
    std::atomic<size_t>* bytes = nullptr;
    std::atomic<int> leases{0};  // given up with release, read with acquire by idle()
    // Guarded by Residuals::mutex_:
    CompressionTerms terms;
    uint64_t layout = 0;   // names the division of chunks that `memory` belongs to
    bool holds = false;    // else it is zeros
    bool flushes = false;  // at the next reduction
    bool loaded = false;   // by write(), and not used yet: `terms` and the tensors' sizes are not known
  };

  // Keeps a record for an operation under way: meanwhile nobody else reads or replaces what is in it.
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

  // What the next reduction of these sizes (in elements) has to do: where `terms` have changed, what was held back goes
  // along with the first reduction on the new ones. `layout` gives the number of the present division.
  // `*dropped`: something is held of other sizes, and is given up once all ranks have agreed on these.
  Flush due(const Key& key, const std::vector<size_t>& sizes, const CompressionTerms& terms,
            const std::function<uint64_t()>& layout, bool* dropped);
  // For any reduction that is about to start, of sizes that all ranks have agreed on: what is of others is given up.
  void agreed(const Key& key, const std::vector<size_t>& sizes);
  // For one that may need what is held. Zeros at first, and again when the sizes have changed. Null where the codec
  // asked for keeps nothing and nothing was kept: after a flush such a codec's record is gone.
  Lease take(const Key& key, const std::vector<size_t>& sizes, const CompressionTerms& terms, uint64_t layout,
             Flush flush);
  // What was reduced before sends all that is held back with its next reduction.
  void flush();
  // Drops what an owner has here.
  void forget(uint64_t owner);
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  // Elements held under a name, 0 = nothing is. Where `data` is not null, it has room for `room` = twice as many
  // floats: of what this rank sends, then of the results that it owns. Throws Error(kInvalidArgument) while an
  // operation of that name is under way, and for another room.
  size_t read(const Key& key, float* data, size_t room, uint64_t* layout);
  // Takes the place of what is held under a name, whatever its tensors' sizes are.
  void write(const Key& key, const float* data, size_t room, uint64_t layout);

 private:
  // Null where there is none; key_ is what it is found by.
  std::shared_ptr<Record> find(const Key& key) PERSEUS_REQUIRES(mutex_);
  const Record* idle(const Key& key) PERSEUS_REQUIRES(mutex_);
  std::shared_ptr<Record> make(const Key& key, const std::vector<size_t>& sizes);

  std::atomic<size_t> bytes_{0};
  Mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Record>> records_ PERSEUS_GUARDED_BY(mutex_);
  std::string key_ PERSEUS_GUARDED_BY(mutex_);  // keeps its capacity
};

}  // namespace perseus
