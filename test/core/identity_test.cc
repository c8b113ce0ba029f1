// Who am I, as every launcher says it.
#include "bootstrap/identity.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "base/error.h"
#include "bootstrap/bootstrap.h"

namespace perseus {
namespace {

using Variables = std::map<std::string, std::string>;

const Variables kPerseusrun{{"PERSEUS_RANK", "5"},       {"PERSEUS_SIZE", "6"},       {"PERSEUS_LOCAL_RANK", "1"},
                            {"PERSEUS_LOCAL_SIZE", "2"}, {"PERSEUS_CROSS_RANK", "2"}, {"PERSEUS_CROSS_SIZE", "3"}};
const Variables kHorovod{{"HOROVOD_RANK", "5"},       {"HOROVOD_SIZE", "6"},       {"HOROVOD_LOCAL_RANK", "1"},
                         {"HOROVOD_LOCAL_SIZE", "2"}, {"HOROVOD_CROSS_RANK", "2"}, {"HOROVOD_CROSS_SIZE", "3"}};
const Variables kTorch{{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}};
const Variables kTorchrun{{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "8"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kHydra{{"PMI_RANK", "6"}, {"PMI_SIZE", "7"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}};
const Variables kBatch{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "77"}};
const Variables kSrun{{"SLURM_PROCID", "4"},         {"SLURM_STEP_ID", "1"},
                      {"SLURM_STEP_NUM_TASKS", "7"}, {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                      {"SLURM_LOCALID", "0"},        {"SLURM_NODEID", "2"}};

// Those of the first win.
Variables joined(Variables first, const Variables& second) {
  first.insert(second.begin(), second.end());
  return first;
}

Environment environment_of(Variables variables) {
  return [variables = std::move(variables)](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::string() : found->second;
  };
}

void expect_identity(const Variables& variables, const Identity& expected) {
  const Identity found = identify(environment_of(variables));
  EXPECT_EQ(found.rank, expected.rank);
  EXPECT_EQ(found.size, expected.size);
  EXPECT_EQ(found.local_rank, expected.local_rank);
  EXPECT_EQ(found.local_size, expected.local_size);
  EXPECT_EQ(found.cross_rank, expected.cross_rank);
  EXPECT_EQ(found.cross_size, expected.cross_size);
  EXPECT_EQ(found.launcher, expected.launcher);
}

std::string error_of(const Variables& variables) {
  try {
    identify(environment_of(variables));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

TEST(Identity, IsWhatTheLauncherSays) {
  expect_identity({}, {0, 1, 0, 1, 0, 1, Launcher::kSingle});
  expect_identity(kPerseusrun, {5, 6, 1, 2, 2, 3, Launcher::kPerseusrun});
  expect_identity(kHorovod, {5, 6, 1, 2, 2, 3, Launcher::kPerseusrun});
  expect_identity(kTorch, {3, 4, 0, 0, 0, 0, Launcher::kTorch});
  expect_identity(joined(kTorch, {{"LOCAL_RANK", "1"}}), {3, 4, 0, 0, 0, 0, Launcher::kTorch});
  expect_identity(kTorchrun, {3, 4, 1, 2, 0, 0, Launcher::kTorch});
  expect_identity(kOpenMpi, {2, 8, 2, 4, 0, 0, Launcher::kOpenMpi});
  expect_identity(kHydra, {6, 7, 2, 3, 0, 0, Launcher::kMpich});
  expect_identity(kSrun, {4, 7, 0, 2, 2, 4, Launcher::kSlurm});
  expect_identity(joined({{"SLURM_PROCID", "5"}, {"SLURM_LOCALID", "1"}}, kSrun), {5, 7, 1, 2, 2, 3, Launcher::kSlurm});
}

TEST(Identity, NumbersMayHaveZerosAndCountsSpacesInFront) {
  const Variables zeros{{"PERSEUS_RANK", "00000000000000000005"}, {"PERSEUS_SIZE", "06"}, {"PERSEUS_LOCAL_RANK", "01"}};
  expect_identity(joined(zeros, kPerseusrun), {5, 6, 1, 2, 2, 3, Launcher::kPerseusrun});
  expect_identity(joined({{"SLURM_STEP_TASKS_PER_NODE", "2(x3), 1 "}}, kSrun), {4, 7, 0, 2, 2, 4, Launcher::kSlurm});
}

TEST(Identity, EveryLauncherHasAName) {
  const auto name = [](const Variables& variables) {
    return std::string(launcher_name(identify(environment_of(variables)).launcher));
  };
  EXPECT_EQ(name({}), "single");
  EXPECT_EQ(name(kPerseusrun), "perseusrun");
  EXPECT_EQ(name(kTorch), "torch");
  EXPECT_EQ(name(kOpenMpi), "openmpi");
  EXPECT_EQ(name(kHydra), "mpich");
  EXPECT_EQ(name(kSrun), "slurm");
}

TEST(Identity, SlurmsBatchScriptIsASingleProcess) { expect_identity(kBatch, Identity{}); }

TEST(Identity, SrunWithoutCountsLeavesHostsToTheContext) {
  expect_identity(joined({{"SLURM_STEP_TASKS_PER_NODE", ""}}, kSrun), {4, 7, 0, 0, 0, 0, Launcher::kSlurm});
}

TEST(Identity, IsTheInnermostLaunchers) {
  const auto launcher = [](const Variables& variables) { return identify(environment_of(variables)).launcher; };
  EXPECT_EQ(launcher(joined(kSrun, kOpenMpi)), Launcher::kOpenMpi);
  EXPECT_EQ(launcher(joined(kSrun, kHydra)), Launcher::kMpich);
  EXPECT_EQ(launcher(joined(kSrun, {{"PMI_RANK", "4"}, {"PMI_SIZE", "7"}})), Launcher::kSlurm);  // srun --mpi=pmi2
  EXPECT_EQ(launcher(joined(kOpenMpi, kTorchrun)), Launcher::kTorch);
  EXPECT_EQ(launcher(joined(joined(kTorchrun, kHorovod), kOpenMpi)), Launcher::kPerseusrun);
  EXPECT_EQ(identify(environment_of(joined({{"PERSEUS_RANK", "0"}, {"PERSEUS_SIZE", "2"}}, kHorovod))).size, 2);
}

TEST(Identity, TorchrunInsideARankOfPerseusrunIsToldWhoseVariablesRemain) {
  const auto expect = [](const Variables& outer, const std::string& part) {
    const std::string message = error_of(joined(joined(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"}}), outer));
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find("torchrun has started this process as rank 3 of 4 (RANK, WORLD_SIZE): start the script"),
              std::string::npos)
        << message;
  };
  expect(kPerseusrun, "[identity] PERSEUS_RANK=5 and PERSEUS_SIZE=6 belong to an outer job of perseusrun, inside");
  expect(kHorovod, "[identity] HOROVOD_RANK=5 and HOROVOD_SIZE=6 belong to an outer job of perseusrun, inside");
}

TEST(Identity, TorchsVariablesThatAgreeWithPerseusrunsAreNoConflict) {
  const Variables agreeing{{"RANK", "5"}, {"WORLD_SIZE", "6"}, {"TORCHELASTIC_RUN_ID", "none"}};
  EXPECT_EQ(identify(environment_of(joined(agreeing, kPerseusrun))).launcher, Launcher::kPerseusrun);
  // Those of a script that uses torch.distributed on its own.
  EXPECT_EQ(identify(environment_of(joined({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, kPerseusrun))).rank, 5);
}

TEST(Identity, LoneVariableOfSomethingElseMeansNothing) {
  expect_identity({{"RANK", "private"}, {"PMI_SIZE", "3"}, {"WORLD_SIZE", ""}}, Identity{});
}

TEST(Identity, ValueThatDoesNotFitIsNamed) {
  const auto expect = [](const Variables& changed, const Variables& others, const std::string& part) {
    const std::string message = error_of(joined(changed, others));
    EXPECT_EQ(message.find("[identity] "), 0U) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message << " has no " << part;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  };
  expect({{"PERSEUS_RANK", "6"}}, kPerseusrun, "PERSEUS_RANK='6': expected 0..5 (PERSEUS_SIZE=6)");
  expect({{"PERSEUS_SIZE", "six"}}, kPerseusrun, "PERSEUS_SIZE='six': expected a whole number, 1 or more");
  expect({{"PERSEUS_SIZE", "0"}}, kPerseusrun, "PERSEUS_SIZE='0': expected a whole number, 1 or more");
  expect({{"PERSEUS_SIZE", "1000001"}}, kPerseusrun, "PERSEUS_SIZE='1000001': expected at most 1000000 ranks");
  expect({{"PERSEUS_SIZE", "99999999999999999999"}}, kPerseusrun,
         "PERSEUS_SIZE='99999999999999999999': expected at most 1000000 ranks");
  expect({{"PERSEUS_RANK", "99999999999999999999"}}, kPerseusrun,
         "PERSEUS_RANK='99999999999999999999': expected 0..5 (PERSEUS_SIZE=6)");
  expect({{"PERSEUS_LOCAL_SIZE", "99999999999999999999"}}, kPerseusrun, "expected at most the world's 6 ranks");
  expect({{"PERSEUS_LOCAL_RANK", "2"}}, kPerseusrun, "PERSEUS_LOCAL_RANK='2': expected 0..1");
  expect({{"PERSEUS_LOCAL_SIZE", "9"}}, kPerseusrun, "PERSEUS_LOCAL_SIZE='9': expected at most the world's 6 ranks");
  expect({{"PERSEUS_RANK", "1"}}, {}, "PERSEUS_RANK='1' without PERSEUS_SIZE: set both");
  expect({{"HOROVOD_SIZE", "2"}}, {}, "HOROVOD_SIZE='2' without HOROVOD_RANK: set both");
  expect({{"RANK", "-1"}}, kTorch, "RANK='-1': expected a whole number, 0 or more");
  expect({{"WORLD_SIZE", "1"}}, kTorch, "RANK='3': expected 0..0 (WORLD_SIZE=1)");
  expect({{"OMPI_COMM_WORLD_LOCAL_RANK", "x"}}, kOpenMpi, "OMPI_COMM_WORLD_LOCAL_RANK='x'");
  for (const char* tasks : {"2,x", "2(x4)", "2(x", "2(xx)", "2)", "(x3)", "2(x3),1,99999999(x99999999)", "-2,9"})
    expect({{"SLURM_STEP_TASKS_PER_NODE", tasks}}, kSrun, "SLURM_STEP_TASKS_PER_NODE='" + std::string(tasks) + "'");
  expect({{"SLURM_NODEID", "4"}}, kSrun, "SLURM_NODEID=4");
}

TEST(Identity, FirstHostOfSlurmsListIsFound) {
  EXPECT_EQ(first_host("a"), "a");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("a[01-03,7]-x,b"), "a01-x");
  EXPECT_EQ(first_host("rack[2,4]node[3-5]"), "rack2node3");
  EXPECT_EQ(first_host("b,a[1-2]"), "b");
}

}  // namespace
}  // namespace perseus
