// Reads the kernel's own identifiers; hostnames repeat in containers and lie in clouds.
#include "topology/host.h"

#include <sys/stat.h>

#include <fstream>

namespace perseus {

std::string host_identity() {
  std::string boot_id = "no-boot-id";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat info{};
  stat("/proc/self/ns/net", &info);
  return boot_id + ":" + std::to_string(info.st_ino);
}

}  // namespace perseus
