// Configurations in the shapes that people have (configs/), and beside each what must become of every key of it (configs/expected/).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "app/import/import_docs.h"
#include "app/import/translate.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_table.h"
#include "tests/support/test_folder.h"

namespace tessera::app {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Strings = std::vector<std::string>;

constexpr std::size_t kFewestConfigs = 24;

std::vector<fs::path> config_files() {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(TESSERA_IMPORT_CONFIGS))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

/// Paths of all values of a file, read by libraries alone: nlohmann's parser, and yaml-cpp's tree.
void add_paths(const json& value, const std::string& path, Strings& paths) {
  if (!value.is_object() || value.empty()) return paths.push_back(path);
  for (const auto& [key, member] : value.items()) add_paths(member, path.empty() ? key : path + "." + key, paths);
}

void add_paths(const YAML::Node& value, const std::string& path, Strings& paths) {
  if (!value.IsMap() || value.size() == 0) return paths.push_back(path);
  for (const auto& member : value) {
    const auto key = member.first.as<std::string>();
    add_paths(member.second, path.empty() ? key : path + "." + key, paths);
  }
}

Strings paths_of(const fs::path& file) {
  Strings paths;
  if (file.extension() == ".json")
    add_paths(json::parse(TestFolder::content_of(file)), "", paths);
  else
    add_paths(YAML::LoadFile(file.string()), "", paths);
  return paths;
}

Strings paths_with(const TranslatedConfig& config, Fate fate) {
  Strings paths;
  for (const KeyFate& key : config.keys)
    if (key.fate == fate) paths.push_back(key.path);
  return paths;
}

Strings also_set(const TranslatedConfig& config) {
  Strings pointers;
  for (const ImpliedSetting& each : config.implied) pointers.push_back(each.pointer);
  return pointers;
}

std::string name_of_test(const ::testing::TestParamInfo<fs::path>& info) { return info.param.stem().string(); }

class ImportConfig : public ::testing::TestWithParam<fs::path> {
 protected:
  void SetUp() override {
    auto translated = translate_config(TestFolder::content_of(GetParam()), GetParam().filename().string());
    ASSERT_TRUE(translated.ok()) << translated.status();
    config_ = *std::move(translated);
    const fs::path expected = GetParam().parent_path() / "expected" / (GetParam().filename().string() + ".json");
    expected_ = json::parse(TestFolder::content_of(expected));
  }

  TranslatedConfig config_;
  json expected_;
};

INSTANTIATE_TEST_SUITE_P(Configs, ImportConfig, ::testing::ValuesIn(config_files()), name_of_test);

TEST_P(ImportConfig, EveryKeyBecomesWhatItShould) {
  EXPECT_EQ(config_.title, expected_.at("format"));
  EXPECT_EQ(json(paths_with(config_, Fate::kMapped)), expected_.at("mapped"));
  EXPECT_EQ(json(paths_with(config_, Fate::kIgnored)), expected_.at("ignored"));
  EXPECT_EQ(json(paths_with(config_, Fate::kRefused)), expected_.at("refused"));
  EXPECT_EQ(json(also_set(config_)), expected_.at("also_set"));
}

TEST_P(ImportConfig, EveryKeyOfTheFileIsListedOnceWithAReason) {
  Strings listed;
  for (const KeyFate& key : config_.keys) {
    listed.push_back(key.path);
    EXPECT_FALSE(key.text.empty()) << key.path;
    EXPECT_FALSE(key.value.empty()) << key.path;
  }
  EXPECT_THAT(listed, ::testing::UnorderedElementsAreArray(paths_of(GetParam())));
}

TEST_P(ImportConfig, TheStrategyIsTheExpectedOneAndAccepted) {
  EXPECT_EQ(json::parse(config_.strategy), expected_.at("strategy")) << config_.strategy;
  const auto strategy = parse_strategy(config_.strategy);
  EXPECT_TRUE(strategy.ok()) << strategy.status();
}

TEST_P(ImportConfig, TheStrategyHasNoDefaultsAndTheOrderOfThePage) {
  const auto written = nlohmann::ordered_json::parse(config_.strategy);
  nlohmann::ordered_json in_order = nlohmann::ordered_json::object();
  for (const StrategyKey& key : strategy_keys()) {
    const nlohmann::ordered_json::json_pointer place(key.pointer);
    if (!written.contains(place)) continue;
    in_order[place] = written[place];
    // What is left out of an optimizer depends on its rule here, and on the library there: so its numbers are always said.
    if (key.pointer.rfind("/optimizer/", 0) == 0) continue;
    EXPECT_NE(written[place], key.field.get(Strategy{})) << key.pointer;
  }
  EXPECT_EQ(written.dump(), in_order.dump());
}

TEST(ImportConfigs, AreManyAndOfAllFormats) {
  EXPECT_GE(config_files().size(), kFewestConfigs);
  std::map<std::string, int> titles;
  for (const fs::path& file : config_files()) {
    const auto config = translate_config(TestFolder::content_of(file), file.filename().string());
    if (config.ok()) ++titles[config->title];
  }
  EXPECT_EQ(titles.size(), import_format_names().size());
}

TEST(ImportDocs, CommittedPageIsUpToDate) {
  EXPECT_TRUE(TestFolder::content_of(std::string(TESSERA_DOCS) + "/import-config.md") == import_reference())
      << "docs/import-config.md is not what the tables of app/import say. Build tessera_import_docs and run, from the "
         "root "
         "of the tree: <build>/app/import/tessera_import_docs docs";
}

}  // namespace
}  // namespace tessera::app
