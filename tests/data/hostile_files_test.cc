// Tests files that are wrong in every way we can think of. Each is refused with its name, an offset and exit code 65 or
// 66, and is never read beyond its end. (Run this under AddressSanitizer too. The last page of a mapped file ends with
// the file only if its size is a multiple of a page. The tests therefore check the verdict, and not the absence of a
// crash.)

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <limits>
#include <random>

#include "runtime/base/status.h"
#include "runtime/data/token_dataset.h"
#include "tests/data/test_files.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kMax = std::numeric_limits<std::uint64_t>::max();

template <typename T>
std::string patched(std::string bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
  return bytes;
}

const std::string kLlmc = llmc_header(20240520, 1, 3) + Bytes().all(std::vector<std::uint16_t>{1, 2, 3}).str();
const std::string kIndex = megatron_index(8, {2, 1}, {0, 4}, {0, 1, 2});
const std::string kTokens = Bytes().all(std::vector<std::uint16_t>{1, 2, 3});

absl::Status open_llmc_bytes(const TestFolder& folder, const std::string& bytes) {
  return open_llmc(folder.write("x.bin", bytes)).status();
}
absl::Status open_megatron_bytes(const TestFolder& folder, const std::string& index, const std::string& tokens) {
  folder.write("x.idx", index);
  folder.write("x.bin", tokens);
  return open_megatron(folder / "x").status();
}

TEST(HostileFiles, UnchangedFilesAreAccepted) {
  const TestFolder folder;
  EXPECT_TRUE(open_llmc_bytes(folder, kLlmc).ok());
  EXPECT_TRUE(open_megatron_bytes(folder, kIndex, kTokens).ok());
}

TEST(HostileFiles, LlmcOfWrongLengthIsRefusedAtItsByte) {
  const TestFolder folder;
  for (std::size_t size = 0; size < kLlmc.size(); ++size) {
    const auto status = open_llmc_bytes(folder, kLlmc.substr(0, size));
    ASSERT_EQ(exit_code_of(status), ExitCode::kCorruptData) << size;
    ASSERT_THAT(message_of(status), AllOf(HasSubstr("x.bin"), HasSubstr("at byte "))) << size;
  }
  EXPECT_EQ(exit_code_of(open_llmc_bytes(folder, kLlmc + "x")), ExitCode::kCorruptData);
}

TEST(HostileFiles, MegatronOfWrongLengthIsRefusedAtItsByte) {
  const TestFolder folder;
  for (std::size_t size = 0; size < kIndex.size(); ++size) {
    const auto status = open_megatron_bytes(folder, kIndex.substr(0, size), kTokens);
    ASSERT_EQ(exit_code_of(status), ExitCode::kCorruptData) << size;
    ASSERT_THAT(message_of(status), AllOf(HasSubstr("x.idx"), HasSubstr("at byte "))) << size;
  }
  for (std::size_t size = 0; size < kTokens.size(); ++size)
    ASSERT_EQ(exit_code_of(open_megatron_bytes(folder, kIndex, kTokens.substr(0, size))), ExitCode::kCorruptData)
        << size;
  EXPECT_EQ(exit_code_of(open_megatron_bytes(folder, kIndex + "x", kTokens)), ExitCode::kCorruptData);
  EXPECT_THAT(message_of(open_megatron_bytes(folder, kIndex, kTokens + "xx")), HasSubstr("do not belong together"));
}

TEST(HostileFiles, WrongLlmcHeaderFieldIsNamed) {
  const TestFolder folder;
  struct Row {
    std::string bytes;
    const char* said;
  };
  const std::vector<Row> table = {
      {patched(kLlmc, 0, std::int32_t{20240521}), "at byte 0: want llm.c's magic number"},
      {patched(kLlmc, 0, std::int32_t{20240801}), "at byte 4: want version 7"},
      {patched(kLlmc, 4, std::int32_t{2}), "at byte 4: want version 1 after magic number 20240520, got 2"},
      {patched(kLlmc, 8, std::int32_t{0}), "at byte 8"},
      {patched(kLlmc, 8, std::int32_t{-1}), "got -1"},
      {patched(kLlmc, 8, std::int32_t{2}), "want a file of 1028 bytes, got 1030"},
      {patched(kLlmc, 8, std::numeric_limits<std::int32_t>::max()), "want a file of 4294968318 bytes"},
      {patched(kLlmc, 8, std::numeric_limits<std::int32_t>::min()), "got -2147483648"},
  };
  for (const Row& row : table) {
    const auto status = open_llmc_bytes(folder, row.bytes);
    EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData) << row.said;
    EXPECT_THAT(message_of(status), AllOf(HasSubstr("x.bin"), HasSubstr(row.said)));
  }
}

TEST(HostileFiles, WrongMegatronIndexFieldIsNamed) {
  const TestFolder folder;
  const auto index = [](std::vector<std::int32_t> lengths, std::vector<std::int64_t> pointers,
                        std::vector<std::int64_t> documents) {
    return megatron_index(8, lengths, pointers, documents);
  };
  struct Row {
    std::string bytes;
    const char* said;
  };
  const std::vector<Row> table = {
      {patched(kIndex, 0, 'm'), "at byte 0: want the magic text"},
      {patched(kIndex, 8, 'x'), "at byte 0"},
      {patched(kIndex, 9, std::uint64_t{2}), "at byte 9: want version 1, got 2"},
      {patched(kIndex, 9, kMax), "at byte 9"},
      {patched(kIndex, 17, std::uint8_t{0}), "at byte 17"},
      {patched(kIndex, 17, std::uint8_t{6}), "got 6, a floating-point type"},
      {patched(kIndex, 17, std::uint8_t{9}), "got 9"},
      {patched(kIndex, 17, std::uint8_t{255}), "got 255"},
      {patched(kIndex, 17, std::uint8_t{5}), "lies outside of the .bin file"},
      // These counts overflow when they are multiplied by 4, 8 or 12.
      {patched(kIndex, 18, kMax), "at byte 18"},
      {patched(kIndex, 18, std::uint64_t{1} << 63), "at byte 18"},
      {patched(kIndex, 18, std::uint64_t{1} << 62), "at byte 18"},
      {patched(kIndex, 18, kMax / 12 + 1), "at byte 18"},
      {patched(kIndex, 26, kMax), "at byte 26"},
      {patched(kIndex, 26, std::uint64_t{1} << 61), "at byte 26"},
      {patched(kIndex, 26, (std::uint64_t{1} << 61) + 3), "at byte 26"},
      {patched(kIndex, 26, std::uint64_t{2}), "at byte 26"},
      {patched(patched(kIndex, 18, std::uint64_t{0}), 26, std::uint64_t{6}), "at byte 34: want a document start"},
      {index({-1, 1}, {0, 4}, {0, 1, 2}), "at byte 34: sequence 0 has length -1"},
      {index({2147483647, 1}, {0, 4}, {0, 1, 2}), "at byte 42"},
      {index({2, 1}, {-2, 4}, {0, 1, 2}), "at byte 42"},
      {index({2, 1}, {0, 6}, {0, 1, 2}), "at byte 50: sequence 1 of 1 tokens of uint16 at byte 6"},
      {index({2, 1}, {0, 5}, {0, 1, 2}), "at byte 50"},
      {index({2, 1}, {0, std::numeric_limits<std::int64_t>::max()}, {0, 1, 2}), "at byte 50"},
      {index({2, 1}, {std::numeric_limits<std::int64_t>::min(), 4}, {0, 1, 2}), "at byte 42"},
      {index({2, 1}, {0, 4}, {0, 2, 1}), "at byte 74: want a document start from 2 to 2, got 1"},
      {index({2, 1}, {0, 4}, {0, 1, 3}), "at byte 74"},
      {index({2, 1}, {0, 4}, {-1, 1, 2}), "at byte 58"},
      {index({0, 0}, {0, 0}, {0, 1, 2}), "without a single token"},
      {index({}, {}, {0}), "without a single token"},
      {index({}, {}, {}), "without a single token"},
  };
  for (const Row& row : table) {
    const auto status = open_megatron_bytes(folder, row.bytes, kTokens);
    EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData) << row.said;
    EXPECT_THAT(message_of(status), HasSubstr(row.said));
  }
}

/// One to four random bytes of a header are changed. Either the file is refused, or it is a dataset whose tokens can
/// all be read.
TEST(HostileFiles, RandomHeaderBytesAreRefusedOrReadWhole) {
  const TestFolder folder;
  std::mt19937 random(11);
  int accepted = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string index = kIndex, tokens = kTokens, llmc = kLlmc;
    for (unsigned i = 0; i <= random() % 4; ++i) index[random() % index.size()] = static_cast<char>(random());
    for (unsigned i = 0; i <= random() % 4; ++i) llmc[random() % 16] = static_cast<char>(random());
    folder.write("x.idx", index);
    folder.write("x.bin", tokens);
    const auto megatron = open_megatron(folder / "x");
    const auto dataset = open_llmc(folder.write("y.bin", llmc));
    for (const auto* opened : {&megatron, &dataset}) {
      if (opened->ok()) {
        all_tokens(***opened);
        ++accepted;
      } else {
        ASSERT_EQ(exit_code_of(opened->status()), ExitCode::kCorruptData);
      }
    }
  }
  EXPECT_GT(accepted, 0);  // some bytes of a header have no meaning
}

TEST(HostileFiles, PipesFoldersAndDanglingLinksAreRefused) {
  const TestFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_directory(folder / "empty");
  std::filesystem::create_directory(folder / "d.bin");
  std::filesystem::create_symlink(folder / "nowhere", folder / "dangling");
  const auto code = [](const auto& opened) { return exit_code_of(opened.status()); };
  EXPECT_EQ(code(open_dataset(folder / "missing")), ExitCode::kNoInput);
  EXPECT_EQ(code(open_dataset(folder / "missing.bin")), ExitCode::kNoInput);
  EXPECT_EQ(code(open_dataset(folder / "dangling")), ExitCode::kNoInput);
  EXPECT_EQ(code(open_dataset(folder / "pipe")), ExitCode::kCorruptData);
  EXPECT_EQ(code(open_dataset("/dev/zero")), ExitCode::kCorruptData);
  EXPECT_EQ(code(open_dataset(folder / "empty")), ExitCode::kCorruptData);
  EXPECT_EQ(code(open_llmc(folder / "d.bin")), ExitCode::kCorruptData);
  EXPECT_EQ(code(open_dataset(folder.write("empty.txt", ""))), ExitCode::kCorruptData);
  folder.write("alone.idx", kIndex);
  EXPECT_EQ(code(open_dataset(folder / "alone")), ExitCode::kNoInput);
}

TEST(HostileFiles, OtherFormatsAreNotReadAsText) {
  const TestFolder folder;
  const std::vector<std::pair<std::string, const char*>> table = {
      {std::string("PK\x03\x04zip"), "zip"},   {std::string("\x80\x02}q"), "pickle"},
      {std::string("\x1f\x8b\x08"), "gzip"},   {std::string("PAR1...."), "Parquet"},
      {std::string("\x93NUMPY\x01"), "NumPy"}, {std::string("\x28\xb5\x2f\xfd.."), "zstd"}};
  for (const auto& [bytes, said] : table) {
    const auto path = folder.write("file.data", bytes);
    const auto status = open_dataset(path).status();
    EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData);
    EXPECT_THAT(message_of(status), AllOf(HasSubstr(said), HasSubstr("hint")));
    DatasetOptions options;
    options.format = TokenFormat::kText;
    EXPECT_TRUE(open_dataset(path, options).ok());  // a program that asks for text gets the bytes
  }
  const auto status = open_dataset(folder.write("unknown.bin", "abcdefgh")).status();
  EXPECT_THAT(message_of(status), AllOf(HasSubstr("20240520"), HasSubstr("got 1684234849")));
}

}  // namespace
}  // namespace tessera
