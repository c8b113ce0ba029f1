// Keeps this rank's last operations, and writes them when the world fails: one JSON object per line, first the
// failure, then every operation. It keeps a user's last files in a directory: four for each rank of the
// world, and at least 16. Its owner guards it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/log.h"
#include "request/request.h"
#include "topology/world.h"

namespace perseus {

class FlightRecorder {
 public:
  static constexpr size_t kKept = 256;
  static constexpr size_t kNameBytes = 200;  // of a name; the rest is cut

  // `directory`: where to write; "off" = nowhere.
  FlightRecorder(const World& world, const std::string& directory);

  // The entry's handle is about to be done.
  void record(const Entry& entry, const std::string& name, bool ok);
  // Writes the records and logs where, or why they cannot be written.
  void write(const std::string& cause, const Log& log) const;

 private:
  struct Record {
    uint64_t number = 0;
    std::string name;  // has room for kNameBytes from the start: recording allocates nothing
    Kind kind = Kind::kAllreduce;
    DType dtype = DType::kFloat32;
    int group = 0;
    size_t tensors = 0, bytes = 0;
    int64_t submitted_ns = 0, agreed_ns = 0, started_ns = 0, ended_ns = 0;
    bool ok = false;
  };

  std::string text(const std::string& cause) const;

  const int rank_, size_;
  const uint32_t epoch_;
  const bool off_;
  const std::string directory_;
  std::vector<Record> records_{kKept};  // a ring: number n lies at n % kKept
  uint64_t count_ = 0;
};

}  // namespace perseus
