#include "app/import/yaml_document.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "app/import/import_session.h"
#include "runtime/base/status.h"

namespace tessera::app {
namespace {

using ::testing::HasSubstr;

nlohmann::json read(const std::string& text) {
  Diagnostics diagnostics("file", text);
  const auto root = parse_yaml(text, diagnostics, 100);
  EXPECT_TRUE(root && diagnostics.empty()) << diagnostics.to_status();
  return root ? json_of(*root) : nlohmann::json();
}

std::string error(const std::string& text) {
  Diagnostics diagnostics("file", text);
  parse_yaml(text, diagnostics, 100);
  return message_of(diagnostics.to_status());
}

TEST(YamlDocument, WordsAreWhatYaml11Says) {
  EXPECT_EQ(
      read("a: no\nb: 'no'\nc: ~\nd:\ne: 12\nf: 1e-4\ng: .5\nh: yes\ni: nan\nj: 0x10\nk: -3\n"),
      nlohmann::json::parse(R"({"a": false, "b": "no", "c": null, "d": null, "e": 12, "f": 1e-4, "g": 0.5, "h": true,
                                      "i": "nan", "j": "0x10", "k": -3})"));
}

TEST(YamlDocument, ListsAndMappingsInBothStyles) {
  EXPECT_EQ(read("a:\n  - x\n  - {b: [1, 2]}\nc: {}\n# end\n"),
            nlohmann::json::parse(R"({"a": ["x", {"b": [1, 2]}], "c": {}})"));
}

TEST(YamlDocument, PlacesAreThoseOfValues) {
  const std::string text = "a: 1\nb:\n  c: two\n";
  Diagnostics diagnostics("file", text);
  const auto root = parse_yaml(text, diagnostics, 100);
  ASSERT_TRUE(root);
  EXPECT_EQ(root->children[1].children[0].offset, text.find("two"));
  EXPECT_EQ(root->children[1].key_offset, text.find("b:"));
}

TEST(YamlDocument, HostileTextIsRefusedWithItsPlace) {
  EXPECT_THAT(error("a: &x [1]\nb: *x\n"), HasSubstr("file:2:4: /: not YAML: aliases"));
  EXPECT_THAT(error("a: !!python/object:os.system x\n"), HasSubstr("tags (!name) are not read"));
  EXPECT_THAT(error("a: 1\na: 2\n"), HasSubstr("file:2:1: /a: given twice. hint: remove one; the first is at 1:1"));
  EXPECT_THAT(error("a: 1\n---\nb: 2\n"), HasSubstr("a second document"));
  EXPECT_THAT(error("? [a, b]\n: 1\n"), HasSubstr("a key must be a word"));
  EXPECT_THAT(error("a: \"\xff\"\n"), HasSubstr("not UTF-8"));
  EXPECT_THAT(error(std::string("a: \0b\n", 6)), HasSubstr("NUL"));
  EXPECT_THAT(error("a: [1, 2\n"), HasSubstr("not YAML"));
  EXPECT_THAT(error("a: {b: c: d}\n"), HasSubstr("not YAML"));
  EXPECT_THAT(error("\tkey: x"), HasSubstr("not YAML"));
  EXPECT_THAT(error(std::string(40, '[') + std::string(40, ']')), HasSubstr("nested more than 32 deep"));
  EXPECT_THAT(error(std::string(200000, '[')), HasSubstr("not YAML"));
  EXPECT_THAT(error(std::string(200000, '{')), HasSubstr("not YAML"));
  std::string many = "a:\n";
  for (int i = 0; i < 200; ++i) many += "- 1\n";
  EXPECT_THAT(error(many), HasSubstr("more values"));
}

TEST(YamlDocument, NothingIsNothing) {
  for (const char* text : {"", "# only words\n", "---\n"}) EXPECT_FALSE(read(text).is_object()) << text;
}

}  // namespace
}  // namespace tessera::app
