// Tests that tokens are those of the package `tokenizers`, for text in many scripts and for bytes that are no text.
// Files that are damaged, hostile or of another kind are refused.

#include "workshop/tokenizer/tokenizer.h"

#include <gmock/gmock.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>

#include "runtime/base/status.h"
#include "tests/oracle/child.h"
#include "tests/oracle/exchange.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"
#include "workshop/tokenizer/utf8.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class TokenizersPackage : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_.emplace();
    if (!oracle::python_has({"torch", "tokenizers"})) return;
    const auto made =
        oracle::run_python("../huggingface/make_tokenizers.py", {folder_->path().string()}, folder_->path(), 300);
    ASSERT_TRUE(made.ok()) << message_of(made.status());
    std::printf("%s", made->c_str());
    is_made_ = true;
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override {
    if (!is_made_) GTEST_SKIP() << TESSERA_ORACLE_PYTHON " has no tokenizers. hint: scripts/setup --tests";
  }

  /// Checks that these tokens are the same, and reports where they differ.
  static void expect_tokens(const std::vector<Tokenizer::Id>& got, const at::Tensor& wanted,
                            const Tokenizer& tokenizer) {
    const auto* const values = wanted.const_data_ptr<std::int64_t>();
    const auto count = std::min(got.size(), static_cast<std::size_t>(wanted.numel()));
    for (std::size_t i = 0; i < count; ++i) {
      if (got[i] == values[i]) continue;
      const std::vector<std::int64_t> ours(got.begin() + static_cast<std::ptrdiff_t>(i),
                                           got.begin() + static_cast<std::ptrdiff_t>(std::min(got.size(), i + 5)));
      FAIL() << "token " << i << ": " << ::testing::PrintToString(tokenizer.decode(ours)) << ", wanted "
             << ::testing::PrintToString(tokenizer.decode({values + i, std::min<std::size_t>(5, count - i)}));
    }
    EXPECT_EQ(got.size(), static_cast<std::size_t>(wanted.numel()));
  }

  static std::optional<TestFolder> folder_;
  static bool is_made_;
};
std::optional<TestFolder> TokenizersPackage::folder_;
bool TokenizersPackage::is_made_ = false;

TEST_F(TokenizersPackage, TokensAndTextEqualThePackages) {
  const std::string text = TestFolder::content_of(*folder_ / "text"),
                    broken = TestFolder::content_of(*folder_ / "bytes"),
                    words = TestFolder::content_of(*folder_ / "words");
  for (const char* kind : {"gpt2", "prefix_space", "llama3", "qwen2", "digits"}) {
    SCOPED_TRACE(kind);
    const auto tokenizer = Tokenizer::read(*folder_ / kind);
    ASSERT_TRUE(tokenizer.ok()) << message_of(tokenizer.status());
    const auto tensors = oracle::read_tensors(*folder_ / kind / "wanted");
    ASSERT_TRUE(tensors.ok()) << message_of(tensors.status());
    std::map<std::string, at::Tensor> wanted(tensors->begin(), tensors->end());
    std::vector<Tokenizer::Id> ids;
    const auto start = std::chrono::steady_clock::now();
    auto replaced = tokenizer->encode(text, /*add_special=*/true, ids);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%s: Tessera %.1f MB/s\n", kind, static_cast<double>(text.size()) / 1e6 / seconds.count());
    ASSERT_TRUE(replaced.ok()) << message_of(replaced.status());
    EXPECT_EQ(*replaced, 0u);
    expect_tokens(ids, wanted.at("text"), *tokenizer);
    const std::vector<std::int64_t> wide(ids.begin(), ids.end());
    EXPECT_TRUE(tokenizer->decode(wide) == TestFolder::content_of(*folder_ / kind / "decoded"));
    EXPECT_TRUE(tokenizer->decode(wide, /*skip_special=*/false) ==
                TestFolder::content_of(*folder_ / kind / "decoded_special"));
    ids.clear();
    replaced = tokenizer->encode(broken, true, ids);
    ASSERT_TRUE(replaced.ok());
    EXPECT_GT(*replaced, 100u);
    expect_tokens(ids, wanted.at("bytes"), *tokenizer);
    ids.clear();
    std::vector<std::int64_t> ends;
    for (std::size_t begin = 0; begin <= words.size();) {
      const std::size_t end = std::min(words.find('\x1e', begin), words.size());
      ASSERT_TRUE(tokenizer->encode(std::string_view(words).substr(begin, end - begin), true, ids).ok());
      ends.push_back(static_cast<std::int64_t>(ids.size()));
      begin = end + 1;
    }
    expect_tokens(ids, wanted.at("words"), *tokenizer);
    const at::Tensor& wanted_ends = wanted.at("word_ends");
    ASSERT_EQ(wanted_ends.numel(), static_cast<std::int64_t>(ends.size()));
    for (std::size_t i = 0; i < ends.size(); ++i)
      ASSERT_EQ(ends[i], wanted_ends.const_data_ptr<std::int64_t>()[i]) << "text " << i;
  }
}

/// Returns a tokenizer.json with all bytes and a few merges. `more` adds members to the file, and `model_members` adds
/// members to its model.
std::string tokenizer_json(const std::string& more = "", const std::string& model_members = "",
                           const std::string& merges = R"(["a b","ab c"])") {
  std::string vocabulary;
  int other = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    std::string character;
    append_utf8(static_cast<char32_t>(visible ? byte : other++), character);
    if (character == "\"" || character == "\\") character.insert(0, 1, '\\');
    vocabulary += "\"" + character + "\":" + std::to_string(byte) + ",";
  }
  return R"({"decoder":{"type":"ByteLevel"},)" + more + R"("model":{"type":"BPE",)" + model_members + R"("vocab":{)" +
         vocabulary + R"("ab":256,"abc":257},"merges":)" + merges + "}}";
}
constexpr char kByteLevel[] = R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},)";

std::string refusal(const std::string& json) {
  const auto tokenizer = Tokenizer::parse(json);
  if (tokenizer.ok()) return "";
  EXPECT_EQ(exit_code_of(tokenizer.status()), ExitCode::kCorruptData);
  return message_of(tokenizer.status());
}

TEST(TokenizerFile, MergesDoNotDependOnTheWordsLength) {
  const auto tokenizer = Tokenizer::parse(tokenizer_json(kByteLevel));
  ASSERT_TRUE(tokenizer.ok()) << message_of(tokenizer.status());
  EXPECT_EQ(tokenizer->vocab_size(), 258);
  for (const std::size_t times : {1u, 7u, 8u, 20u, 100000u}) {
    std::string text;
    for (std::size_t i = 0; i < times; ++i) text += "abcab";
    std::vector<Tokenizer::Id> ids, wanted;
    for (std::size_t i = 0; i < times; ++i) wanted.insert(wanted.end(), {257, 256});
    ASSERT_TRUE(tokenizer->encode(text, true, ids).ok());
    EXPECT_EQ(ids, wanted) << times;
  }
}

TEST(TokenizerFile, DamagedHostileAndForeignFilesAreRefused) {
  ASSERT_EQ(refusal(tokenizer_json(kByteLevel)), "");
  const std::string good = tokenizer_json(kByteLevel);
  for (std::size_t length = 0; length < good.size(); length += 97)
    EXPECT_NE(refusal(good.substr(0, length)), "") << length;
  EXPECT_NE(refusal("[]"), "");
  EXPECT_NE(refusal("{}"), "");
  EXPECT_NE(refusal(std::string(1'000'000, '[')), "");
  EXPECT_THAT(refusal(tokenizer_json()), HasSubstr("pre_tokenizer"));
  const auto with = [&](const std::string& more) { return refusal(tokenizer_json(more)); };
  EXPECT_THAT(with(R"("pre_tokenizer":{"type":"Whitespace"},)"), HasSubstr("Whitespace"));
  EXPECT_THAT(with(R"("pre_tokenizer":{"type":"Sequence","pretokenizers":3},)"), HasSubstr("pretokenizers"));
  const auto pattern = [&](const std::string& expression, const std::string& behavior = "Isolated") {
    return with(R"("pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":")" +
                expression + R"("},"behavior":")" + behavior + R"("},{"type":"ByteLevel","use_regex":false}]},)");
  };
  EXPECT_EQ(pattern("a+"), "");
  EXPECT_THAT(pattern("("), HasSubstr("not understood"));
  EXPECT_THAT(pattern("\\\\w+"), HasSubstr("\\\\w"));
  EXPECT_THAT(pattern("[a&&b]"), HasSubstr("not supported"));
  EXPECT_THAT(pattern(std::string(100'000, 'a')), HasSubstr("bytes"));
  EXPECT_THAT(pattern("a", "MergedWithNext"), HasSubstr("MergedWithNext"));
  const std::string byte_level = kByteLevel;
  EXPECT_THAT(with(byte_level + R"("normalizer":{"type":"Lowercase"},)"), HasSubstr("Lowercase"));
  EXPECT_THAT(with(byte_level + R"("post_processor":{"type":"BertProcessing"},)"), HasSubstr("BertProcessing"));
  EXPECT_THAT(
      with(byte_level + R"("post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}}]},)"),
      HasSubstr("special_tokens"));
  const auto added = [&](const std::string& token) { return with(byte_level + R"("added_tokens":[)" + token + "],"); };
  EXPECT_EQ(added(R"({"id":300,"content":"<x>"})"), "");
  EXPECT_THAT(added(R"({"id":3,"content":"<x>"})"), HasSubstr("otherwise"));
  EXPECT_THAT(added(R"({"id":-1,"content":"<x>"})"), HasSubstr("an integer"));
  EXPECT_THAT(added(R"({"id":4294967296,"content":"<x>"})"), HasSubstr("an integer"));
  EXPECT_THAT(added(R"({"id":300,"content":""})"), HasSubstr("1 to"));
  EXPECT_THAT(added(R"({"id":300,"content":"<x>","lstrip":true})"), HasSubstr("lstrip"));
  const auto model = [&](const std::string& members) { return refusal(tokenizer_json(byte_level, members)); };
  EXPECT_THAT(model(R"("byte_fallback":true,)"), HasSubstr("byte_fallback"));
  EXPECT_THAT(model(R"("dropout":0.5,)"), HasSubstr("dropout"));
  EXPECT_THAT(model(R"("end_of_word_suffix":"</w>",)"), HasSubstr("end_of_word_suffix"));
  EXPECT_THAT(refusal(tokenizer_json(byte_level, "", R"(["a z"])")), HasSubstr("no token"));
  EXPECT_THAT(refusal(tokenizer_json(byte_level, "", R"(["ab"])")), HasSubstr("two tokens"));
  EXPECT_THAT(refusal(tokenizer_json(byte_level, "", R"([["a","b","c"]])")), HasSubstr("two tokens"));
  std::string twice = good;
  twice.replace(twice.find("\"ab\":256"), 8, "\"ab\":255");
  EXPECT_THAT(refusal(twice), HasSubstr("twice"));
  std::string without_a = good;
  without_a.replace(without_a.find("\"a\":97,"), 7, "");
  EXPECT_THAT(refusal(without_a), HasSubstr("0x61"));
}

TEST(TokenizerFile, WhatChangesTheTokensAndIsNotReadIsRefusedOrWarnedOf) {
  const std::string byte_level = kByteLevel;
  const auto with = [&](const std::string& more) { return refusal(tokenizer_json(byte_level + more)); };
  EXPECT_THAT(with(R"("language":"en",)"), HasSubstr(R"(has the key "language")"));
  EXPECT_EQ(with(R"("version":"1.0","language":null,)"), "");
  EXPECT_THAT(refusal(tokenizer_json(byte_level, R"("unigrams":3,)")), HasSubstr(R"(/model: has the key "unigrams")"));
  EXPECT_EQ(refusal(tokenizer_json(byte_level, R"("unk_token":null,"fuse_unk":false,"ignore_merges":true,)")), "");
  const auto said = [&](const std::string& more) { return testing::stderr_of([&] { EXPECT_EQ(with(more), ""); }); };
  EXPECT_THAT(said(R"("truncation":{"max_length":8},)"), HasSubstr(R"("truncation" is not applied)"));
  EXPECT_THAT(said(R"("padding":{"strategy":"BatchLongest"},)"), HasSubstr(R"("padding" is not applied)"));
  EXPECT_EQ(said(R"("truncation":null,"padding":null,)"), "");
}

absl::StatusOr<Tokenizer> with_pattern(const std::string& expression) {
  return Tokenizer::parse(tokenizer_json(
      R"("pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":")" + expression +
      R"("},"behavior":"Isolated"},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},)"));
}

// A pattern that doubles its steps with each letter ends with an error, instead of running for a day. A pattern that
// takes few steps for each place of a text, but many steps for the whole text, ends in the same error.
TEST(TokenizerFile, EndlessPatternIsAnError) {
  std::string lines;
  for (int line = 0; line < 60; ++line) lines += std::string(32, 'a') + "b\n";
  std::string spaces;
  for (int line = 0; line < 2000; ++line) spaces += std::string(500, ' ') + "y\n";
  const std::vector<std::pair<std::string, std::string>> cases = {{"(a|aa)+$", std::string(200, 'a') + "!"},
                                                                  {"(?:a|aa)+$", lines},
                                                                  {"(?:\\\\s+)+x", spaces},
                                                                  {"a(?=[^\\n]*z)", std::string(1'000'000, 'a')}};
  for (const auto& [expression, text] : cases) {
    const auto tokenizer = with_pattern(expression);
    ASSERT_TRUE(tokenizer.ok()) << message_of(tokenizer.status());
    std::vector<Tokenizer::Id> ids;
    const auto result = tokenizer->encode(text, true, ids);
    EXPECT_EQ(exit_code_of(result.status()), ExitCode::kCorruptData) << expression;
    EXPECT_THAT(message_of(result.status()), HasSubstr("too many steps"));
  }
}

TEST(TokenizerFile, LongAddedTokenThatBeginsEverywhereIsAnError) {
  const std::string token = std::string(4000, 'a') + "b";
  const auto tokenizer = Tokenizer::parse(
      tokenizer_json(R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":false},)"
                     R"("added_tokens":[{"id":300,"content":")" +
                     token + R"("}],)"));
  ASSERT_TRUE(tokenizer.ok()) << message_of(tokenizer.status());
  std::vector<Tokenizer::Id> ids;
  const auto result = tokenizer->encode(std::string(1'000'000, 'a'), true, ids);
  EXPECT_EQ(exit_code_of(result.status()), ExitCode::kCorruptData);
  EXPECT_THAT(message_of(result.status()), HasSubstr("too many steps"));
  ids.clear();
  EXPECT_TRUE(tokenizer->encode(token + "c", false, ids).ok());
  EXPECT_EQ(ids, (std::vector<Tokenizer::Id>{300, 'c'}));
}

// A search sees only a part of the text at a time, which must not change the result. Words may be longer than a part, a
// word may end where a part ends, and a pattern may look ahead into the next part.
TEST(TokenizerFile, PatternCutsLongTextsLikeShortOnes) {
  const auto tokenizer = with_pattern("(?:c\\\\S)+|\\\\s+(?!\\\\S)|^ab|ab$");
  ASSERT_TRUE(tokenizer.ok()) << message_of(tokenizer.status());
  const auto encode = [&](const std::string& text) {
    std::vector<Tokenizer::Id> ids;
    EXPECT_TRUE(tokenizer->encode(text, true, ids).ok());
    return ids;
  };
  for (const std::size_t words : {1u, 340u, 341u, 342u, 50'000u}) {
    for (const std::size_t before : {0u, 1u, 1022u, 1023u, 1024u, 5000u}) {
      // Pieces are "xx...", "cacaca...", "bc...", so "ab" is joined only at places where the pattern has not cut it.
      std::string text = std::string(before, 'x') + "ab", word;
      for (std::size_t i = 0; i < words; ++i) word += "ca";
      text += word + "bc";
      std::vector<Tokenizer::Id> wanted;
      for (const char c : std::string(before, 'x')) wanted.push_back(static_cast<unsigned char>(c));
      wanted.push_back(256);
      for (const char c : word) wanted.push_back(static_cast<unsigned char>(c));
      wanted.insert(wanted.end(), {'b', 'c'});
      EXPECT_EQ(encode(text), wanted) << words << " words behind " << before;
    }
  }
}

// utf8proc sorts the marks of one letter in a time that grows with the square of their number. The marks in this text
// would take a day.
TEST(TokenizerFile, ManyMarksOfOneLetterAreNormalizedInTime) {
  const auto tokenizer = Tokenizer::parse(tokenizer_json(std::string(kByteLevel) + R"("normalizer":{"type":"NFC"},)"));
  ASSERT_TRUE(tokenizer.ok()) << message_of(tokenizer.status());
  constexpr int kPairs = 1'000'000;
  std::string text = "x", sorted = "x";
  for (int i = 0; i < kPairs; ++i) text += "\u0301\u0316";
  for (const char* mark : {"\u0316", "\u0301"})
    for (int i = 0; i < kPairs; ++i) sorted += mark;
  std::vector<Tokenizer::Id> ids, wanted;
  ASSERT_TRUE(tokenizer->encode(text, true, ids).ok());
  ASSERT_TRUE(tokenizer->encode(sorted, true, wanted).ok());
  EXPECT_EQ(ids, wanted);
}

}  // namespace
}  // namespace tessera
