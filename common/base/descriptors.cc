// RLIMIT_NOFILE, which children inherit; /proc/self/fd says what is open.
#include "base/descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace perseus {
namespace {

constexpr char kRemedy[] =
    "raise it where the job is started: `ulimit -n`, LimitNOFILE= of a service, --ulimit nofile= of a container";

// Where /proc is missing: more than a Python process with a framework has.
constexpr size_t kGuess = 256;

size_t open_descriptors() {
  // Since Linux 6.2 the size is their number. Ranks that are threads would otherwise list the descriptors of all.
  struct stat status{};
  if (::stat("/proc/self/fd", &status) == 0 && status.st_size > 0) return static_cast<size_t>(status.st_size);
  DIR* directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return kGuess;
  size_t count = 0;
  while (const dirent* entry = ::readdir(directory)) count += entry->d_name[0] != '.';
  ::closedir(directory);
  return count;
}

}  // namespace

std::string error_text(int error) {
  std::string text = std::strerror(error);
  if (error == ENFILE) return text + ": the whole machine has no descriptor left; raise sysctl fs.file-max";
  if (error != EMFILE && error != ETOOMANYREFS) return text;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::string allowed = std::to_string(limit.rlim_cur) + " descriptors that its limit allows (hard limit " +
                              std::to_string(limit.rlim_max) + "); " + kRemedy;
  if (error == EMFILE) return text + ": this process has opened all of the " + allowed;
  return text + ": processes of this user have more on their way to each other than the " + allowed;
}

std::string make_room_for_descriptors(size_t more) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return "";
  const rlim_t need = open_descriptors() + more;
  if (limit.rlim_cur >= need) return "";
  limit.rlim_cur = std::min(need, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= need) return "";
  return "about " + std::to_string(need) + " descriptors are needed, and the hard limit of this process is " +
         std::to_string(limit.rlim_max) + ": " + kRemedy;
}

void occupy_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    // The lowest free number is taken. Programs that this process starts inherit it.
    if (::fcntl(descriptor, F_GETFD) < 0) static_cast<void>(::open("/dev/null", O_RDWR));
}

}  // namespace perseus
