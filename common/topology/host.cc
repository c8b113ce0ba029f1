// Reads the kernel's own identifiers; hostnames repeat in containers and lie in clouds.
#include "topology/host.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace perseus {

std::string host_identity() {
  std::string boot_id;
  if (!(std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id)) {
    // Network namespaces may have the same number on several hosts.
    char name[256] = {};
    ::gethostname(name, sizeof name - 1);
    boot_id = std::string("no-boot-id:") + name;
  }
  struct stat info{};
  stat("/proc/self/ns/net", &info);
  return boot_id + ":" + std::to_string(info.st_ino);
}

}  // namespace perseus
