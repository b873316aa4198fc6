#include "runtime/config/json_document.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <unordered_map>

#include "runtime/base/text.h"

// Reads JSON with positions. nlohmann's lexer does the reading. CountingIterator counts the characters that the lexer
// takes, and TreeBuilder, its handler, computes each token's place from that count. If the text is not JSON, functions
// further below guess the intended text (`hint_for`) and shorten nlohmann's message (`reason_in`).

namespace tessera {
namespace {

constexpr std::string_view kBetweenTokens = " \t\r\n,:]}";
constexpr std::size_t kLongestPointerKey = 80;

// Counts the characters that nlohmann's lexer takes, so that the handler can use the lexer's position in the text.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, std::size_t* taken) : at_(at), taken_(taken) {}
  const char& operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*taken_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  std::size_t* taken_;
};

// Builds the tree. nlohmann calls this class right after it has read a token, so the position in the text is the
// token's end. The token begins after the end of the previous token and the separators between the two.
class TreeBuilder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  TreeBuilder(std::string_view text, const std::size_t& taken, Diagnostics& diagnostics, std::size_t most_values)
      : text_(text), taken_(taken), diagnostics_(diagnostics), values_left_(most_values) {
    if (text.starts_with("\xEF\xBB\xBF")) token_end_ = 3;
  }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(std::int64_t value) override { return number(value); }
  bool number_unsigned(std::uint64_t value) override { return number(value); }
  bool number_float(double value, const std::string&) override { return number(value); }
  bool string(std::string& value) override { return scalar(std::move(value)); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // JSON text has none
  bool start_object(std::size_t) override { return open(nlohmann::json::object()); }
  bool start_array(std::size_t) override { return open(nlohmann::json::array()); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }

  bool key(std::string& name) override {
    const std::size_t offset = take_token();
    Open& object = open_.back();
    const auto [first, is_new] = object.keys.emplace(name, offset);
    if (!is_new) {
      diagnostics_.add(offset, json_pointer(object.pointer, name),
                       "given twice. [T0496] hint: remove one; the first is at", first->second);
    }
    pending_key_ = name;
    pending_key_offset_ = offset;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& last_token,
                   const nlohmann::json::exception& error) override;

  JsonNode take_root() { return std::move(root_); }

 private:
  struct Open {
    JsonNode* node;
    std::string pointer;
    std::unordered_map<std::string, std::size_t> keys;  // an object's keys, and where each was first given
  };

  // Returns the offset of the token that was read last.
  std::size_t take_token() {
    const std::size_t start = std::min(text_.find_first_not_of(kBetweenTokens, token_end_), text_.size());
    token_end_ = taken_;
    return start;
  }

  JsonNode& add_node(nlohmann::json value) {
    JsonNode node;
    node.offset = take_token();
    node.value = std::move(value);
    if (open_.empty()) {
      root_ = std::move(node);
      return root_;
    }
    JsonNode& parent = *open_.back().node;
    if (parent.is_object()) {
      node.key = pending_key_;
      node.key_offset = pending_key_offset_;
    }
    parent.children.push_back(std::move(node));
    return parent.children.back();
  }

  bool count_value() {
    if (values_left_-- > 0) return true;
    diagnostics_.add(
        take_token(), "",
        "more values than a file of this kind may have. [T0497] hint: name the right file, or take out what repeats");
    return false;
  }

  bool scalar(nlohmann::json value) {
    if (!count_value()) return false;
    add_node(std::move(value));
    return true;
  }

  bool number(nlohmann::json value) {
    if (!count_value()) return false;
    add_node(std::move(value));
    --token_end_;  // the lexer finds the end of a number only by the character behind it
    return true;
  }

  std::string next_pointer() const {
    if (open_.empty()) return "";
    const Open& parent = open_.back();
    return json_pointer(parent.pointer,
                        parent.node->is_object() ? pending_key_ : std::to_string(parent.node->children.size()));
  }

  bool open(nlohmann::json empty) {
    if (!count_value()) return false;
    std::string pointer = next_pointer();
    // The parent's list of children does not grow before this node is closed, so the pointer to it stays valid.
    JsonNode& node = add_node(std::move(empty));
    if (open_.size() == kMaxJsonDepth) {
      diagnostics_.add(
          node.offset, std::move(pointer),
          fmt::format("nested more than {} deep. [T0498] hint: name the right file, or nest less", kMaxJsonDepth));
      return false;
    }
    open_.push_back({&node, std::move(pointer), {}});
    return true;
  }

  bool end() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::size_t& taken_;
  Diagnostics& diagnostics_;
  std::size_t values_left_;
  std::size_t token_end_ = 0;
  JsonNode root_;
  std::vector<Open> open_;
  std::string pending_key_;
  std::size_t pending_key_offset_ = 0;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Returns a hint if the offending token, which begins `rest`, is a word or a sign of other formats that JSON does not
// have. Returns "" otherwise.
std::string hint_for_token(std::string_view rest) {
  if (rest[0] == '/' || rest[0] == '#') return "[T0499] hint: comments are not allowed";
  if (rest[0] == '\'') return "[T0500] hint: strings stand in double quotes";
  for (const char* word : {"NaN", "nan", "Infinity", "inf", "-Infinity", "-inf", "-NaN", "-nan"}) {
    if (rest.starts_with(word)) return "[T0501] hint: NaN and infinities are not allowed";
  }
  if (rest.starts_with("True") || rest.starts_with("False")) return "[T0502] hint: write true and false in lower case";
  if (rest[0] == '+' || rest[0] == '.') return "[T0503] hint: a number begins with a digit or a minus sign";
  return "";
}

// Returns a hint at the probable mistake in text that stops being JSON at `at`, or "" if the mistake is unknown.
// `reason` is nlohmann's text.
std::string hint_for(std::string_view text, std::size_t at, const std::string& reason) {
  const std::string_view rest = text.substr(at), before = text.substr(0, at);
  const std::size_t last = before.find_last_not_of(" \t\r\n");
  if (rest.empty()) {
    return last == std::string_view::npos ? "[T0504] hint: the file is empty: the smallest is {}"
                                          : "[T0505] hint: the file ends too early: a bracket or brace is not closed";
  }
  if (std::string hint = hint_for_token(rest); !hint.empty()) return hint;
  const char previous = last == std::string_view::npos ? '\0' : before[last];
  if (previous == ',' && (rest[0] == '}' || rest[0] == ']'))
    return "[T0506] hint: no comma may stand before a closing bracket";
  if (previous == '0' && last + 1 == at && is_digit(rest[0])) return "[T0507] hint: a number has no leading zeros";
  const bool wants_end = reason.ends_with("expected '}'") || reason.ends_with("expected ']'");
  if (wants_end && rest[0] != '}' && rest[0] != ']') return "[T0508] hint: a comma is missing before this";
  if (reason.starts_with("object key: ") && std::isalpha(static_cast<unsigned char>(rest[0])) != 0) {
    return "[T0509] hint: keys stand in double quotes";
  }
  return "";
}

// Shortens nlohmann's message, "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while
// parsing WHAT - REASON; last read: '...'; expected WANTED", to "WHAT: REASON; expected WANTED". Tessera adds the
// position itself.
std::string reason_in(const std::string& what) {
  if (what.find("number overflow") != std::string::npos) return "value: the number is too large for a double";
  static const std::string kParsing = "while parsing ";
  const auto begin = what.find(kParsing);
  const auto dash = what.find(" - ", begin);
  if (begin == std::string::npos || dash == std::string::npos) return what;
  const auto end = what.find("; last read: ", dash);
  const auto expected = end == std::string::npos ? end : what.rfind("; expected ");
  const bool has_expected = expected != std::string::npos && expected > end;
  const auto from = begin + kParsing.size();
  return what.substr(from, dash - from) + ": " +
         what.substr(dash + 3, end == std::string::npos ? end : end - dash - 3) +
         (has_expected ? what.substr(expected) : "");
}

bool TreeBuilder::parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) {
  const std::string reason = reason_in(error.what());
  std::size_t at = std::min(text_.find_first_not_of(kBetweenTokens, token_end_), text_.size());
  // Stray commas and brackets are skipped above, but the lexer stopped right after them. If a string is not UTF-8, the
  // position of its bad byte helps more than the beginning of the string.
  const std::size_t last_taken = taken_ == 0 ? 0 : taken_ - 1;
  if (at > last_taken || reason.find("UTF-8") != std::string::npos) at = last_taken;
  if (reason.find("unexpected end of input") != std::string::npos) at = text_.size();
  const std::string hint = hint_for(text_, at, reason);
  diagnostics_.add(at, open_.empty() ? "" : open_.back().pointer,
                   hint.empty()
                       ? "not JSON: in " + reason + ". [T0510] hint: repair this place; json.org shows the grammar"
                       : "not JSON. " + hint);
  return false;
}

}  // namespace

std::optional<JsonNode> parse_json(std::string_view text, Diagnostics& diagnostics, std::size_t most_values) {
  // nlohmann's lexer takes a NUL for the end of the text, and would not see the rest.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    diagnostics.add(nul, "",
                    "a NUL byte: this is not a text file. [T0511] hint: name the right file; this one is binary");
    return std::nullopt;
  }
  std::size_t taken = 0;
  TreeBuilder builder(text, taken, diagnostics, most_values);
  const bool complete = nlohmann::json::sax_parse(CountingIterator(text.data(), &taken),
                                                  CountingIterator(text.data() + text.size(), &taken), &builder);
  if (!complete) return std::nullopt;
  return builder.take_root();
}

std::string json_pointer(const std::string& pointer, std::string_view key) {
  std::string result = pointer + "/";
  // Keys reach a terminal through messages, so control characters and invalid text must be replaced.
  const std::string clean = quoted_text(key, kLongestPointerKey);
  for (const char c : std::string_view(clean).substr(1, clean.size() - 2)) {
    if (c == '~')
      result += "~0";
    else if (c == '/')
      result += "~1";
    else
      result += c;
  }
  return result;
}

std::string describe(const JsonNode& node) {
  const nlohmann::json& value = node.value;
  switch (value.type()) {
    case nlohmann::json::value_t::object:
      return "an object";
    case nlohmann::json::value_t::array:
      return fmt::format("a list of {}", node.children.size());
    case nlohmann::json::value_t::string:
      return "the string " + quoted_text(value.get_ref<const std::string&>());
    case nlohmann::json::value_t::boolean:
    case nlohmann::json::value_t::null:
      return value.dump();
    default:
      return value.dump();
  }
}

}  // namespace tessera
