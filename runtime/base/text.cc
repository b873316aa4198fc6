#include "runtime/base/text.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <random>

namespace tessera {
namespace {

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

char lower(char c) { return static_cast<char>(std::tolower(static_cast<unsigned char>(c))); }

// Returns 1234567 as "1,234,567".
std::string grouped(std::size_t number) {
  std::string text = std::to_string(number);
  for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

// Longer words do not count as misspelled names, since their edit distance would be costly to compute.
constexpr std::size_t kLongestWord = 64;
constexpr std::size_t kMostNamesBytes = 300;

}  // namespace

std::string joined(const std::vector<std::string>& words, std::string_view separator) {
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += separator;
    text += word;
  }
  return text;
}

std::string joined_numbers(const std::vector<int>& numbers, std::string_view separator) {
  std::vector<std::string> words;
  for (const int number : numbers) words.push_back(std::to_string(number));
  return joined(words, separator);
}

std::string either(const std::vector<std::string>& words) {
  if (words.size() < 2) return joined(words);
  return joined({words.begin(), words.end() - 1}) + " or " + words.back();
}

std::string quoted_text(std::string_view text, std::size_t max_length) {
  std::size_t end = 0, characters = 0;
  while (end < text.size() && characters < max_length) {
    ++end;
    while (end < text.size() && continues_character(text[end])) ++end;
    ++characters;
  }
  const nlohmann::json cut = std::string(text.substr(0, end));
  std::string shown = cut.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (end < text.size()) shown.insert(shown.size() - 1, "...");
  return shown;
}

std::string clipped(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  std::size_t end = max_bytes;
  while (end > 0 && continues_character(text[end])) --end;
  return std::string(text.substr(0, end)) + "... (" + grouped(text.size() - end) + " bytes more)";
}

std::string number_ranges(const std::vector<int>& numbers, std::size_t max_ranges) {
  std::string text;
  std::size_t at = 0;
  for (std::size_t ranges = 0; at < numbers.size() && ranges < max_ranges; ++ranges) {
    std::size_t last = at;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[at]);
    if (last > at) text += (last == at + 1 ? ", " : "-") + std::to_string(numbers[last]);
    at = last + 1;
  }
  if (at < numbers.size()) text += " and " + grouped(numbers.size() - at) + " more";
  return text;
}

std::size_t text_width(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return !continues_character(c); }));
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = previous[j - 1] + (lower(a[i - 1]) == lower(b[j - 1]) ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) && lower(a[i - 2]) == lower(b[j - 1]);
      if (swapped) current[j] = std::min(current[j], before[j - 2] + 1);
    }
    before.swap(previous);
    previous.swap(current);
  }
  return previous[b.size()];
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.empty() || word.size() > kLongestWord) return "";
  std::string best;
  std::size_t best_distance = std::min<std::size_t>(3, (word.size() + 2) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance >= best_distance) continue;
    best = candidate;
    best_distance = distance;
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string best = nearest(word, candidates);
  return best.empty() ? "" : ". [T0426] hint: did you mean \"" + best + "\"?";
}

std::string hint_of_names(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string near = did_you_mean(word, candidates);
  return near.empty() ? ". [T0427] hint: known here: " + clipped(joined(candidates), kMostNamesBytes) : near;
}

std::string random_word(std::size_t count) {
  std::random_device random;
  std::string word;
  while (word.size() < count) word += "0123456789abcdef"[random() % 16];
  return word;
}

}  // namespace tessera
