// Tests the functions for text: quoting, width, edit distance, guesses of names, lists and number ranges.

#include "runtime/base/text.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(QuotedText, EscapesControlCharactersAndNeverCutsOne) {
  EXPECT_EQ(quoted_text("a\"b\n"), R"("a\"b\n")");
  EXPECT_EQ(quoted_text("\x1b[31m"), "\"\\u001b[31m\"");
  EXPECT_EQ(quoted_text("\xFF"), "\"\xEF\xBF\xBD\"");
  EXPECT_EQ(quoted_text(std::string(1000, 'x'), 3), "\"xxx...\"");
  EXPECT_EQ(quoted_text("xxx", 3), "\"xxx\"");
  EXPECT_EQ(quoted_text("\xC3\xA9\xC3\xA9\xC3\xA9", 2), "\"\xC3\xA9\xC3\xA9...\"") << "never cut inside a character";
}

TEST(Counted, TakesTheWordOfTheNumber) {
  EXPECT_EQ(counted(0, "rank"), "0 ranks");
  EXPECT_EQ(counted(1, "rank"), "1 rank");
  EXPECT_EQ(counted(std::size_t{2}, "rank"), "2 ranks");
  EXPECT_EQ(counted(1, "entry", "entries"), "1 entry");
  EXPECT_EQ(counted(2, "entry", "entries"), "2 entries");
}

TEST(TextWidth, CountsCharacters) {
  EXPECT_EQ(text_width(""), 0u);
  EXPECT_EQ(text_width("abc"), 3u);
  EXPECT_EQ(text_width("5 \xC2\xB5s"), 4u);
}

TEST(EditDistance, CountsEditsAndSwapsButNotCase) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("FULL_SHRAD", "FULL_SHARD"), 1u) << "neighbours swapped";
  EXPECT_EQ(edit_distance("AdamW", "adamw"), 0u);
}

TEST(EditDistance, IsSymmetricAndZeroOnlyForEqualWords) {
  const std::vector<std::string> words = {"",         "a",         "lr",       "betas", "beta",
                                          "momentum", "dampening", "nesterov", "ab",    "ba"};
  for (const std::string& a : words) {
    for (const std::string& b : words) {
      EXPECT_EQ(edit_distance(a, b), edit_distance(b, a));
      EXPECT_EQ(edit_distance(a, b) == 0, a == b);
      EXPECT_LE(edit_distance(a, b), std::max(a.size(), b.size()));
    }
  }
}

TEST(Nearest, SuggestsOnlyWordsThatAreCloseEnough) {
  const std::vector<std::string> words = {"optimizer", "units", "lr"};
  EXPECT_EQ(nearest("optimiser", words), "optimizer");
  EXPECT_EQ(nearest("LR", words), "lr");
  EXPECT_EQ(nearest("zebra", words), "");
  EXPECT_EQ(nearest("", words), "");
  EXPECT_EQ(nearest(std::string(1'000'000, 'u'), words), "");
  EXPECT_EQ(did_you_mean("unit", words), ". [T0426] hint: did you mean \"units\"?");
  EXPECT_EQ(hint_of_names("unit", words), did_you_mean("unit", words));
  EXPECT_EQ(hint_of_names("zzzzzz", words), ". [T0427] hint: known here: optimizer, units, lr");
}

TEST(Joined, PutsSeparatorsBetween) {
  EXPECT_EQ(joined({}), "");
  EXPECT_EQ(joined({"a", "b", "c"}), "a, b, c");
  EXPECT_EQ(joined_numbers({}), "");
  EXPECT_EQ(joined_numbers({2, 13}), "2, 13");
  EXPECT_EQ(joined_numbers({2, 13}, ","), "2,13");
}

TEST(Clipped, SaysHowManyBytesAreLeftOut) {
  EXPECT_EQ(clipped("short", 10), "short");
  EXPECT_EQ(clipped(std::string(12345, 'x'), 3), "xxx... (12,342 bytes more)");
  EXPECT_EQ(clipped("a\xC3\xA4z", 2), "a... (3 bytes more)");  // no character is cut in half
}

TEST(NumberRanges, LongListsAreShortenedToRanges) {
  EXPECT_EQ(number_ranges({}), "");
  EXPECT_EQ(number_ranges({3}), "3");
  EXPECT_EQ(number_ranges({3, 4}), "3, 4");
  EXPECT_EQ(number_ranges({0, 1, 2, 3, 7, 9, 10, 11}), "0-3, 7, 9-11");
  EXPECT_EQ(number_ranges({1, 3, 5, 7, 9}, 2), "1, 3 and 3 more");
  std::vector<int> odd;
  for (int i = 1; i < 200000; i += 2) odd.push_back(i);
  EXPECT_LT(number_ranges(odd).size(), 100u);
}

}  // namespace
}  // namespace tessera
