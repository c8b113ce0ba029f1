// How a rank of Open MPI learns from its launcher, which test/standins/pmix.cc plays, where the store is.
#include "pmix.h"

#include <gtest/gtest.h>

#include <map>

#include "base/error.h"
#include "bootstrap/bootstrap.h"

namespace perseus {
namespace {

TEST(BootstrapByPmix, WhatIsAskedLastsUntilTheAnswer) {
  std::string hex;
  for (const unsigned char c : std::string("store at 127.0.0.1 20800 made 0123456789abcdef")) {
    constexpr char kDigits[] = "0123456789abcdef";
    hex += kDigits[c >> 4];
    hex += kDigits[c & 15];
  }
  standin_pmix_tell(hex);
  const std::map<std::string, std::string> variables{{"OMPI_COMM_WORLD_RANK", "1"},
                                                     {"OMPI_COMM_WORLD_SIZE", "2"},
                                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                     {"PMIX_RANK", "1"}};
  const Environment environment = [&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? "" : found->second;
  };
  try {
    const Rendezvous found = bootstrap(identify(environment), environment, Config());
    EXPECT_EQ(found.host, "127.0.0.1");
    EXPECT_EQ(found.port, 20800);
    EXPECT_EQ(found.secret, "0123456789abcdef");
  } catch (const Error& error) {
    FAIL() << error.what();
  }
}

}  // namespace
}  // namespace perseus
