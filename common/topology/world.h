// Which ranks make up a world, and what they prove to each other when they connect. Plain values.
#pragma once

#include <cstdint>
#include <string>

#include "base/version.h"

namespace perseus {

// In whose terms messages speak. Same numbers as enum perseus_api.
enum class Api { kHorovod = 0, kProcessGroup = 1 };

// One rank's view of its world.
struct World {
  int rank = 0;
  int size = 1;
  uint32_t epoch = 0;         // counts the worlds built in this job; every handshake and store key carries it
  std::string secret;         // proves membership; never logged
  std::string job = "world";  // prefix of store keys
  std::string version = this_version();
  Api api = Api::kHorovod;
};

}  // namespace perseus
