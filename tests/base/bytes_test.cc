// Tests how numbers of bytes are printed and read.

#include "runtime/base/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <regex>

#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

TEST(FormatBytes, PicksAReadableUnit) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(kGiB * 3 / 2), "1.50 GiB");
  EXPECT_EQ(format_bytes(-3 * 1024 * 1024), "-3.00 MiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::int64_t>::max()), "8192.00 PiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::int64_t>::min()), "-8192.00 PiB");
}

TEST(FormatBytes, RoundingNeverPrints1024) {
  EXPECT_EQ(format_bytes(1024 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(kGiB - 1), "1.00 GiB");
  EXPECT_EQ(format_bytes(1024 * 1024 - 1024 * 1024 / 100), "1013.76 KiB");
}

TEST(ParseBytes, ReadsNumbersAndUnits) {
  EXPECT_EQ(*parse_bytes("4096"), 4096);
  EXPECT_EQ(*parse_bytes("0"), 0);
  EXPECT_EQ(*parse_bytes("12B"), 12);
  EXPECT_EQ(*parse_bytes("8GiB"), 8 * kGiB);
  EXPECT_EQ(*parse_bytes("1.5 GiB"), kGiB * 3 / 2);
  EXPECT_EQ(*parse_bytes("500MB"), 500'000'000);
  EXPECT_EQ(*parse_bytes("2TB"), 2'000'000'000'000);
  EXPECT_EQ(*parse_bytes("0.1KB"), 100);
  EXPECT_EQ(*parse_bytes("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
}

TEST(ParseBytes, WrongTextIsRefusedWithItsReason) {
  for (const char* text : {"", " ", "GiB", "-1", "+1", "1.", ".5GiB", "1e3", "1 GiB ", "1  GiB", " 1", "0x10", "1,5GiB",
                           "8192PiB", "9223372036854775808", "1iB", "NaN", "inf"}) {
    const auto bytes = parse_bytes(text);
    EXPECT_FALSE(bytes.ok()) << text << " was read as " << *bytes;
    EXPECT_EQ(exit_code_of(bytes.status()), ExitCode::kConfig) << text;
  }
  EXPECT_THAT(message_of(parse_bytes("8gib").status()), ::testing::HasSubstr("did you mean \"GiB\"?"));
  EXPECT_THAT(message_of(parse_bytes(std::string(100'000, '9')).status()), ::testing::HasSubstr("more than 2^63 - 1"));
}

TEST(ParseBytes, SchemaPatternAcceptsTheSameTexts) {
  const std::regex pattern(kBytesPattern);
  std::mt19937 random(1);
  const std::string alphabet = "0129. KMGTPiBb";
  int matches = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (int n = static_cast<int>(random() % 7); n > 0; --n) text += alphabet[random() % alphabet.size()];
    const bool match = std::regex_match(text, pattern);
    EXPECT_EQ(parse_bytes(text).ok(), match) << '"' << text << '"';
    matches += match ? 1 : 0;
  }
  EXPECT_GT(matches, 500);
}

TEST(ParseBytes, WholeNumbersAreExact) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 1000; ++i) {
    const auto bytes = static_cast<std::int64_t>(random() >> 1);
    EXPECT_EQ(*parse_bytes(std::to_string(bytes)), bytes);
  }
}

}  // namespace
}  // namespace tessera
