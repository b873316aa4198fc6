// Tests the JSON document, which stores the place of each key and value, and the diagnostics that name these places.

#include "runtime/config/json_document.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

// Appends the texts that lie at the positions of all keys and values.
void collect(const JsonNode& node, std::string_view text, std::vector<std::string>& found) {
  if (!node.key.empty()) found.push_back("key " + std::string(text.substr(node.key_offset, node.key.size() + 2)));
  const std::string dumped = node.value.dump();
  found.push_back("value " + std::string(text.substr(node.offset, node.children.empty() ? dumped.size() : 1)));
  for (const JsonNode& child : node.children) collect(child, text, found);
}

TEST(JsonDocument, EveryKeyAndValueHasItsOffsetInTheText) {
  const std::string text = "\n [1 , -20,\t\"x\",{\"a\":null , \"b\" :[ ] },true,{\"c\":{\"d\":1.5}}, {} , [[7],8] ] \n";
  Diagnostics diagnostics("x", text);
  const auto root = parse_json(text, diagnostics);
  ASSERT_TRUE(root.has_value()) << diagnostics.to_status();
  std::vector<std::string> found;
  collect(*root, text, found);
  const std::vector<std::string> wanted = {
      "value [",    "value 1", "value -20", "value \"x\"", "value {",   "key \"a\"", "value null", "key \"b\"",
      "value [ ",  // an empty list with a space: two characters, as "[]" has
      "value true", "value {", "key \"c\"", "value {",     "key \"d\"", "value 1.5", "value {}",   "value [",
      "value [",    "value 7", "value 8"};
  EXPECT_EQ(found, wanted);
}

TEST(JsonDocument, EscapedKeysAreDecoded) {
  const std::string text = R"({"\u0061\n": "\u00e9"})";
  Diagnostics diagnostics("x", text);
  const auto root = parse_json(text, diagnostics);
  ASSERT_TRUE(root.has_value());
  EXPECT_EQ(root->children.at(0).key, "a\n");
  EXPECT_EQ(root->children.at(0).value, "\xC3\xA9");
  EXPECT_EQ(root->children.at(0).offset, text.find(": ") + 2);
}

TEST(JsonDocument, EscapedSpellingOfAKeyCountsAsADuplicate) {
  const std::string text = R"({"a": 1, "\u0061": 2})";
  Diagnostics diagnostics("x", text);
  EXPECT_TRUE(parse_json(text, diagnostics).has_value());
  EXPECT_EQ(std::string(diagnostics.to_status().message()),
            "x:1:10: /a: given twice. [T0496] hint: remove one; the first is at 1:2");
}

TEST(JsonDocument, DepthLimitIsExact) {
  for (const std::size_t depth : {kMaxJsonDepth, kMaxJsonDepth + 1}) {
    const std::string text = std::string(depth, '[') + std::string(depth, ']');
    Diagnostics diagnostics("x", text);
    EXPECT_EQ(parse_json(text, diagnostics).has_value(), depth == kMaxJsonDepth);
    EXPECT_EQ(diagnostics.empty(), depth == kMaxJsonDepth);
  }
}

TEST(JsonDocument, NumberOfValuesIsLimited) {
  const std::string text = R"({"a": [1, "b", {}], "c": null})";  // six values
  for (const std::size_t most : {std::size_t{6}, std::size_t{5}, std::size_t{0}}) {
    Diagnostics diagnostics("x", text);
    EXPECT_EQ(parse_json(text, diagnostics, most).has_value(), most == 6) << most;
    EXPECT_EQ(diagnostics.empty(), most == 6) << most;
  }
}

TEST(JsonPointer, SpecialCharactersAreEscapedAndLongKeysCut) {
  EXPECT_EQ(json_pointer("/a", "b/c~d"), "/a/b~1c~0d");
  EXPECT_EQ(json_pointer("", "x\ny"), "/x\\ny");
  EXPECT_LT(json_pointer("", std::string(100'000, 'k')).size(), 100u);
}

TEST(Diagnostics, ErrorsAreSortedByTheirPlaceInTheText) {
  const std::string text = "ab\ncd\n";
  Diagnostics diagnostics("f", text);
  EXPECT_TRUE(diagnostics.to_status().ok());
  diagnostics.add(4, "/b/c", "second");
  diagnostics.add(0, "/a", "first", 4);
  diagnostics.add(1000, "", "behind the end");
  EXPECT_EQ(std::string(diagnostics.to_status().message()),
            "f:1:1: /a: first 2:2\nf:2:2: /b/c: second\nf:3:1: /: behind the end");
}

TEST(Diagnostics, AnErrorTouchesItsParentsAndChildren) {
  Diagnostics diagnostics("f", "");
  diagnostics.add(0, "/b/c", "");
  EXPECT_TRUE(diagnostics.touches("/b"));
  EXPECT_TRUE(diagnostics.touches("/b/c"));
  EXPECT_TRUE(diagnostics.touches("/b/c/d"));
  EXPECT_FALSE(diagnostics.touches("/b/cd"));
  EXPECT_FALSE(diagnostics.touches("/a"));
}

}  // namespace
}  // namespace tessera
