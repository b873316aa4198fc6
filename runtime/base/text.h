#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Helpers for messages that people read. Lengths are in characters (code points), unless a name says `bytes`. Any
/// thread may call them.

/// Joins words: "a, b, c".
std::string joined(const std::vector<std::string>& words, std::string_view separator = ", ");

/// Joins numbers: "2, 3".
std::string joined_numbers(const std::vector<int>& numbers, std::string_view separator = ", ");

/// Joins alternatives: "a, b or c".
std::string either(const std::vector<std::string>& words);

/// Returns a number with its word: "1 rank", "2 ranks". `more` is the word for other numbers than 1. If `more` is
/// empty, this word is `one` with an s.
std::string counted(std::integral auto count, std::string_view one, std::string_view more = {}) {
  std::string text = std::to_string(count) + " ";
  text += count == 1 || more.empty() ? one : more;
  return count == 1 || !more.empty() ? text : text + "s";
}

/// Returns the text in double quotes, as JSON writes it. Control characters are escaped, and invalid UTF-8 is replaced.
/// The text is cut to `max_length` characters ("..." marks the cut). The result is safe to print, whatever bytes a file
/// has.
std::string quoted_text(std::string_view text, std::size_t max_length = 60);

/// Messages have a limited length: long texts of a user, a file or a large job are cut here before they are printed.
///
/// Returns `text`, or its beginning and the number of bytes left out: "abc... (9,999 bytes more)". It never cuts a
/// character in two.
std::string clipped(std::string_view text, std::size_t max_bytes);
/// Returns rising numbers as ranges, at most `max_ranges` of them: "0-3, 7, 9-12 and 99,980 more".
std::string number_ranges(const std::vector<int>& numbers, std::size_t max_ranges = 8);

/// Returns the number of characters of UTF-8 text. A stray byte of invalid text counts as a character if it does not
/// continue one.
std::size_t text_width(std::string_view text);

/// Returns the smallest number of insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`,
/// where upper and lower case are equal (optimal string alignment). It takes time proportional to |a| x |b|, and memory
/// proportional to |b|.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Returns the candidate nearest to `word`, or "" if none is near enough to be a misspelling. The edit distance of a
/// misspelling is at most a third of the word's length, rounded up, and at most 3.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

/// Returns ". hint: did you mean \"lr\"?", or "" if nothing is near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// Returns the text of did_you_mean. If no name is near, returns ". hint: known here: lr, type" with the candidates,
/// cut to 300 bytes.
std::string hint_of_names(std::string_view word, const std::vector<std::string>& candidates);

/// Returns a word of `count` random hexadecimal digits, which no stranger can guess.
std::string random_word(std::size_t count);

}  // namespace tessera
