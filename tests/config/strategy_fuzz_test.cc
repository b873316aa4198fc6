// Tests damaged strategy files: whatever the text is, the reader ends, reports in its format, and never accepts a text
// that the schema refuses.

#include <gtest/gtest.h>

#include <random>
#include <regex>

#include "runtime/base/status.h"
#include "runtime/config/strategy_docs.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_table.h"
#include "tests/config/strategy_schema.h"

namespace tessera {
namespace {

using nlohmann::json;

// Returns the position of a message line as a pair that can be sorted. The test fails if the line is not in the format.
std::pair<long, long> position_of(const std::string& line) {
  static const std::regex format(R"(^f:(\d+):(\d+): (/.*?): .+$)");
  std::smatch parts;
  EXPECT_TRUE(std::regex_match(line, parts, format)) << line;
  return parts.size() < 3 ? std::pair(0L, 0L) : std::pair(std::stol(parts[1]), std::stol(parts[2]));
}

void check_refusal(const absl::Status& status) {
  EXPECT_EQ(exit_code_of(status), ExitCode::kConfig);
  std::istringstream lines(message_of(status));
  std::pair<long, long> last{0, 0};
  for (std::string line; std::getline(lines, line);) {
    if (line.find(" more errors") != std::string::npos || line.find("hint: docs/") != std::string::npos) continue;
    const auto position = position_of(line);
    EXPECT_LE(last, position) << message_of(status);
    last = position;
  }
  EXPECT_GT(last.first, 0);
}

// Numbers such as 4.0 are integers for Tessera and for draft 7 of JSON schema, but not for this validator.
json with_whole_numbers_as_integers(const json& value) {
  if (value.is_number_float()) {
    const double x = value.get<double>();
    return x == std::floor(x) && std::abs(x) < 1e15 ? json(static_cast<std::int64_t>(x)) : value;
  }
  // valijson reads a number that is too large for a signed integer as a negative number.
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) return json(value.get<double>());
  if (!value.is_structured()) return value;
  json copy = value;
  for (json& child : copy) child = with_whole_numbers_as_integers(child);
  return copy;
}

// Returns true if the text was accepted.
bool check(const std::string& text) {
  const auto strategy = parse_strategy(text, "f");
  if (!strategy.ok()) {
    check_refusal(strategy.status());
    return false;
  }
  EXPECT_EQ(schema_errors(with_whole_numbers_as_integers(json::parse(text))), "") << text;
  const auto again = parse_strategy(strategy->to_json(), "f");
  EXPECT_TRUE(again.ok()) << again.status() << text;
  if (again.ok()) {
    EXPECT_EQ(again->to_json(), strategy->to_json());
  }
  return true;
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::string mutate(std::string text) {
    for (int i = below(4); i >= 0; --i) apply(text);
    return text;
  }
  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }

 private:
  std::size_t place(const std::string& text) {
    return static_cast<std::size_t>(below(static_cast<int>(text.size()) + 1));
  }

  void apply(std::string& text) {
    static const std::vector<std::string> tokens = {"{",
                                                    "}",
                                                    "[",
                                                    "]",
                                                    ",",
                                                    ":",
                                                    "\"",
                                                    "\\",
                                                    "null",
                                                    "true",
                                                    "-1",
                                                    "0",
                                                    "1e999",
                                                    "1e-999",
                                                    "NaN",
                                                    "//",
                                                    "9999999999999999999999",
                                                    "0.5",
                                                    "\"lr\"",
                                                    "\"optimizer\": {}",
                                                    "\"offload\": 1,",
                                                    "\"prefetch\": 2,",
                                                    "\xFF",
                                                    "\xC3",
                                                    "\xE2\x82",
                                                    std::string(1, '\0'),
                                                    "\n",
                                                    " ",
                                                    "\"8GiB\"",
                                                    "\"FULL_SHARD\"",
                                                    "\\u0000",
                                                    "\\ud800"};
    const std::size_t at = place(text);
    switch (below(6)) {
      case 0:
        text.insert(at, tokens[static_cast<std::size_t>(below(static_cast<int>(tokens.size())))]);
        break;
      case 1:
        text.erase(at, static_cast<std::size_t>(1 + below(8)));
        break;
      case 2:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 3:
        text.insert(at, text.substr(place(text), static_cast<std::size_t>(below(40))));
        break;
      case 4:
        if (below(8) == 0) text.resize(at);
        break;
      default:
        replace_digit(text, at);
        break;
    }
  }
  // Replaces a digit by a random digit. This keeps the syntax and moves values to both sides of their limits.
  void replace_digit(std::string& text, std::size_t at) {
    const std::size_t digit = text.find_first_of("0123456789", at);
    if (digit != std::string::npos) text[digit] = static_cast<char>('0' + below(10));
  }

  std::mt19937 random_;
};

TEST(StrategyFuzz, DamagedTextNeverGetsPastTheReader) {
  const std::vector<std::string> seeds = {
      strategy_example(), Strategy{}.to_json(), "{}",
      R"({"mesh":{"shard":2},"memory":{"limit":"8GiB"},"units":{"classes":["A"]}})"};
  Mutator mutator(20240501);
  int accepted = 0;
  for (int i = 0; i < 20'000 && !::testing::Test::HasFailure(); ++i) {
    accepted += check(mutator.mutate(seeds[static_cast<std::size_t>(i) % seeds.size()])) ? 1 : 0;
  }
  EXPECT_GT(accepted, 200) << "the mutations are too wild to try what is accepted";
}

TEST(StrategyFuzz, EveryPrefixOfAFileIsRefused) {
  const std::string text = strategy_example();
  const std::size_t end = text.rfind('}');
  for (std::size_t length = 0; length <= end; ++length) EXPECT_FALSE(check(text.substr(0, length))) << length;
}

// Any value of the table may be put at any key. This gives values of the right kind at a wrong key, and combinations of
// keys.
TEST(StrategyFuzz, ShuffledValuesAreAcceptedOnlyIfTheSchemaAccepts) {
  std::vector<std::string> values = {"null",  "{}",   "[]",      "-1",     "1.5",
                                     "1e300", "\"\"", "[1,2,3]", "[true]", "18446744073709551615"};
  for (const StrategyKey& key : strategy_keys()) {
    values.push_back(key.example_json);
    for (const Choice& choice : key.field.choices) values.push_back('"' + choice.name + '"');
  }
  Mutator random(7);
  int accepted = 0;
  for (int i = 0; i < 5'000 && !::testing::Test::HasFailure(); ++i) {
    json file = json::object();
    for (int count = random.below(4); count >= 0; --count) {
      const StrategyKey& key =
          strategy_keys()[static_cast<std::size_t>(random.below(static_cast<int>(strategy_keys().size())))];
      const bool own = random.below(2) == 0;
      const auto other = values[static_cast<std::size_t>(random.below(static_cast<int>(values.size())))];
      file[json::json_pointer(key.pointer)] = json::parse(own ? key.example_json : other);
    }
    accepted += check(file.dump()) ? 1 : 0;
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace tessera
