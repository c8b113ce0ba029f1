// One way to agree on a store for each launcher.
#include "bootstrap/bootstrap.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/clock.h"
#include "base/error.h"
#include "bootstrap/launcher_space.h"
#include "net/addresses.h"
#include "net/auth.h"
#include "net/interfaces.h"
#include "net/poller.h"

namespace perseus {
namespace {

constexpr const char* kLoopback = "127.0.0.1";
constexpr const char* kFarAway = "192.0.2.1";  // belongs to nobody (RFC 5737)
// What rank 0 announces: "store at HOST PORT made SECRET" or "store at HOST PORT given NONCE CHECK", else the error
// that keeps it from starting. A secret that the user gave is never told; perseus/run/bootstrap/announcement.py does
// the same.
constexpr const char* kStoreAt = "store at ";
constexpr const char *kMade = "made", *kGiven = "given";
constexpr const char* kAnnounced = "perseus announced store";
constexpr const char* kSameSecret = ": give all ranks the same PERSEUS_SECRET_FILE (or PERSEUS_SECRET), or none";
constexpr int64_t kSlurmPorts = 10'000;  // jobs that share a node get ports of their own out of this many
constexpr size_t kShortestSecret = 16, kSecretBytes = 32, kNonceBytes = 16;

std::string to_hex(const std::string& bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    text.push_back(kDigits[static_cast<unsigned char>(c) >> 4]);
    text.push_back(kDigits[static_cast<unsigned char>(c) & 15]);
  }
  return text;
}

std::string from_hex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<char>(std::strtol(text.substr(i, 2).c_str(), nullptr, 16)));
  return bytes;
}

std::string first_set(const Environment& environment, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (std::string value = environment(name); !value.empty()) return value;
  return "";
}

std::string without_spaces(std::string text) {
  constexpr const char* kSpaces = " \t\r\n\v\f";
  text.erase(0, text.find_first_not_of(kSpaces));
  text.erase(text.find_last_not_of(kSpaces) + 1);
  return text;
}

// It may be a pipe: opening it waits for nobody, and reading it no longer than a start may take.
std::string secret_of_file(const std::string& path, int64_t limit_s) {
  const auto refuse = [&path](const std::string& why) {
    fail(ErrorKind::kInvalidArgument, "[rendezvous] PERSEUS_SECRET_FILE='" + path + "': " + why);
  };
  const Socket file([&path] { return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC); });
  struct stat status{};
  if (!file || ::fstat(file.fd(), &status) != 0) refuse(std::strerror(errno));
  if (S_ISDIR(status.st_mode)) refuse(std::strerror(EISDIR));
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) refuse("others may read it; chmod 600 it");
  const int64_t deadline = now_ns() + limit_s * kSecond;
  std::string text;
  for (char data[4096];;) {
    if (wait_for(file.fd(), POLLIN, deadline, {}) == Wait::kTimeout)
      refuse("a pipe whose end did not come within " + std::to_string(limit_s) +
             " s (HOROVOD_START_TIMEOUT): let what writes the secret close it, or name a file");
    const ssize_t n = ::read(file.fd(), data, sizeof data);
    if (n == 0) return without_spaces(std::move(text));
    if (n > 0) text.append(data, static_cast<size_t>(n));
    else if (errno != EAGAIN && errno != EINTR) refuse(std::strerror(errno));
  }
}

bool gives_secret(const Environment& environment, const Config& config) {
  return config.is_set(Var::kSecretFile) || !environment("PERSEUS_SECRET").empty();
}

// That of PERSEUS_SECRET_FILE, else of PERSEUS_SECRET, else "". Once in a bootstrap: a pipe can be read once.
std::string given_secret(const Environment& environment, const Config& config) {
  if (!gives_secret(environment, config)) return "";
  const bool in_file = config.is_set(Var::kSecretFile);
  const std::string secret = in_file ? secret_of_file(config.text(Var::kSecretFile), config.integer(Var::kStartTimeout))
                                     : environment("PERSEUS_SECRET");
  if (secret.size() < kShortestSecret)
    fail(ErrorKind::kInvalidArgument, std::string("[rendezvous] ") +
                                          (in_file ? "PERSEUS_SECRET_FILE" : "PERSEUS_SECRET") + ": " +
                                          std::to_string(secret.size()) + " bytes are too few, expected at least " +
                                          std::to_string(kShortestSecret) + "; make one with: openssl rand -hex 16");
  return secret;
}

// The one address to listen on for those who come to `host`; "" (all) where unknown.
std::string listen_address(const std::string& host) {
  std::string address;
  if (is_loopback(host)) return kLoopback;
  // Many a hosts file gives a host's own name a loopback address, which the others do not see.
  return is_own_address(host, &address) && !is_loopback(address) ? address : "";
}

Rendezvous from_perseusrun(const Identity& identity, const Environment& environment, const Config& config) {
  Rendezvous rendezvous;
  rendezvous.host = first_set(environment, {"PERSEUS_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR"});
  for (const char* name : {"HOROVOD_GLOO_RENDEZVOUS_PORT", "PERSEUS_RENDEZVOUS_PORT"})
    if (const std::string port = environment(name); !port.empty())
      rendezvous.port = static_cast<int>(whole_number("rendezvous", name, port, 0, 65535));
  // perseusrun's own secret counts, even where the user also has a file with one.
  rendezvous.secret = environment("PERSEUS_SECRET");
  if (rendezvous.secret.empty()) rendezvous.secret = given_secret(environment, config);
  const bool placed = !rendezvous.host.empty() && rendezvous.port != 0;
  if (placed && !rendezvous.secret.empty()) return rendezvous;
  if (identity.size == 1) return {};
  fail(ErrorKind::kInvalidArgument, std::string("[rendezvous] ") +
                                        (placed ? "PERSEUS_SECRET" : "PERSEUS_RENDEZVOUS_ADDR and _PORT") +
                                        " not set for rank " + std::to_string(identity.rank) + " of " +
                                        std::to_string(identity.size) + ": start the ranks with perseusrun");
}

// Where ranks cannot tell each other anything: port and secret are known beforehand.
Rendezvous at_known_place(const Identity& identity, const Environment& environment, const Config& config,
                          const std::string& host, int port, const std::string& remedy) {
  Rendezvous rendezvous{host, port, given_secret(environment, config), nullptr};
  if (rendezvous.secret.empty())
    fail(ErrorKind::kInvalidArgument, "[rendezvous] the ranks need a shared secret: " + remedy);
  if (identity.rank == 0) rendezvous.server = StoreServer::listen(listen_address(host), port, false, rendezvous.secret);
  return rendezvous;
}

Rendezvous through_torch(const Identity& identity, const Environment& environment, const Config& config) {
  const std::string host = environment("MASTER_ADDR");
  if (host.empty())
    fail(ErrorKind::kInvalidArgument,
         "[rendezvous] RANK and WORLD_SIZE are set but MASTER_ADDR is not: give rank 0's host in MASTER_ADDR");
  // Ranks that reach rank 0 by any loopback address, ::1 for example, are on its host.
  const bool local = identity.local_size == identity.size || is_loopback(host);
  return at_known_place(identity, environment, config, local ? kLoopback : host,
                        static_cast<int>(config.integer(Var::kMasterPort)),
                        "name a file in PERSEUS_SECRET_FILE (openssl rand -hex 16 > FILE; chmod 600 FILE), or start "
                        "with perseusrun");
}

Rendezvous through_slurm(const Identity& identity, const Environment& environment, const Config& config) {
  const std::string nodes = first_set(environment, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  const bool local = identity.local_size == identity.size;
  if (!local && nodes.empty())
    fail(ErrorKind::kInvalidArgument,
         "[rendezvous] SLURM_STEP_NODELIST is not set: start the ranks with srun or perseusrun");
  int64_t port = config.integer(Var::kMasterPort);
  if (!config.given(Var::kMasterPort)) {
    // Nothing to publish a port through: every rank derives the same one.
    const auto id = [&environment](std::initializer_list<const char*> names) {
      for (const char* name : names)
        if (const std::string value = environment(name); !value.empty())
          return whole_number("rendezvous", name, value, 0, int64_t{1} << 32);
      return int64_t{0};
    };
    port += (id({"SLURM_JOB_ID", "SLURM_JOBID"}) * 37 + id({"SLURM_STEP_ID"}) * 7) % kSlurmPorts;
  }
  return at_known_place(
      identity, environment, config, local ? kLoopback : first_host(nodes), static_cast<int>(port),
      "export PERSEUS_SECRET=$(openssl rand -hex 16) before srun, name a file in PERSEUS_SECRET_FILE, "
      "or use srun --mpi=pmi2");
}

// Some PMI or PMIx has started this process with others, without variables that number them: worlds of one each would
// train beside each other.
void refuse_unknown_launcher(const Environment& environment) {
  for (const char* name : {"PMIX_RANK", "PMI_FD", "PMI_PORT"})
    if (const std::string value = environment(name); !value.empty())
      fail(ErrorKind::kInvalidArgument, std::string("[rendezvous] ") + name + "='" + value +
                                            "' comes from a launcher whose other variables are not known: start the "
                                            "job with perseusrun, or with mpirun of Open MPI or MPICH");
}

// Processes of an elastic job ask perseusrun for their place in each world, which only the Python package does. Without
// a place each would be a world of one, also where perseusrun is the single task of an mpirun or srun.
void refuse_elastic_job(const Environment& environment) {
  if (environment("HOROVOD_ELASTIC") != "1") return;
  fail(ErrorKind::kInvalidArgument,
       "[rendezvous] HOROVOD_ELASTIC='1': perseusrun has started an elastic job, in which only ranks of PyTorch, "
       "TensorFlow, Keras or MXNet get a place; start this program with perseusrun -np N without --min-np and "
       "--host-discovery-script");
}

// This host's address as the others reach it: the interface's, else of the route to one, or to far away, else of any
// interface. elsewhere: are ranks known to be on other hosts, which do not reach this one's loopback?
std::string own_address(const std::string& other_host, bool elsewhere, const Config& config) {
  const InterfaceChoice choice(config);
  if (choice.names_some()) return interface_address(choice);
  const std::string here = host_name();
  for (const std::string& host : {other_host, here, std::string(kFarAway)}) {
    const std::string address = host.empty() ? "" : source_address(host);
    if (!address.empty() && !(elsewhere && is_loopback(address))) return address;
  }
  for (const InterfaceAddress& usable : usable_addresses(choice))
    if (!usable.loopback && usable.address.family() == AF_INET) return usable.address.host_text();
  return here;
}

// Of rank 0; the next free port when the first is taken.
Rendezvous serve(const std::string& host, const Environment& environment, const Config& config) {
  Rendezvous rendezvous{host, 0, given_secret(environment, config), nullptr};
  if (rendezvous.secret.empty()) rendezvous.secret = to_hex(random_bytes(kSecretBytes));
  const int port = static_cast<int>(config.integer(Var::kMasterPort));
  rendezvous.server = StoreServer::listen(listen_address(host), port, true, rendezvous.secret);
  rendezvous.port = rendezvous.server->port();
  return rendezvous;
}

// The first rank's host whose name is not this one's; "" = all have this name.
std::string other_host(LauncherSpace& space, int size) {
  const std::string here = to_hex(host_name());
  for (int rank = 1; rank < size; ++rank)
    if (const std::string host = space.get(rank, "host"); host != here) return from_hex(host);
  return "";
}

std::string announcement(const Rendezvous& rendezvous, bool given) {
  const std::string port = std::to_string(rendezvous.port);
  const std::string text = kStoreAt + rendezvous.host + " " + port + " ";
  if (!given) return text + kMade + " " + rendezvous.secret;
  const std::string nonce = to_hex(random_bytes(kNonceBytes));
  const Digest check = prove(rendezvous.secret, {kAnnounced, nonce, rendezvous.host, port});
  return text + kGiven + " " + nonce + " " + to_hex(std::string(check.begin(), check.end()));
}

// Rank 0's part of through_space: what it tells the others, who would otherwise wait for it in vain.
Rendezvous announce(LauncherSpace& space, bool local, const Identity& identity, const Environment& environment,
                    const Config& config) {
  try {
    const std::string other = local ? "" : other_host(space, identity.size);
    const bool elsewhere = !other.empty() || identity.local_size > 0;  // hosts may have one name; 0 = unknown
    Rendezvous rendezvous = serve(local ? kLoopback : own_address(other, elsewhere, config), environment, config);
    const std::string text = to_hex(announcement(rendezvous, gives_secret(environment, config)));
    if (text.size() > space.most_bytes())
      fail(ErrorKind::kInvalidArgument, "[rendezvous] this host's name '" + rendezvous.host +
                                            "' is too long for this "
                                            "launcher: name an interface in PERSEUS_GLOO_NETWORK_INTERFACE");
    space.put("store", text);
    return rendezvous;
  } catch (const Error& error) {
    try {
      space.put("store", to_hex(std::string(error.what()).substr(0, space.most_bytes() / 2)));
      space.fence();
      space.finish();
    } catch (const Error&) {
      // Ours came first.
    }
    throw;
  }
}

// What rank 0 has announced. given: the secret that the user gave to this rank, "" = none.
Rendezvous announced(const std::string& text, const std::string& given, int rank) {
  if (text.compare(0, std::strlen(kStoreAt), kStoreAt) != 0)
    fail(ErrorKind::kIo, "[rendezvous] rank 0 could not start: " + text);
  std::istringstream words(text.substr(std::strlen(kStoreAt)));
  std::string host, port, kind, secret_or_nonce, check;
  words >> host >> port >> kind >> secret_or_nonce >> check;
  Rendezvous rendezvous{host, static_cast<int>(whole_number("rendezvous", "rank 0's port", port, 1, 65535)), "",
                        nullptr};
  const auto refuse = [rank](const std::string& what) {
    fail(ErrorKind::kInvalidArgument, "[rendezvous] rank " + std::to_string(rank) + what + kSameSecret);
  };
  if (kind == kMade) {
    if (!given.empty()) refuse(" was given a secret, but rank 0 was not");
    rendezvous.secret = secret_or_nonce;
    return rendezvous;
  }
  if (given.empty()) refuse(" was given no secret, but rank 0 was");
  if (!proof_holds(from_hex(check), given, {kAnnounced, secret_or_nonce, host, port}))
    refuse(" has another secret than rank 0");
  rendezvous.secret = given;
  return rendezvous;
}

// Rank 0 tells the others where its store is.
Rendezvous through_space(LauncherSpace& space, const Identity& identity, const Environment& environment,
                         const Config& config) {
  const bool local = identity.local_size == identity.size;
  if (!local) {
    space.put("host", to_hex(host_name()));
    space.fence();
  }
  Rendezvous rendezvous;
  if (identity.rank == 0) rendezvous = announce(space, local, identity, environment, config);
  space.fence();
  // Before finish(), so that the launcher ends all ranks where one of them refuses what it reads.
  if (identity.rank != 0)
    rendezvous = announced(from_hex(space.get(0, "store")), given_secret(environment, config), identity.rank);
  space.finish();
  return rendezvous;
}

}  // namespace

std::string first_host(const std::string& nodelist) {
  const size_t open = nodelist.find('['), comma = nodelist.find(',');
  if (open == std::string::npos || comma < open) return nodelist.substr(0, comma);
  const std::string head = nodelist.substr(0, open);
  const size_t close = nodelist.find(']', open);
  const std::string inside = nodelist.substr(open + 1, close == std::string::npos ? close : close - open - 1);
  const std::string tail = close == std::string::npos ? "" : nodelist.substr(close + 1);
  // A further bracket (a[1-2]b[3-4]) belongs to the same name.
  return head + inside.substr(0, inside.find_first_of(",-")) + (tail.empty() || tail[0] == ',' ? "" : first_host(tail));
}

Rendezvous bootstrap(const Identity& identity, const Environment& environment, const Config& config) {
  if (identity.launcher == Launcher::kPerseusrun) return from_perseusrun(identity, environment, config);
  if (identity.launcher == Launcher::kSingle) refuse_unknown_launcher(environment);
  if (identity.size == 1) {
    refuse_elastic_job(environment);
    return {};
  }
  if (identity.launcher == Launcher::kTorch) return through_torch(identity, environment, config);
  const bool slurm = identity.launcher == Launcher::kSlurm;
  // srun has a space too, with the right --mpi; a secret that was given says that the ranks do without.
  const bool pmi = identity.launcher == Launcher::kMpich || (slurm && !environment("PMI_FD").empty());
  const bool pmix = identity.launcher == Launcher::kOpenMpi || (slurm && !environment("PMIX_RANK").empty());
  if (slurm && (!(pmi || pmix) || gives_secret(environment, config)))
    return through_slurm(identity, environment, config);
  const int64_t limit_s = config.integer(Var::kStartTimeout);
  const SpaceOptions options{identity, environment, now_ns() + limit_s * kSecond, limit_s};
  const bool mpi = config.choice<CpuOperations>() == CpuOperations::kMpi;
  const auto open = mpi ? open_mpi_space : pmi ? open_pmi_space : open_pmix_space;
  const std::unique_ptr<LauncherSpace> space = open(options);
  return through_space(*space, identity, environment, config);
}

}  // namespace perseus
