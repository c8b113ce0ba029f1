// What /proc tells of this process and of those that have started it. Thread-safe.
#pragma once

#include <string>
#include <vector>

namespace perseus {

// "self", its parent, and so on; at most 16.
std::vector<std::string> ancestors();
// The path of the program that `pid` runs; "" if it cannot be read.
std::string executable(const std::string& pid);
// Paths of the libraries that `pid` has loaded and whose file names begin with `name`.
std::vector<std::string> loaded_libraries(const std::string& pid, const std::string& name);

}  // namespace perseus
