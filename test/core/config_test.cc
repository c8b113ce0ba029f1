// Variables of the environment: a wrong value ends in one line that names variable and value, and ranks that are
// configured differently are told so.
#include <cstring>
#include <sstream>

#include "operation.h"

namespace {

using namespace perseus_test;

std::vector<perseus_config_variable> variables() {
  std::vector<perseus_config_variable> all(static_cast<size_t>(perseus_config_count()));
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].struct_size = sizeof all[i];
    EXPECT_EQ(perseus_config_describe(static_cast<int>(i), &all[i]), PERSEUS_OK);
  }
  return all;
}

std::vector<std::string> names_of(const perseus_config_variable& variable) {
  std::vector<std::string> names{variable.name};
  std::stringstream aliases(variable.aliases);
  for (std::string alias; std::getline(aliases, alias, ',');) names.push_back(alias);
  return names;
}

std::vector<std::string> wrong_values(const perseus_config_variable& variable) {
  const std::string type = variable.type;
  if (type == "string") return {};
  if (type == "bool") return {"maybe", "2", "TRUE "};
  if (type == "choice") return {"none-of-these", "auto ", "auto|"};
  std::vector<std::string> values{"many", "1x", "--1", "1e99999", "99999999999999999999", "nan", " "};
  if (type == "int") values.insert(values.end(), {"1.5", "0x10"});
  const std::string allowed = variable.allowed;  // "1..12"
  const size_t dots = allowed.find("..");
  EXPECT_NE(dots, std::string::npos) << variable.name << " has no range";
  values.push_back(std::to_string(std::stoll(allowed.substr(0, dots)) - 1));
  values.push_back(std::to_string(std::stoll(allowed.substr(dots + 2)) + 1));
  return values;
}

class SetVariable {
 public:
  SetVariable(const std::string& name, const std::string& value) : name_(name) {
    setenv(name.c_str(), value.c_str(), 1);
  }
  ~SetVariable() { unsetenv(name_.c_str()); }

 private:
  const std::string name_;
};

TEST(Config, EveryVariableIsDescribed) {
  const auto all = variables();
  EXPECT_GE(all.size(), 10u);
  for (const perseus_config_variable& variable : all) {
    EXPECT_NE(std::string(variable.name), "");
    EXPECT_GT(std::strlen(variable.help), 20u) << variable.name;
    EXPECT_EQ(std::string(variable.help).back(), '.') << variable.name;
    const std::string type = variable.type;
    EXPECT_TRUE(type == "int" || type == "float" || type == "bool" || type == "string" || type == "choice") << type;
    SetVariable set(variable.name, variable.default_value);
    EXPECT_EQ(perseus_config_check(), PERSEUS_OK) << "the default is refused: " << perseus_error_message();
  }
  perseus_config_variable variable{};
  EXPECT_EQ(perseus_config_describe(-1, &variable), PERSEUS_INVALID_ARGUMENT);
  EXPECT_EQ(perseus_config_describe(perseus_config_count(), &variable), PERSEUS_INVALID_ARGUMENT);
}

TEST(Config, AWrongValueOfAnyVariableIsOneLineThatNamesBoth) {
  for (const perseus_config_variable& variable : variables())
    for (const std::string& name : names_of(variable))
      for (const std::string& value : wrong_values(variable)) {
        SetVariable set(name, value);
        EXPECT_EQ(perseus_config_check(), PERSEUS_INVALID_ARGUMENT) << name << "='" << value << "' is accepted";
        const std::string message = perseus_error_message();
        EXPECT_NE(message.find(name + "='" + value + "'"), std::string::npos) << message;
        EXPECT_NE(message.find("expected"), std::string::npos) << message;
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      }
  EXPECT_EQ(perseus_config_check(), PERSEUS_OK) << perseus_error_message();
}

TEST(Config, AContextChecksTheEnvironmentAndItsOverrides) {
  perseus_context* context = nullptr;
  {
    SetVariable set("PERSEUS_ALLREDUCE_STREAMS", "13");
    EXPECT_EQ(create_context(all_media()[0], unique_name(), 0, 1, 0, {}, &context), PERSEUS_INVALID_ARGUMENT);
    EXPECT_NE(std::string(perseus_error_message()).find("PERSEUS_ALLREDUCE_STREAMS='13'"), std::string::npos);
    // An override comes first, whatever the environment says.
    ASSERT_EQ(create_context(all_media()[0], unique_name(), 0, 1, 0, {"PERSEUS_ALLREDUCE_STREAMS=12"}, &context),
              PERSEUS_OK)
        << perseus_error_message();
    perseus_context_destroy(context);
  }
  context = nullptr;
  EXPECT_EQ(create_context(all_media()[0], unique_name(), 0, 1, 0, {"HOROVOD_NUM_NCCL_STREAMS=zero"}, &context),
            PERSEUS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(perseus_error_message()).find("HOROVOD_NUM_NCCL_STREAMS='zero'"), std::string::npos);
  EXPECT_EQ(create_context({"none", "infiniband"}, unique_name(), 0, 1, 0, {}, &context), PERSEUS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(perseus_error_message()).find("PERSEUS_TRANSPORT='infiniband'"), std::string::npos);
}

TEST(Config, NamesThatAreAlmostAVariablesAndThoseWithoutEffectAreWarnedOf) {
  const SetVariable almost[] = {
      {"PERSEUS_ALREDUCE_DTYPE", "1"}, {"LIGHT_TOPK_RATIOS", "0.1"}, {"HOROVOD_TIMELIME", "x"}};
  const SetVariable others[] = {{"PERSEUS_SIZE", "1"},
                                {"HOROVOD_CACHE_CAPACITY", "1"},
                                {"HOROVOD_DISABLE_GROUP_FUSION", "0"},
                                {"IGHT_TOPK_RATIO", "1"}};
  testing::internal::CaptureStderr();
  run_world(all_media()[0], 2, [](int, perseus_context*) {});
  const std::string text = testing::internal::GetCapturedStderr();
  for (const char* expected : {"Unknown variable PERSEUS_ALREDUCE_DTYPE; did you mean PERSEUS_ALLREDUCE_DTYPE?",
                               "Unknown variable LIGHT_TOPK_RATIOS; did you mean LIGHT_TOPK_RATIO?",
                               "Unknown variable HOROVOD_TIMELIME; did you mean HOROVOD_TIMELINE?",
                               "HOROVOD_CACHE_CAPACITY=1 has no effect: Perseus remembers the negotiation"})
    EXPECT_NE(text.find(expected), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4) << "by one rank, of no other name: " << text;
  testing::internal::CaptureStderr();
  run_world(all_media()[0], 2, [](int, perseus_context*) {});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "once in a process";
}

TEST(Config, RanksMayWriteEqualValuesDifferently) {
  const std::vector<std::string> writings[] = {
      {"PERSEUS_OFFLINE_NEG=1", "PERSEUS_ALLREDUCE_STREAMS=4", "LIGHT_TOPK_RATIO=0.1", "HOROVOD_AUTOTUNE=auto"},
      {"PERSEUS_OFFLINE_NEG=true", "PERSEUS_ALLREDUCE_STREAMS=04", "LIGHT_TOPK_RATIO=1e-1", "HOROVOD_AUTOTUNE=AUTO"}};
  const std::string name = unique_name();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      perseus_context* context = nullptr;
      EXPECT_EQ(create_context(all_media()[0], name, rank, 2, 0, writings[rank], &context), PERSEUS_OK)
          << perseus_error_message();
      perseus_context_destroy(context);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Config, RanksThatAreConfiguredDifferentlyAreToldWhatAndWho) {
  perseus_store_server* server = nullptr;
  ASSERT_EQ(perseus_store_server_create("127.0.0.1", 0, 0, "key", 3, &server), PERSEUS_OK) << perseus_error_message();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      // Rank 2 differs; so does its log level, which is its own business.
      const char* overrides[] = {rank == 2 ? "PERSEUS_ALLREDUCE_STREAMS=2" : "PERSEUS_ALLREDUCE_STREAMS=3",
                                 rank == 2 ? "PERSEUS_LOG_LEVEL=error" : "PERSEUS_LOG_LEVEL=warning", nullptr};
      perseus_context_options o{};
      o.struct_size = sizeof o;
      o.rank = rank;
      o.size = 3;
      o.store_host = "127.0.0.1";
      o.store_port = perseus_store_server_port(server);
      o.secret = "key";
      o.secret_size = 3;
      o.overrides = overrides;
      perseus_context* context = nullptr;
      EXPECT_EQ(perseus_context_create(&o, &context), PERSEUS_INVALID_ARGUMENT);
      const std::string message = perseus_error_message();
      // Entries are compared as they come: rank 2 may read either of the others' first.
      const auto names = [&](const char* ranks) { return message.find(ranks) != std::string::npos; };
      EXPECT_TRUE(rank == 2   ? names("ranks 2 and 0") || names("ranks 2 and 1")
                  : rank == 1 ? names("ranks 1 and 2")
                              : names("ranks 0 and 2"))
          << message;
      EXPECT_NE(message.find(rank == 2 ? "PERSEUS_ALLREDUCE_STREAMS=2 against PERSEUS_ALLREDUCE_STREAMS=3"
                                       : "PERSEUS_ALLREDUCE_STREAMS=3 against PERSEUS_ALLREDUCE_STREAMS=2"),
                std::string::npos)
          << message;
      EXPECT_EQ(message.find("LOG_LEVEL"), std::string::npos) << message;
    });
  for (std::thread& thread : threads) thread.join();
  perseus_store_server_destroy(server);
}

}  // namespace
