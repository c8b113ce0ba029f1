// How ranks find their store through what launched them: perseusrun's variables, known places, and a PMI that this
// test plays.
#include "bootstrap/bootstrap.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "played_pmi.h"

namespace perseus {
namespace {

using perseus_test::PlayedPmi;
using perseus_test::Variables;

constexpr const char* kSecret = "0123456789abcdef0123456789abcdef";

Environment environment_of(Variables variables) {
  return [variables = std::move(variables)](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::string() : found->second;
  };
}

Rendezvous bootstrap_with(const Variables& variables, const std::vector<std::string>& overrides = {}) {
  const Environment environment = environment_of(variables);
  return bootstrap(identify(environment), environment, Config(overrides));
}

// The message, which has to be one line.
std::string error_of(ErrorKind kind, const Variables& variables, const std::vector<std::string>& overrides = {}) {
  try {
    bootstrap_with(variables, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "no error";
}

void expect_error(ErrorKind kind, const Variables& variables, const std::string& part,
                  const std::vector<std::string>& overrides = {}) {
  const std::string message = error_of(kind, variables, overrides);
  EXPECT_NE(message.find(part), std::string::npos) << message << " has no " << part;
}

class SecretFile {
 public:
  SecretFile(const std::string& text, mode_t mode) : path_(testing::TempDir() + "perseus-secret-XXXXXX") {
    ::close(::mkstemp(path_.data()));
    std::ofstream(path_) << text;
    ::chmod(path_.c_str(), mode);
  }
  ~SecretFile() { ::unlink(path_.c_str()); }
  std::string override() const { return "PERSEUS_SECRET_FILE=" + path_; }

 private:
  std::string path_;
};

const Variables kRanks{{"PERSEUS_RANK", "1"}, {"PERSEUS_SIZE", "2"}};
const Variables kPlaced{{"PERSEUS_RANK", "1"},
                        {"PERSEUS_SIZE", "2"},
                        {"PERSEUS_RENDEZVOUS_ADDR", "10.0.0.5"},
                        {"PERSEUS_RENDEZVOUS_PORT", "6667"}};

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

TEST(Bootstrap, PerseusrunSaysWhereTheStoreIs) {
  const Rendezvous found = bootstrap_with(with(kPlaced, "PERSEUS_SECRET", kSecret));
  EXPECT_EQ(found.host, "10.0.0.5");
  EXPECT_EQ(found.port, 6667);
  EXPECT_EQ(found.secret, kSecret);
  EXPECT_EQ(found.server, nullptr);
}

TEST(Bootstrap, PerseusrunsSecretMayBeInAFile) {
  const SecretFile file(std::string(kSecret) + " \n", 0600);
  EXPECT_EQ(bootstrap_with(kPlaced, {file.override()}).secret, kSecret);
  const Variables both = with(kPlaced, "PERSEUS_SECRET", "perseusrun's own secret");
  EXPECT_EQ(bootstrap_with(both, {file.override()}).secret, "perseusrun's own secret");
}

TEST(Bootstrap, SecretThatOthersMayReadOrThatIsShortIsRefused) {
  const auto refused = [](const SecretFile& file, const std::string& part) {
    expect_error(ErrorKind::kInvalidArgument, kPlaced, part, {file.override()});
  };
  refused(SecretFile(kSecret, 0640), "others may read it; chmod 600 it");
  refused(SecretFile("too short\n", 0600), "9 bytes are too few, expected at least 16");
  expect_error(ErrorKind::kInvalidArgument, kPlaced, "PERSEUS_SECRET_FILE='/no/such/file': No such file",
               {"PERSEUS_SECRET_FILE=/no/such/file"});
  expect_error(ErrorKind::kInvalidArgument, kPlaced, "PERSEUS_SECRET_FILE='/tmp': Is a directory",
               {"PERSEUS_SECRET_FILE=/tmp"});
}

TEST(Bootstrap, ASecretMayComeThroughAPipe) {
  const std::string path = testing::TempDir() + "perseus-pipe-" + std::to_string(::getpid());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  std::thread writer([&path] { std::ofstream(path) << kSecret << '\n'; });
  EXPECT_EQ(bootstrap_with(kPlaced, {"PERSEUS_SECRET_FILE=" + path}).secret, kSecret);
  writer.join();
  expect_error(ErrorKind::kInvalidArgument, kPlaced, "a pipe whose end did not come within 1 s (HOROVOD_START_TIMEOUT)",
               {"PERSEUS_SECRET_FILE=" + path, "HOROVOD_START_TIMEOUT=1"});
  ::unlink(path.c_str());
}

TEST(Bootstrap, WhatPerseusrunLeftOutIsNamed) {
  expect_error(ErrorKind::kInvalidArgument, kRanks,
               "PERSEUS_RENDEZVOUS_ADDR and _PORT not set for rank 1 of 2: start the ranks with perseusrun");
  expect_error(ErrorKind::kInvalidArgument, kPlaced, "PERSEUS_SECRET not set for rank 1 of 2");
  expect_error(ErrorKind::kInvalidArgument, with(kPlaced, "PERSEUS_RENDEZVOUS_PORT", "65536"),
               "PERSEUS_RENDEZVOUS_PORT='65536': expected a whole number 0..65535");
}

TEST(Bootstrap, WorldOfOneNeedsNoStore) {
  EXPECT_EQ(bootstrap_with({}).port, 0);
  EXPECT_EQ(bootstrap_with({{"PERSEUS_RANK", "0"}, {"PERSEUS_SIZE", "1"}}).port, 0);
  EXPECT_EQ(bootstrap_with({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"PMI_FD", "9"}}).port, 0);
}

TEST(Bootstrap, UnknownLauncherIsNoWorldOfOne) {
  expect_error(ErrorKind::kInvalidArgument, {{"PMIX_RANK", "3"}}, "PMIX_RANK='3' comes from a launcher");
  expect_error(ErrorKind::kInvalidArgument, {{"PMI_PORT", "h:1"}}, "start the job with perseusrun");
}

TEST(Bootstrap, ProcessOfAnElasticJobIsNoWorldOfOne) {
  const Variables elastic{{"HOROVOD_ELASTIC", "1"}, {"HOROVOD_LOCAL_RANK", "1"}};
  const Variables mpirun{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}, {"HOROVOD_ELASTIC", "1"}};
  for (const Variables& variables : {elastic, mpirun}) {  // mpirun: of the elastic perseusrun itself
    expect_error(ErrorKind::kInvalidArgument, variables, "only ranks of PyTorch, TensorFlow, Keras or MXNet");
    expect_error(ErrorKind::kInvalidArgument, variables, "perseusrun -np N without --min-np");
  }
  EXPECT_EQ(bootstrap_with(with(elastic, "HOROVOD_ELASTIC", "0")).port, 0);
  // A rank that has its place in a world, which may have no other rank.
  EXPECT_EQ(bootstrap_with(with(with(elastic, "PERSEUS_RANK", "0"), "PERSEUS_SIZE", "1")).port, 0);
}

TEST(Bootstrap, KnownPlacesNeedASecret) {
  const Variables torch{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "host7"}};
  expect_error(ErrorKind::kInvalidArgument, torch, "need a shared secret: name a file in PERSEUS_SECRET_FILE");
  expect_error(ErrorKind::kInvalidArgument, {{"RANK", "1"}, {"WORLD_SIZE", "2"}}, "give rank 0's host in MASTER_ADDR");
  const Rendezvous found = bootstrap_with(with(torch, "PERSEUS_SECRET", kSecret), {"PERSEUS_MASTER_PORT=7001"});
  EXPECT_EQ(found.host, "host7");
  EXPECT_EQ(found.port, 7001);
  const Variables srun{{"SLURM_PROCID", "1"},
                       {"SLURM_STEP_ID", "2"},
                       {"SLURM_STEP_NUM_TASKS", "2"},
                       {"SLURM_JOB_ID", "1000"},
                       {"SLURM_STEP_NODELIST", "n[7-8]"}};
  expect_error(ErrorKind::kInvalidArgument, srun, "PERSEUS_SECRET_FILE, or use srun --mpi=pmi2");
  const Rendezvous step = bootstrap_with(with(srun, "PERSEUS_SECRET", kSecret));
  EXPECT_EQ(step.host, "n7");
  EXPECT_EQ(step.port, 6666 + (1000 * 37 + 2 * 7) % 10'000);
}

TEST(Bootstrap, RanksWhoseMasterIsAnyLoopbackAddressMeet) {
  // Below the ports that systems give away, and another one for each process that runs this.
  const std::vector<std::string> overrides{"PERSEUS_MASTER_PORT=" + std::to_string(20'000 + getpid() % 10'000)};
  for (const char* master : {"::1", "127.0.1.1", "localhost"}) {
    const Variables torch{{"WORLD_SIZE", "2"}, {"MASTER_ADDR", master}, {"PERSEUS_SECRET", kSecret}};
    const Rendezvous first = bootstrap_with(with(torch, "RANK", "0"), overrides);
    const Rendezvous other = bootstrap_with(with(torch, "RANK", "1"), overrides);
    connect_store(other.host, other.port, other.secret, now_ns() + 30 * kSecond)
        ->set("key", "value", now_ns() + 30 * kSecond);
  }
}

// ---- through a PMI that the test plays ----

std::vector<Rendezvous> bootstrap_all(const std::vector<Variables>& ranks, const std::vector<std::string>& overrides) {
  std::vector<Rendezvous> found(ranks.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        found[rank] = bootstrap_with(ranks[rank], overrides);
      } catch (const Error& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return found;
}

// All ranks have the store that rank 0 serves.
void expect_one_store(const std::vector<Rendezvous>& found) {
  ASSERT_NE(found[0].server, nullptr);
  EXPECT_EQ(found[0].server->port(), found[0].port);
  for (const Rendezvous& each : found) {
    EXPECT_EQ(each.host, found[0].host);
    EXPECT_EQ(each.port, found[0].port);
    EXPECT_EQ(each.secret, found[0].secret);
  }
  connect_store(found[1].host, found[1].port, found[1].secret, now_ns() + 30 * kSecond)
      ->set("key", "value", now_ns() + 30 * kSecond);
}

TEST(BootstrapByPmi, RanksOfOneHostMeetOnLoopback) {
  PlayedPmi pmi(3);
  const std::vector<Rendezvous> found =
      bootstrap_all({pmi.variables(0), pmi.variables(1), pmi.variables(2)}, {"PERSEUS_MASTER_PORT=20100"});
  expect_one_store(found);
  EXPECT_EQ(found[0].host, "127.0.0.1");
  EXPECT_EQ(found[0].secret.size(), 64U);  // 32 random bytes in hexadecimal
  EXPECT_EQ(pmi.finished(), 3);
}

TEST(BootstrapByPmi, RanksThatMayBeElsewhereMeetAtTheNamedInterface) {
  PlayedPmi pmi(2);
  std::vector<Variables> ranks{pmi.variables(0), pmi.variables(1)};
  for (Variables& variables : ranks) variables["MPI_LOCALNRANKS"] = "";
  const std::vector<Rendezvous> found =
      bootstrap_all(ranks, {"PERSEUS_MASTER_PORT=20200", "PERSEUS_GLOO_NETWORK_INTERFACE=lo"});
  expect_one_store(found);
  EXPECT_EQ(found[1].host, "127.0.0.1");
}

TEST(BootstrapByPmi, SrunWithASpaceNeedsNoSecret) {
  PlayedPmi pmi(2);
  std::vector<Variables> ranks;
  for (const char* rank : {"0", "1"})
    ranks.push_back({{"SLURM_PROCID", rank},
                     {"SLURM_STEP_ID", "2"},
                     {"SLURM_STEP_NUM_TASKS", "2"},
                     {"PMI_RANK", rank},
                     {"PMI_SIZE", "2"},
                     {"PMI_FD", std::to_string(pmi.theirs(rank[0] - '0'))}});
  expect_one_store(bootstrap_all(ranks, {"PERSEUS_MASTER_PORT=20300"}));
}

TEST(BootstrapByPmi, RankThatStaysAwayIsATimeout) {
  PlayedPmi pmi(2);
  expect_error(ErrorKind::kTimeout, pmi.variables(0), "some rank did not arrive within 1 s (HOROVOD_START_TIMEOUT)",
               {"PERSEUS_MASTER_PORT=20400", "HOROVOD_START_TIMEOUT=1"});
  ::close(pmi.theirs(0));
  ::close(pmi.theirs(1));
}

TEST(BootstrapByPmi, SignalsDoNotStopTheClock) {
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {};
  ::sigaction(SIGUSR1, &action, &before);
  PlayedPmi pmi(2);
  std::atomic<bool> over{false};
  std::thread timer([&over, rank = ::pthread_self()] {
    for (int i = 0; i < 1000 && !over; ++i) {
      ::pthread_kill(rank, SIGUSR1);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  const int64_t begin = now_ns();
  expect_error(ErrorKind::kTimeout, pmi.variables(1), "some rank did not arrive within 1 s",
               {"HOROVOD_START_TIMEOUT=1"});
  EXPECT_LT(now_ns() - begin, 10 * kSecond);
  over = true;
  timer.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  ::close(pmi.theirs(0));
  ::close(pmi.theirs(1));
}

TEST(BootstrapByPmi, LauncherThatEndsIsNoticed) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ::shutdown(ends[0], SHUT_WR);
  const Variables variables{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_FD", std::to_string(ends[1])}};
  expect_error(ErrorKind::kIo, variables, "mpirun's PMI: closed the connection; start the job with perseusrun");
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(BootstrapByPmi, AnswerThatIsARefusalIsShown) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const std::string refusal = "cmd=response_to_init rc=-1 pmi_version=2\n";
  ASSERT_EQ(::send(ends[0], refusal.data(), refusal.size(), 0), static_cast<ssize_t>(refusal.size()));
  const Variables variables{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_FD", std::to_string(ends[1])}};
  expect_error(ErrorKind::kIo, variables, "'cmd=response_to_init rc=-1 pmi_version=2' answers 'cmd=init");
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(BootstrapByPmi, DescriptorThatIsNotTheresIsNamed) {
  const Variables ranks{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
  expect_error(ErrorKind::kInvalidArgument, ranks, "this mpirun has not set PMI_FD, through which its ranks bootstrap");
  expect_error(ErrorKind::kInvalidArgument, with(ranks, "PMI_FD", "nine"), "PMI_FD='nine': expected a whole number");
  expect_error(ErrorKind::kIo, with(ranks, "PMI_FD", "99999"), "PMI_FD='99999' is not open here");
  const int file = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  expect_error(ErrorKind::kIo, with(ranks, "PMI_FD", std::to_string(file)), "is not open here (Socket operation on");
  ::close(file);
}

TEST(BootstrapByPmi, WhatKeepsRankZeroFromStartingIsToldToAll) {
  PlayedPmi pmi(2, 256);
  std::thread other([&pmi] {
    expect_error(ErrorKind::kIo, pmi.variables(1),
                 "rank 0 could not start: [rendezvous] PERSEUS_SECRET: 9 bytes are too few");
  });
  expect_error(ErrorKind::kInvalidArgument, with(pmi.variables(0), "PERSEUS_SECRET", "too short"),
               "PERSEUS_SECRET: 9 bytes are too few", {"PERSEUS_MASTER_PORT=20500"});
  other.join();
  EXPECT_EQ(pmi.finished(), 1);  // rank 1's launcher sees it fail
}

std::string hex_of(const std::string& text) {
  std::string hex;
  for (const char c : text) {
    constexpr const char* kDigits = "0123456789abcdef";
    hex += {kDigits[static_cast<unsigned char>(c) >> 4], kDigits[static_cast<unsigned char>(c) & 15]};
  }
  return hex;
}

TEST(BootstrapByPmi, SecretThatWasGivenIsNeverTold) {
  // Longer than what the launcher takes: it has nothing to do with it.
  const std::string secret = kSecret + std::string(600, 's');
  PlayedPmi pmi(3);
  std::vector<Variables> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(with(pmi.variables(rank), "PERSEUS_SECRET", secret));
  const std::vector<Rendezvous> found = bootstrap_all(ranks, {"PERSEUS_MASTER_PORT=20600"});
  expect_one_store(found);
  EXPECT_EQ(found[2].secret, secret);
  const std::string told = pmi.told();
  EXPECT_NE(told.find(hex_of("store at 127.0.0.1 ")), std::string::npos) << told;
  EXPECT_EQ(told.find(hex_of(kSecret)), std::string::npos) << told;
  EXPECT_EQ(told.find(kSecret), std::string::npos) << told;
}

TEST(BootstrapByPmi, RankWithAnotherSecretOrNoneIsNamed) {
  const std::string another = std::string(kSecret) + "!";
  int port = 20700;
  for (const auto& [first, second, message] : std::vector<std::array<std::string, 3>>{
           {kSecret, another, "rank 1 has another secret than rank 0: give all ranks the same"},
           {kSecret, "", "rank 1 was given no secret, but rank 0 was: give all ranks the same"},
           {"", kSecret, "rank 1 was given a secret, but rank 0 was not: give all ranks the same"}}) {
    PlayedPmi pmi(2);
    port += 10;
    const std::vector<std::string> overrides{"PERSEUS_MASTER_PORT=" + std::to_string(port)};
    std::thread other([&, second = second, message = message] {
      expect_error(ErrorKind::kInvalidArgument, with(pmi.variables(1), "PERSEUS_SECRET", second), message, overrides);
    });
    const Rendezvous found = bootstrap_with(with(pmi.variables(0), "PERSEUS_SECRET", first), overrides);
    other.join();
    EXPECT_NE(found.server, nullptr);
    EXPECT_EQ(pmi.finished(), 1);  // for the refusing rank's sake the launcher ends the other
  }
}

TEST(BootstrapByPmix, LauncherWithoutItIsNamed) {
  const Variables ranks{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  expect_error(ErrorKind::kInvalidArgument, ranks,
               "this launcher has not set PMIX_RANK, through which its ranks bootstrap; start the job");
}

}  // namespace
}  // namespace perseus
