// Tests that the committed page and schema of strategies are up to date and true.

#include "runtime/config/strategy_docs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_table.h"
#include "tests/config/strategy_schema.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

void expect_committed(const std::string& file, const std::string& generated) {
  std::ifstream stream(std::string(TESSERA_DOCS) + "/" + file, std::ios::binary);
  ASSERT_TRUE(stream) << "docs/" << file << " is missing";
  std::stringstream text;
  text << stream.rdbuf();
  EXPECT_TRUE(text.str() == generated)
      << "docs/" << file
      << " is not what the table of keys says. Build tessera_strategy_docs and run, from the root of "
      << "the tree: <build>/runtime/config/tessera_strategy_docs docs";
}

TEST(StrategyDocs, CommittedPageIsUpToDate) { expect_committed("strategy.md", strategy_reference()); }
TEST(StrategyDocs, CommittedSchemaIsUpToDate) { expect_committed("strategy.schema.json", strategy_schema()); }

TEST(StrategyDocs, PageNamesEveryKeyAndRule) {
  const std::string page = strategy_reference();
  for (const StrategyKey& key : strategy_keys()) {
    EXPECT_THAT(page, HasSubstr("| `" + key.name() + "` | " + key.doc)) << key.pointer;
  }
  for (const StrategyRule& rule : strategy_rules()) EXPECT_THAT(page, HasSubstr(rule.doc));
}

TEST(StrategyDocs, ExampleOfThePageIsAccepted) {
  const auto strategy = parse_strategy(strategy_example());
  ASSERT_TRUE(strategy.ok()) << strategy.status();
  EXPECT_EQ(schema_errors(json::parse(strategy_example())), "");
}

TEST(StrategyDocs, ErrorsShownOnThePageAreTheReadersOwn) {
  const auto strategy = parse_strategy(
      "{\n\n\n  \"optimizer\": {\"type\": \"adamw\", \"lr\": \"fast\"},\n\n  \"gradient_cliping\": 1.0\n}",
      "strategy.json");
  ASSERT_FALSE(strategy.ok());
  EXPECT_THAT(strategy_reference(), HasSubstr("```\n" + std::string(strategy.status().message()) + "\n```"));
}

TEST(StrategyDocs, DefaultsThatDifferByRuleAreListedByRule) {
  EXPECT_THAT(strategy_reference(),
              HasSubstr("| `0.01` (adamw, lamb, own, own_matrix), `0.0` (adam, sgd, lion, adagrad, "
                        "rmsprop, lars, adafactor), `0.1` (muon) |"));
}

TEST(StrategySchema, AcceptsTheResolvedDefaults) { EXPECT_EQ(schema_errors(json::parse(Strategy{}.to_json())), ""); }

TEST(StrategySchema, AcceptsDefaultAndExampleOfEveryKey) {
  for (const StrategyKey& key : strategy_keys()) {
    for (const std::string& value : {key.default_json, key.example_json}) {
      json document = json::object();
      document[json::json_pointer(key.pointer)] = json::parse(value);
      EXPECT_EQ(schema_errors(document), "") << document;
    }
  }
}

TEST(StrategySchema, RefusesWhatTheReaderRefuses) {
  for (const char* text :
       {R"([])", R"({"strateggy": "FULL_SHARD"})", R"({"strategy": "full_shard"})",
        R"({"offload": {"gradients": {"tier": "auto"}}})", R"({"optimizer": {"betas": [0.9, 1]}})",
        R"({"optimizer": {"betas": [0.9]}})", R"({"optimizer": {"lr": -1}})", R"({"memory": {"limit": "8gib"}})",
        R"({"units": {"classes": [""]}})", R"({"units": {"classes": ["A", "A"]}})", R"({"prefetch": 1.5})",
        R"({"comm": {"timeout_s": 0}})", R"({"optimizer": {"nesterov": 1}})"}) {
    EXPECT_FALSE(parse_strategy(text).ok()) << text;
    EXPECT_NE(schema_errors(json::parse(text)), "") << text;
  }
}

}  // namespace
}  // namespace tessera
