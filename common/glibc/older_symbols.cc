// Binds a library built on a new glibc to symbols that glibc 2.28 already has: hidden definitions that the static
// linker prefers to libc's newest versions. Part of shared libraries only, never of tests (sanitizers intercept these
// names). Thread-safe. Whatever a library does not use is dropped by --gc-sections.
//
// Two kinds: a function whose behaviour did not change is a jump to its old version; one that is newer than 2.28
// is written here. test/python/test_wheel.py names any symbol that is missing.
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

// OLDER(name, version): `name` becomes a jump to the version x86-64 has had since `version`; every function listed here
// is in the first version of glibc for aarch64, 2.17. RENAMED(name, older): likewise, to a function of another name.
#if defined(__x86_64__)
#define PERSEUS_JUMP(target) "jmp *" target "@GOTPCREL(%rip)\n"
#define PERSEUS_VERSION(x86_64) x86_64
#elif defined(__aarch64__)
#define PERSEUS_JUMP(target) "b " target "\n"
#define PERSEUS_VERSION(x86_64) "2.17"
#endif
#define RENAMED(name, older, version) \
  __asm__(".section .text.older." #name ",\"ax\",@progbits\n"                                             \
          ".symver perseus_older_" #name "," #older "@GLIBC_" PERSEUS_VERSION(version) "\n"               \
          ".globl " #name "\n.hidden " #name "\n.type " #name ",@function\n" #name ":\n.cfi_startproc\n"  \
          PERSEUS_JUMP("perseus_older_" #name) ".cfi_endproc\n.size " #name ",.-" #name "\n.previous\n");
#define OLDER(name, version) RENAMED(name, name, version)
// Functions written here get libc's name through an asm label, so that no header's declaration is in the way.
#define LIBC_NAME(name) __asm__(name) __attribute__((visibility("hidden")))

// libpthread, libdl and the wrappers moved into libc with 2.34.
OLDER(dladdr, "2.2.5")
OLDER(dlclose, "2.2.5")
OLDER(dlerror, "2.2.5")
OLDER(dlopen, "2.2.5")
OLDER(dlsym, "2.2.5")
OLDER(pthread_attr_getstack, "2.2.5")
OLDER(pthread_attr_setstacksize, "2.2.5")
OLDER(pthread_create, "2.2.5")
OLDER(pthread_detach, "2.2.5")
OLDER(pthread_getattr_np, "2.2.5")
OLDER(pthread_getspecific, "2.2.5")
OLDER(pthread_join, "2.2.5")
OLDER(pthread_key_create, "2.2.5")
OLDER(__pthread_key_create, "2.2.5")
OLDER(pthread_key_delete, "2.2.5")
OLDER(pthread_kill, "2.2.5")
OLDER(pthread_mutex_timedlock, "2.2.5")
OLDER(pthread_mutex_trylock, "2.2.5")
OLDER(pthread_mutexattr_settype, "2.2.5")
OLDER(pthread_once, "2.2.5")
OLDER(pthread_rwlock_rdlock, "2.2.5")
OLDER(pthread_rwlock_tryrdlock, "2.2.5")
OLDER(pthread_rwlock_trywrlock, "2.2.5")
OLDER(pthread_rwlock_unlock, "2.2.5")
OLDER(pthread_rwlock_wrlock, "2.2.5")
OLDER(pthread_setaffinity_np, "2.3.4")
OLDER(pthread_getaffinity_np, "2.3.4")
OLDER(pthread_setname_np, "2.12")
OLDER(pthread_setspecific, "2.2.5")
OLDER(pthread_sigmask, "2.2.5")
OLDER(sem_destroy, "2.2.5")
OLDER(sem_init, "2.2.5")
OLDER(sem_post, "2.2.5")
OLDER(sem_timedwait, "2.2.5")
OLDER(sem_trywait, "2.2.5")
OLDER(sem_wait, "2.2.5")
OLDER(shm_open, "2.2.5")
OLDER(shm_unlink, "2.2.5")
// 2.29 took errno handling by matherr out of these; the numbers are the same.
OLDER(exp, "2.2.5")
OLDER(exp2, "2.2.5")
OLDER(log, "2.2.5")
OLDER(log2, "2.2.5")
OLDER(pow, "2.2.5")
// 2.38 made these read 0b… numbers too.
RENAMED(__isoc23_strtol, strtol, "2.2.5")
RENAMED(__isoc23_strtoll, strtoll, "2.2.5")
RENAMED(__isoc23_strtoul, strtoul, "2.2.5")
RENAMED(__isoc23_strtoull, strtoull, "2.2.5")
RENAMED(__isoc23_sscanf, __isoc99_sscanf, "2.7")

extern "C" {

// 2.32: a hint that lets libstdc++ skip atomics. "No" is always right.
extern char perseus_libc_single_threaded LIBC_NAME("__libc_single_threaded");
char perseus_libc_single_threaded = 0;

// 2.33: before, the stat family was inline calls of __xstat. The kernel's struct is libc's on both architectures.
#define STAT_FAMILY(suffix)                                                                                 \
  int perseus_stat##suffix(const char* path, void* out) LIBC_NAME("stat" #suffix);                          \
  int perseus_lstat##suffix(const char* path, void* out) LIBC_NAME("lstat" #suffix);                        \
  int perseus_fstat##suffix(int fd, void* out) LIBC_NAME("fstat" #suffix);                                  \
  int perseus_fstatat##suffix(int fd, const char* path, void* out, int flags) LIBC_NAME("fstatat" #suffix); \
  int perseus_stat##suffix(const char* path, void* out) {                                                   \
    return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, 0));                               \
  }                                                                                                         \
  int perseus_lstat##suffix(const char* path, void* out) {                                                  \
    return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW));             \
  }                                                                                                         \
  int perseus_fstat##suffix(int fd, void* out) { return static_cast<int>(syscall(SYS_fstat, fd, out)); }    \
  int perseus_fstatat##suffix(int fd, const char* path, void* out, int flags) {                             \
    return static_cast<int>(syscall(SYS_newfstatat, fd, path, out, flags));                                 \
  }
STAT_FAMILY()
STAT_FAMILY(64)

// 2.36: where std::random_device of a new libstdc++ gets its bits. Cannot fail, so a kernel without getrandom aborts.
uint32_t perseus_arc4random() LIBC_NAME("arc4random");
uint32_t perseus_arc4random() {
  uint32_t value;
  while (getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value))
    if (errno != EINTR) __builtin_trap();
  return value;
}

// 2.30: what std::condition_variable and the timed mutexes call for steady_clock deadlines. libc's own where it exists,
// else the deadline moved to the real-time clock: a clock that is set meanwhile then shifts this one wait.
static timespec on_realtime_clock(clockid_t clock, const timespec* deadline) {
  timespec there, here;
  clock_gettime(clock, &there);
  clock_gettime(CLOCK_REALTIME, &here);
  constexpr int64_t kSecond = 1'000'000'000;
  const int64_t left = (deadline->tv_sec - there.tv_sec) * kSecond + deadline->tv_nsec - there.tv_nsec;
  const int64_t until = here.tv_sec * kSecond + here.tv_nsec + left;
  timespec moved;
  moved.tv_sec = until / kSecond;
  moved.tv_nsec = until % kSecond;
  return moved;
}

int perseus_cond_clockwait(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock, const timespec* deadline)
    LIBC_NAME("pthread_cond_clockwait");
int perseus_cond_clockwait(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock, const timespec* deadline) {
  using Call = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const Call libc = reinterpret_cast<Call>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (libc != nullptr) return libc(cond, mutex, clock, deadline);
  const timespec moved = on_realtime_clock(clock, deadline);
  return pthread_cond_timedwait(cond, mutex, &moved);
}

#define CLOCK_LOCK(lock_type, name, timed)                                                         \
  int perseus_##name(lock_type* lock, clockid_t clock, const timespec* deadline) LIBC_NAME(#name); \
  int perseus_##name(lock_type* lock, clockid_t clock, const timespec* deadline) {                 \
    using Call = int (*)(lock_type*, clockid_t, const timespec*);                                  \
    static const Call libc = reinterpret_cast<Call>(dlsym(RTLD_DEFAULT, #name));                   \
    if (libc != nullptr) return libc(lock, clock, deadline);                                       \
    const timespec moved = on_realtime_clock(clock, deadline);                                     \
    return timed(lock, &moved);                                                                    \
  }
CLOCK_LOCK(pthread_mutex_t, pthread_mutex_clocklock, pthread_mutex_timedlock)

// 2.35: how libgcc's unwinder finds an object's frames. Same answer, from the list that older glibc has.
struct PerseusFoundObject {  // laid out as struct dl_find_object of x86-64 and aarch64
  unsigned long long flags;
  void* map_start;
  void* map_end;
  link_map* map;
  void* eh_frame;
  unsigned long long reserved[7];
};

struct PerseusSearch {
  uintptr_t address;
  PerseusFoundObject* result;
};

static int look_for_address(dl_phdr_info* info, size_t, void* argument) {
  auto* search = static_cast<PerseusSearch*>(argument);
  uintptr_t low = UINTPTR_MAX, high = 0, frames = 0;
  bool inside = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_GNU_EH_FRAME) frames = start;
    if (header.p_type != PT_LOAD) continue;
    if (start < low) low = start;
    if (start + header.p_memsz > high) high = start + header.p_memsz;
    inside = inside || (search->address >= start && search->address < start + header.p_memsz);
  }
  if (!inside || frames == 0) return 0;
  *search->result = PerseusFoundObject{};
  search->result->map_start = reinterpret_cast<void*>(low);
  search->result->map_end = reinterpret_cast<void*>(high);
  search->result->eh_frame = reinterpret_cast<void*>(frames);
  return 1;
}

int perseus_dl_find_object(void* address, PerseusFoundObject* result) LIBC_NAME("_dl_find_object");
int perseus_dl_find_object(void* address, PerseusFoundObject* result) {
  PerseusSearch search{reinterpret_cast<uintptr_t>(address), result};
  return dl_iterate_phdr(look_for_address, &search) == 1 ? 0 : -1;
}

}  // extern "C"
