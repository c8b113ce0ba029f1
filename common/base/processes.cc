// Reads /proc.
#include "base/processes.h"

#include <unistd.h>

#include <climits>
#include <fstream>

namespace perseus {
namespace {

constexpr size_t kMostAncestors = 16;

// "" when there is none.
std::string parent_of(const std::string& pid) {
  std::ifstream status("/proc/" + pid + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.compare(0, 6, "PPid:\t") == 0) return line.substr(6) == "0" ? "" : line.substr(6);
  return "";
}

}  // namespace

std::vector<std::string> ancestors() {
  std::vector<std::string> pids;
  for (std::string pid = "self"; pids.size() < kMostAncestors && !pid.empty(); pid = parent_of(pid))
    pids.push_back(pid);
  return pids;
}

std::string executable(const std::string& pid) {
  char path[PATH_MAX];
  const ssize_t length = ::readlink(("/proc/" + pid + "/exe").c_str(), path, sizeof path);
  return length < 0 ? "" : std::string(path, static_cast<size_t>(length));
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
