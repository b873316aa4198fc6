// Tests the statistics of a dataset: unigram entropy and vocabulary.

#include "runtime/data/dataset_stats.h"

#include <gmock/gmock.h>

#include <cmath>

#include "runtime/base/status.h"
#include "runtime/data/token_writers.h"
#include "tests/data/test_files.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

double entropy_of(const std::string& text) {
  const TestFolder folder;
  return *unigram_entropy(**open_dataset(folder.write("a.txt", text)));
}

TEST(DatasetStats, EntropyOfBytesEqualsTheFormula) {
  EXPECT_DOUBLE_EQ(entropy_of("aaaa"), 0);
  EXPECT_DOUBLE_EQ(entropy_of("abab"), std::log(2));
  EXPECT_NEAR(entropy_of("aaab"), 0.75 * std::log(4 / 3.0) + 0.25 * std::log(4), 1e-12);
  std::string all;
  for (int i = 0; i < 256 * 1000; ++i) all += static_cast<char>(i);  // the data are longer than one run of the scan
  EXPECT_NEAR(entropy_of(all), std::log(256), 1e-12);
}

TEST(DatasetStats, EntropyOfFourBillionTokenIdsEqualsTheFormula) {
  const TestFolder folder;
  const std::vector<std::uint32_t> tokens = {4'000'000'000, 4'000'000'001, 4'000'000'000, 5};
  const auto dataset = open_dataset(folder.write("a.bin", llmc_file(tokens)));
  EXPECT_NEAR(*unigram_entropy(**dataset), 0.5 * std::log(2) + 0.5 * std::log(4), 1e-12);
}

absl::Status checked(const TokenDataset& dataset, std::int64_t vocab_size) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(dataset.num_tokens()));
  TESSERA_RETURN_IF_ERROR(dataset.copy(0, tokens));
  return check_tokens(dataset, 0, tokens, vocab_size);
}

TEST(DatasetStats, TokenOutsideTheVocabularyIsNamedWithItsPlace) {
  const TestFolder folder;
  std::vector<std::uint16_t> tokens(200'000, 7);
  tokens[150'000] = 50257;
  const auto dataset = open_dataset(folder.write("a.bin", llmc_file(tokens)));
  EXPECT_TRUE(checked(**dataset, 50258).ok());
  const auto status = checked(**dataset, 50257);
  EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData);
  EXPECT_THAT(message_of(status),
              HasSubstr("a.bin at byte 301024: token 150000 is 50257, outside of the vocabulary of 50257"));

  ASSERT_TRUE(write_megatron(folder / "m", std::vector<std::vector<std::int64_t>>{{3, -2}}, TokenType::kI32).ok());
  EXPECT_THAT(message_of(checked(**open_dataset(folder / "m"), 10)), HasSubstr("token 1 is -2"));
}

}  // namespace
}  // namespace tessera
