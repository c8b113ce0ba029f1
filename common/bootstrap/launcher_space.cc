// What the ways to talk to a launcher have in common: patience, and a look at what is loaded.
#include "bootstrap/launcher_space.h"

#include <fstream>

#include "base/clock.h"
#include "base/error.h"

namespace perseus {

void check_patience(const SpaceOptions& options, const std::string& what) {
  if (now_ns() < options.deadline_ns) return;
  fail(ErrorKind::kTimeout, "[rendezvous] " + what + " did not arrive within " + std::to_string(options.limit_s) +
                                " s (HOROVOD_START_TIMEOUT): look at what the ranks printed last");
}

std::vector<std::string> loaded_libraries(const std::string& pid, const std::string& name) {
  std::vector<std::string> paths;
  std::ifstream maps("/proc/" + pid + "/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t begin = line.find('/');
    if (begin == std::string::npos) continue;
    const std::string path = line.substr(begin);
    const bool named = path.compare(path.rfind('/') + 1, name.size(), name) == 0;
    if (named && (paths.empty() || paths.back() != path)) paths.push_back(path);
  }
  return paths;
}

}  // namespace perseus
