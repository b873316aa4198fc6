// Tests readers of measurements with damaged files. Every file is read or refused, and a refusal names the file.

#include <gtest/gtest.h>

#include <random>

#include "runtime/base/status.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

/// Returns `text` after some bytes are changed, left out, or doubled.
std::string damaged(std::string text, std::mt19937_64& random) {
  const std::string words = "{}[]\",:0123456789.eE+- \\u\n\0\xff";
  for (std::uint64_t changes = 1 + random() % 4; changes > 0 && !text.empty(); --changes) {
    const std::size_t at = random() % text.size();
    switch (random() % 4) {
      case 0:
        text[at] = words[random() % words.size()];
        break;
      case 1:
        text.erase(at, random() % 40);
        break;
      case 2:
        text.insert(at, text.substr(random() % text.size(), random() % 40));
        break;
      default:
        text.insert(at, std::string(1 + random() % 20, words[random() % words.size()]));
    }
  }
  return text;
}

template <class Parse>
void expect_read_or_refused(const std::string& text, const Parse& parse) {
  std::mt19937_64 random(31);
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    const std::string hostile = damaged(text, random);
    const auto result = parse(hostile, "hostile.json");
    if (result.ok()) {
      EXPECT_EQ(*parse(to_json(*result), "again"), *result) << hostile;
      continue;
    }
    ++refused;
    EXPECT_EQ(exit_code_of(result.status()), ExitCode::kCorruptData);
    EXPECT_EQ(message_of(result.status()).rfind("hostile.json:", 0), 0u) << result.status();
  }
  EXPECT_GT(refused, 1000);
}

TEST(HostileFiles, RandomlyDamagedLinksAreReadOrRefused) {
  expect_read_or_refused(to_json(links_of(1.5e-9, 2e-5)), parse_links);
}

TEST(HostileFiles, RandomlyDamagedProfilesAreReadOrRefused) {
  const TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 2, 0, 0}, 3);
  expect_read_or_refused(to_json(timed.profile), parse_step_profile);
}

TEST(HostileFiles, ErrorMessagesHaveABoundedLength) {
  std::string text = "{\"entries\": [";
  for (int i = 0; i < 60000; ++i) text += "{\"unit\": 0, \"pass\": 0, \"seconds\": 0},";
  text += "{}]}";
  const std::string message = message_of(parse_step_profile(text, "x").status());
  EXPECT_LT(message.size(), 20000u);
  EXPECT_LT(message_of(parse_links("{\"" + std::string(50000, 'x') + "\": 1}", "x").status()).size(), 2000u);
}

}  // namespace
}  // namespace tessera::testing
