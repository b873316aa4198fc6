#include "app/import/yaml_document.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "runtime/base/text.h"

namespace tessera::app {
namespace {

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

template <typename Number>
std::optional<Number> whole_number(std::string_view text) {
  if (text.starts_with("+")) text.remove_prefix(1);
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

// What a word without quotes stands for.
nlohmann::json plain_value(const std::string& word) {
  if (is_one_of(word, {"", "~", "null", "Null", "NULL"})) return nullptr;
  if (is_one_of(word, {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})) return true;
  if (is_one_of(word, {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})) return false;
  if (const auto integer = whole_number<std::int64_t>(word)) return *integer;
  const bool has_digit = word.find_first_of("0123456789") != std::string::npos;  // not inf, not nan
  if (const auto number = whole_number<double>(word); has_digit && number && std::isfinite(*number)) return *number;
  return word;
}

std::size_t offset_of(const YAML::Mark& mark) { return static_cast<std::size_t>(std::max(mark.pos, 0)); }

// Builds the tree. A refusal is thrown as yaml-cpp's own errors are, and caught where those are.
class YamlBuilder final : public YAML::EventHandler {
 public:
  YamlBuilder(Diagnostics& diagnostics, std::size_t most_values)
      : diagnostics_(diagnostics), values_left_(most_values) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ > 0) throw YAML::ParserException(mark, "a second document: the file must have one");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { scalar(mark, nullptr, ""); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw YAML::ParserException(mark, "aliases (*name) are not read. Write the value out");
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, const std::string& text) override {
    check_tag(mark, tag);
    scalar(mark, tag == "?" ? plain_value(text) : nlohmann::json(text), text);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, nlohmann::json::array());
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, YAML::EmitterStyle::value) override {
    open(mark, tag, nlohmann::json::object());
  }
  void OnMapEnd() override { open_.pop_back(); }

  JsonNode take_root() { return std::move(root_); }

 private:
  struct Open {
    JsonNode* node;
    std::string pointer;
    std::map<std::string, std::size_t> keys;  // of an object: where each was first given
    bool wants_key;
    std::string key;
    std::size_t key_offset = 0;
  };

  static void check_tag(const YAML::Mark& mark, const std::string& tag) {
    if (!tag.empty() && tag != "?" && tag != "!")
      throw YAML::ParserException(mark, "tags (!name) are not read. Leave it out");
  }

  void take_key(const YAML::Mark& mark, const std::string& text) {
    Open& object = open_.back();
    const auto [first, is_new] = object.keys.emplace(text, offset_of(mark));
    if (!is_new)
      diagnostics_.add(offset_of(mark), json_pointer(object.pointer, text),
                       "given twice. hint: remove one; the first is at", first->second);
    object.key = text;
    object.key_offset = offset_of(mark);
    object.wants_key = false;
  }

  bool is_at_key() const { return !open_.empty() && open_.back().wants_key; }

  JsonNode& add(const YAML::Mark& mark, nlohmann::json value) {
    if (values_left_ == 0)
      throw YAML::ParserException(mark, "more values than a file of this kind may have. hint: is it the right file?");
    --values_left_;
    JsonNode node;
    node.offset = offset_of(mark);
    node.value = std::move(value);
    if (open_.empty()) return root_ = std::move(node);
    Open& parent = open_.back();
    if (parent.node->is_object()) {
      node.key = parent.key;
      node.key_offset = parent.key_offset;
      parent.wants_key = true;
    }
    parent.node->children.push_back(std::move(node));
    return parent.node->children.back();
  }

  void scalar(const YAML::Mark& mark, nlohmann::json value, const std::string& text) {
    if (is_at_key()) return take_key(mark, text);
    add(mark, std::move(value));
  }

  void open(const YAML::Mark& mark, const std::string& tag, nlohmann::json empty) {
    check_tag(mark, tag);
    if (is_at_key()) throw YAML::ParserException(mark, "a key must be a word, not a list or a mapping");
    if (open_.size() == kMaxJsonDepth)
      throw YAML::ParserException(
          mark, "nested more than " + std::to_string(kMaxJsonDepth) + " deep. hint: is it the right file?");
    std::string pointer = next_pointer();
    const bool is_object = empty.is_object();
    // The parent's list of children does not grow before this node is closed, so the pointer to it stays good.
    JsonNode& node = add(mark, std::move(empty));
    open_.push_back({&node, std::move(pointer), {}, is_object, ""});
  }

  std::string next_pointer() const {
    if (open_.empty()) return "";
    const Open& parent = open_.back();
    return json_pointer(parent.pointer,
                        parent.node->is_object() ? parent.key : std::to_string(parent.node->children.size()));
  }

  Diagnostics& diagnostics_;
  std::size_t values_left_;
  std::size_t documents_ = 0;
  JsonNode root_;
  std::vector<Open> open_;
};

// nlohmann's writer is strict about UTF-8, and says where the first bad byte is.
bool is_utf8(const std::string& text) {
  try {
    nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
  return true;
}

}  // namespace

std::optional<JsonNode> parse_yaml(const std::string& text, Diagnostics& diagnostics, std::size_t most_values) {
  if (const std::size_t nul = text.find('\0'); nul != std::string::npos) {
    diagnostics.add(nul, "", "a NUL byte: this is not a text file. hint: is it the right file?");
    return std::nullopt;
  }
  if (!is_utf8(text)) {
    diagnostics.add(
        0, "", "not UTF-8: this is not a text file, or one in another encoding. hint: iconv -t UTF-8 writes it anew");
    return std::nullopt;
  }
  std::istringstream stream(text);
  YamlBuilder builder(diagnostics, most_values);
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const YAML::Exception& error) {
    diagnostics.add(std::min(offset_of(error.mark), text.size()), "", "not YAML: " + clipped(error.msg, 200));
    return std::nullopt;
  }
  return builder.take_root();
}

}  // namespace tessera::app
