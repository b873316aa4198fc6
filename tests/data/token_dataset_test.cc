// Tests datasets of tokens in all formats that Tessera reads and writes.

#include "runtime/data/token_dataset.h"

#include <gmock/gmock.h>

#include <limits>
#include <random>

#include "runtime/base/status.h"
#include "runtime/data/token_writers.h"
#include "tests/data/test_files.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tokens = std::vector<std::int64_t>;

/// Checks that every window of a small dataset is the right slice of its tokens.
void expect_windows(const TokenDataset& dataset, const Tokens& tokens) {
  ASSERT_EQ(dataset.num_tokens(), static_cast<std::int64_t>(tokens.size()));
  for (std::size_t begin = 0; begin <= tokens.size(); ++begin)
    for (std::size_t end = begin; end <= tokens.size(); ++end)
      ASSERT_EQ(tokens_of(dataset, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end - begin)),
                Tokens(tokens.begin() + static_cast<long>(begin), tokens.begin() + static_cast<long>(end)));
}

void expect_no_windows_outside(const TokenDataset& dataset) {
  const std::int64_t n = dataset.num_tokens();
  Tokens out(3);
  for (const std::int64_t begin : {n - 2, n, n + 1, std::int64_t{-1}, std::numeric_limits<std::int64_t>::max(),
                                   std::numeric_limits<std::int64_t>::min()})
    EXPECT_EQ(exit_code_of(dataset.copy(begin, out)), ExitCode::kInternal) << begin;
}

TEST(TokenDataset, TextFileIsReadAsBytes) {
  const TestFolder folder;
  const auto dataset = open_dataset(folder.write("a.txt", "h\xc3\xa9!\n"));
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  expect_windows(**dataset, {'h', 0xc3, 0xa9, '!', '\n'});
  expect_no_windows_outside(**dataset);
  EXPECT_EQ((*dataset)->vocab_size_hint(), 256);
  EXPECT_THAT((*dataset)->describe(), HasSubstr("5 bytes in 1 file"));
}

TEST(TokenDataset, DirectoryIsReadAsItsFilesInOrder) {
  const TestFolder folder;
  folder.write("b/z.txt", "4");
  folder.write("b.txt", "3");  // '.' sorts before '/'
  folder.write("a/2.txt", "12");
  folder.write("a/empty.txt", "");
  folder.write("a/10.txt", "0");
  folder.write(".git/hidden.txt", "x");
  folder.write("a/.hidden.txt", "x");
  folder.write("notes.md", "m");
  const auto all = open_dataset(folder.path());
  ASSERT_TRUE(all.ok()) << all.status();
  expect_windows(**all, {'0', '1', '2', '3', '4', 'm'});
  DatasetOptions options;
  options.extensions = {".txt"};
  const auto text = open_dataset(folder.path(), options);
  ASSERT_TRUE(text.ok());
  expect_windows(**text, {'0', '1', '2', '3', '4'});
  EXPECT_THAT((*text)->location_of(2), HasSubstr("2.txt at byte 1"));
}

TEST(TokenDataset, LlmcFilesOfBothVersionsAreRead) {
  const TestFolder folder;
  const auto gpt2 = open_dataset(folder.write(
      "gpt2.bin", llmc_header(20240520, 1, 4) + Bytes().all(std::vector<std::uint16_t>{7, 0, 50256, 65535}).str()));
  ASSERT_TRUE(gpt2.ok()) << gpt2.status();
  expect_windows(**gpt2, {7, 0, 50256, 65535});
  expect_no_windows_outside(**gpt2);
  EXPECT_EQ((*gpt2)->vocab_size_hint(), 50257);
  EXPECT_THAT((*gpt2)->location_of(1), HasSubstr("gpt2.bin at byte 1026"));

  const auto llama = open_dataset(folder.write(
      "llama.bin", llmc_header(20240801, 7, 3) + Bytes().all(std::vector<std::uint32_t>{9, 128255, 4294967295}).str()));
  ASSERT_TRUE(llama.ok()) << llama.status();
  expect_windows(**llama, {9, 128255, 4294967295});
}

template <typename T>
void expect_megatron_type(std::uint8_t code, const std::vector<T>& values) {
  const TestFolder folder;
  folder.write("d.bin", Bytes().all(values));
  const auto n = static_cast<std::int32_t>(values.size());
  folder.write("d.idx", megatron_index(code, {1, n - 1}, {0, sizeof(T)}, {0, 1, 2}));
  for (const char* name : {"d", "d.bin", "d.idx"}) {
    const auto dataset = open_dataset(folder / name);
    ASSERT_TRUE(dataset.ok()) << dataset.status();
    expect_windows(**dataset, Tokens(values.begin(), values.end()));
  }
}

TEST(TokenDataset, EveryMegatronTokenTypeIsRead) {
  expect_megatron_type<std::uint8_t>(1, {0, 5, 255});
  expect_megatron_type<std::int8_t>(2, {0, 5, 127, -1});
  expect_megatron_type<std::int16_t>(3, {0, 5, 32767});
  expect_megatron_type<std::int32_t>(4, {0, 100'000, 2147483647});
  expect_megatron_type<std::int64_t>(5, {0, std::int64_t{1} << 40});
  expect_megatron_type<std::uint16_t>(8, {0, 50256, 65535});
}

TEST(TokenDataset, MegatronSequencesNeedNotLieInOrder) {
  const TestFolder folder;
  folder.write("d.bin", Bytes().all(std::vector<std::uint16_t>{10, 11, 12, 13, 14, 15}));
  // The sequences are 14 15 | nothing | 11 12 13 | 10, in the order of the index, with a gap and an empty sequence.
  folder.write("d.idx", megatron_index(8, {2, 0, 3, 1}, {8, 4, 2, 0}, {0, 2, 4}));
  const auto dataset = open_dataset(folder / "d");
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  expect_windows(**dataset, {14, 15, 11, 12, 13, 10});
  expect_no_windows_outside(**dataset);
  EXPECT_THAT((*dataset)->location_of(3), HasSubstr("d.bin at byte 4"));
  EXPECT_THAT((*dataset)->describe(), HasSubstr("4 sequences, 2 documents"));
}

TEST(TokenDataset, MegatronPrefixMayHaveDots) {
  const TestFolder folder;
  folder.write("v1.5_text.bin", Bytes().put(std::uint8_t{9}));
  folder.write("v1.5_text.idx", megatron_index(1, {1}, {0}, {0, 1}));
  EXPECT_TRUE(open_dataset(folder / "v1.5_text").ok());
}

TEST(TokenDataset, WrittenTokensAreReadBackInEveryType) {
  const TestFolder folder;
  std::mt19937_64 random(3);
  for (const TokenType type : {TokenType::kU8, TokenType::kI8, TokenType::kI16, TokenType::kU16, TokenType::kI32,
                               TokenType::kU32, TokenType::kI64}) {
    std::vector<Tokens> documents(5);
    Tokens all;
    for (Tokens& document : documents) {
      for (std::size_t i = random() % 9; i > 0; --i) document.push_back(static_cast<std::int64_t>(random() % 100));
      all.insert(all.end(), document.begin(), document.end());
    }
    all.push_back(1);
    documents.push_back({1});
    const auto written = write_megatron(folder / "m", documents, type);
    if (type == TokenType::kU32) {
      EXPECT_EQ(exit_code_of(written), ExitCode::kUsage);
    } else {
      ASSERT_TRUE(written.ok()) << name_of(type);
      EXPECT_EQ(all_tokens(**open_dataset(folder / "m")), all);
    }
  }
}

TEST(TokenDataset, WritersRefuseTokensThatDoNotFitTheType) {
  const TestFolder folder;
  const auto written = [&](const std::string& name, std::int64_t token, TokenType type) {
    return exit_code_of(write_megatron(folder / name, std::vector<Tokens>{{token}}, type));
  };
  EXPECT_EQ(written("x", 65536, TokenType::kU16), ExitCode::kCorruptData);
  EXPECT_EQ(written("x", -1, TokenType::kU16), ExitCode::kCorruptData);
  EXPECT_EQ(written("x", 128, TokenType::kI8), ExitCode::kCorruptData);
  EXPECT_EQ(written("no/x", 1, TokenType::kU16), ExitCode::kCannotCreate);
}

TEST(TokenDataset, GivenFormatOverridesTheFilesBeginning) {
  const TestFolder folder;
  const std::string content = llmc_header(20240520, 1, 1) + Bytes().put(std::uint16_t{7}).str();
  const auto path = folder.write("x.bin", content);
  DatasetOptions options;
  options.format = TokenFormat::kText;
  EXPECT_EQ((*open_dataset(path, options))->num_tokens(), static_cast<std::int64_t>(content.size()));
  options.format = TokenFormat::kLlmc;
  EXPECT_EQ((*open_dataset(path, options))->num_tokens(), 1);
  options.format = TokenFormat::kMegatron;
  EXPECT_EQ(exit_code_of(open_dataset(path, options).status()), ExitCode::kNoInput);  // x.idx does not exist
  for (const char* name : {"auto", "text", "llmc", "megatron"}) EXPECT_TRUE(parse_token_format(name).ok());
  EXPECT_EQ(exit_code_of(parse_token_format("parquet").status()), ExitCode::kUsage);
}

}  // namespace
}  // namespace tessera
