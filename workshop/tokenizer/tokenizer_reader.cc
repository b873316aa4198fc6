// Reads tokenizer.json into a Tokenizer. Options of the file that a Tokenizer does not support are refused, since wrong
// tokens without a warning would be worse. Only "truncation" and "padding" are left out with a warning.
//
// TokenizerReader goes over the sections in turn: normalizer, pre-tokenizer (`read_cutters`), decoder, model
// (`read_vocabulary`, `read_merges`), added tokens, post-processor. Each function checks the types of its section and
// uses everything that it understands. It reports anything else with its JSON pointer (`wrong`). All problems are
// collected, and `read` returns them together.

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <system_error>
#include <utility>

#include "runtime/base/input_file.h"
#include "runtime/base/log.h"
#include "runtime/base/process/diagnostics.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/config/json_document.h"
#include "workshop/tokenizer/tokenizer.h"
#include "workshop/tokenizer/utf8.h"

namespace tessera {
namespace {

constexpr const char kTokenizerHint[] = "[T0612] hint: docs/huggingface.md says which tokenizer.json files are read";
constexpr std::size_t kMostFileBytes = std::size_t{256} << 20;
constexpr std::size_t kMostValues = std::size_t{1} << 23;
constexpr std::int64_t kMostId = std::int64_t{1} << 27;
constexpr std::size_t kMostAddedTokens = 1 << 16;
constexpr std::size_t kMostTokenBytes = 4096;
constexpr std::size_t kMostCutters = 16;
/// GPT-2's pattern (Radford et al., 2019), which ByteLevel uses with use_regex.
constexpr char kGpt2Pattern[] = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

const JsonNode* child_of(const JsonNode& node, std::string_view key) {
  const auto found = std::ranges::find(node.children, key, &JsonNode::key);
  return !node.is_object() || found == node.children.end() || found->value.is_null() ? nullptr : &*found;
}

std::string text_of(const JsonNode* node) {
  return node && node->value.is_string() ? node->value.get<std::string>() : "";
}

std::string type_of(const JsonNode& node) { return text_of(child_of(node, "type")); }

/// Returns an expression that matches the text itself.
std::string literal(const std::string& text) {
  std::string expression;
  for (const char c : text) {
    if (std::string_view(R"(\^$.|?*+()[]{}-#)").find(c) != std::string_view::npos) expression += '\\';
    expression += c;
  }
  return expression;
}

}  // namespace

class TokenizerReader {
 public:
  TokenizerReader(const std::string& name, std::string_view text) : diagnostics_(name, text), name_(name) {}

  absl::StatusOr<Tokenizer> read(std::string_view text) {
    const std::optional<JsonNode> root = parse_json(text, diagnostics_, kMostValues);
    if (root && !root->is_object()) wrong(*root, "", "must be an object, got " + describe(*root));
    if (root && root->is_object()) read_root(*root);
    const absl::Status status = diagnostics_.to_status(kTokenizerHint);
    if (!status.ok()) return make_error(ExitCode::kCorruptData, message_of(status));
    for (const char* key : {"truncation", "padding"})
      if (log_rank().rank == 0 && child_of(*root, key))
        log_warning(fmt::format(
            "{}: \"{}\" is not applied: texts are neither cut nor padded here. [T1093] hint: set it to null, as "
            "training wants it",
            name_, key));
    return std::move(result_);
  }

 private:
  void wrong(const JsonNode& node, const std::string& place, const std::string& message) {
    diagnostics_.add(node.offset, place, message);
  }

  /// Refuses keys that this reader does not support.
  void expect_keys(const JsonNode& node, const std::string& place, std::initializer_list<std::string_view> known) {
    for (const JsonNode& child : node.children)
      if (!child.value.is_null() && std::ranges::find(known, child.key) == known.end())
        wrong(child, place, "has the key " + quoted_text(child.key) + ", which is not known and may change the tokens");
  }

  void read_root(const JsonNode& root) {
    expect_keys(root, "",
                {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                 "decoder", "model"});
    if (const JsonNode* normalizer = child_of(root, "normalizer")) read_normalizer(*normalizer);
    if (const JsonNode* cutters = child_of(root, "pre_tokenizer")) {
      read_cutters(*cutters, "/pre_tokenizer");
      if (!has_byte_level_)
        wrong(*cutters, "/pre_tokenizer", "wants ByteLevel as its last part: only byte-level BPE is built");
    } else {
      wrong(root, "/pre_tokenizer", "is needed: only byte-level BPE is built, and wants ByteLevel there");
    }
    const JsonNode* decoder = child_of(root, "decoder");
    if (decoder == nullptr || type_of(*decoder) != "ByteLevel")
      wrong(decoder ? *decoder : root, "/decoder", "must be ByteLevel: only byte-level BPE is built");
    const JsonNode* model = child_of(root, "model");
    if (model == nullptr) return wrong(root, "/model", "is needed, but not there");
    read_model(*model);
    if (!diagnostics_.empty()) return;
    if (const JsonNode* added = child_of(root, "added_tokens")) read_added(*added);
    if (const JsonNode* post = child_of(root, "post_processor")) read_post(*post, "/post_processor");
  }

  void read_normalizer(const JsonNode& node) {
    const std::string type = type_of(node);
    if (type == "NFC") {
      result_.composes_ = true;
    } else if (const JsonNode* parts = child_of(node, "normalizers"); type == "Sequence" && parts && parts->is_list()) {
      for (const JsonNode& part : parts->children) {
        if (type_of(part) != "NFC")
          return wrong(part, "/normalizer", "must be NFC or nothing, got " + quoted_text(type_of(part)));
        result_.composes_ = true;
      }
    } else {
      wrong(node, "/normalizer", "must be NFC or nothing, got " + quoted_text(type));
    }
  }

  bool flag(const JsonNode& node, const std::string& place, const char* key, bool standard) {
    const JsonNode* value = child_of(node, key);
    if (value == nullptr) return standard;
    if (!value->value.is_boolean()) {
      wrong(*value, place + "/" + key, "must be true or false, got " + describe(*value));
      return standard;
    }
    return value->value.get<bool>();
  }

  void add_cutter(const JsonNode& node, const std::string& place, const std::string& expression, bool removes = false,
                  bool inverted = false) {
    absl::StatusOr<SplitPattern> pattern = SplitPattern::compile(expression);
    if (!pattern.ok()) return wrong(node, place, message_of(pattern.status()));
    if (result_.cutters_.size() == kMostCutters)
      return wrong(node, place, fmt::format("has more than {} parts", kMostCutters));
    result_.cutters_.push_back({*std::move(pattern), inverted, removes});
  }

  void read_cutters(const JsonNode& node, const std::string& place) {
    const std::string type = type_of(node);
    if (has_byte_level_) return wrong(node, place, "ByteLevel must be the last part");
    if (type == "Sequence") {
      const JsonNode* parts = child_of(node, "pretokenizers");
      if (parts == nullptr || !parts->is_list()) return wrong(node, place, "wants a list \"pretokenizers\"");
      std::size_t number = 0;
      for (const JsonNode& part : parts->children)
        read_cutters(part, fmt::format("{}/pretokenizers/{}", place, number++));
    } else if (type == "ByteLevel") {
      result_.adds_prefix_space_ = flag(node, place, "add_prefix_space", true);
      result_.prefix_space_at_ = result_.cutters_.size();
      if (flag(node, place, "use_regex", true)) add_cutter(node, place, kGpt2Pattern);
      has_byte_level_ = true;
    } else if (type == "Digits") {
      add_cutter(node, place, flag(node, place, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
    } else if (type == "Split") {
      read_split(node, place);
    } else {
      wrong(node, place, "must be Sequence, Split, Digits or ByteLevel, got " + quoted_text(type));
    }
  }

  void read_split(const JsonNode& node, const std::string& place) {
    const JsonNode* pattern = child_of(node, "pattern");
    const JsonNode* expression = pattern ? child_of(*pattern, "Regex") : nullptr;
    const JsonNode* text = pattern ? child_of(*pattern, "String") : nullptr;
    if (text_of(expression).empty() && text_of(text).empty())
      return wrong(node, place, "wants a \"pattern\" with \"Regex\" or \"String\"");
    const std::string behavior = text_of(child_of(node, "behavior"));
    if (behavior != "Isolated" && behavior != "Removed")
      return wrong(node, place, "\"behavior\" must be Isolated or Removed, got " + quoted_text(behavior));
    add_cutter(node, place, expression ? text_of(expression) : literal(text_of(text)), behavior == "Removed",
               flag(node, place, "invert", false));
  }

  std::optional<Tokenizer::Id> id_in(const JsonNode& node, const std::string& place) {
    const bool is_id =
        node.value.is_number_unsigned() && node.value.get<std::uint64_t>() < static_cast<std::uint64_t>(kMostId);
    if (is_id) return node.value.get<Tokenizer::Id>();
    wrong(node, place,
          fmt::format("a token's id must be an integer from 0 to {}, got {}", kMostId - 1, describe(node)));
    return std::nullopt;
  }

  void add_token(const std::string& token, Tokenizer::Id id, bool is_special) {
    // If characters of a token stand for no byte, the token is used as plain text. The decoder does the same.
    const std::optional<std::string> bytes = bytes_of_characters(token);
    result_.tokens_[id] = {bytes ? *bytes : token, is_special};
    result_.ids_[token] = id;
    result_.vocab_size_ = std::max(result_.vocab_size_, std::int64_t{id} + 1);
  }

  void read_model(const JsonNode& model) {
    const std::string type = type_of(model);
    if (!type.empty() && type != "BPE") return wrong(model, "/model/type", "must be BPE, got " + quoted_text(type));
    expect_keys(model, "/model",
                {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                 "byte_fallback", "ignore_merges", "vocab", "merges"});
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (const JsonNode* node = child_of(model, key); node && !(node->value.is_string() && text_of(node).empty()))
        wrong(*node, std::string("/model/") + key, "must be empty: only byte-level BPE is built");
    if (const JsonNode* dropout = child_of(model, "dropout");
        dropout && !(dropout->value.is_number() && dropout->value.get<double>() == 0))
      wrong(*dropout, "/model/dropout", "must be null: merges are not left out at random");
    if (flag(model, "/model", "byte_fallback", false))
      wrong(model, "/model/byte_fallback", "must be false: a vocabulary of SentencePiece is no byte-level BPE");
    BytePairEncoding::Parts parts;
    parts.ignore_merges = flag(model, "/model", "ignore_merges", false);
    read_vocabulary(model, parts);
    read_merges(model, parts);
    if (!diagnostics_.empty()) return;
    absl::StatusOr<BytePairEncoding> bpe = BytePairEncoding::make(parts);
    if (!bpe.ok()) return wrong(model, "/model", message_of(bpe.status()));
    result_.bpe_ = *std::move(bpe);
  }

  void read_vocabulary(const JsonNode& model, BytePairEncoding::Parts& parts) {
    const JsonNode* vocabulary = child_of(model, "vocab");
    if (vocabulary == nullptr || !vocabulary->is_object())
      return wrong(model, "/model/vocab", "must be an object from tokens to ids");
    parts.tokens.reserve(vocabulary->children.size());
    for (const JsonNode& node : vocabulary->children) {
      const std::optional<Tokenizer::Id> id = id_in(node, "/model/vocab");
      if (!id) return;
      if (node.key.empty() || node.key.size() > kMostTokenBytes)
        return wrong(node, "/model/vocab",
                     fmt::format("a token wants 1 to {} bytes, this one has {}", kMostTokenBytes, node.key.size()));
      if (result_.tokens_.contains(*id))
        return wrong(node, "/model/vocab", fmt::format("the id {} is given twice", *id));
      add_token(node.key, *id, false);
      if (const auto bytes = bytes_of_characters(node.key)) parts.tokens.emplace_back(*bytes, *id);
    }
  }

  /// Reads merges: "a b", or ["a", "b"] in files of newer versions.
  void read_merges(const JsonNode& model, BytePairEncoding::Parts& parts) {
    const JsonNode* merges = child_of(model, "merges");
    if (merges == nullptr || !merges->is_list()) return wrong(model, "/model/merges", "must be a list of pairs");
    parts.merges.reserve(merges->children.size());
    for (const JsonNode& node : merges->children) {
      std::string left, right;
      if (node.is_list() && node.children.size() == 2) {
        left = text_of(&node.children[0]);
        right = text_of(&node.children[1]);
      } else if (const std::string both = text_of(&node); both.find(' ') != std::string::npos) {
        left = both.substr(0, both.find(' '));
        right = both.substr(both.find(' ') + 1);
      }
      const auto a = bytes_of_characters(left), b = bytes_of_characters(right);
      if (left.empty() || right.empty() || !a || !b)
        return wrong(node, "/model/merges", "a merge wants two tokens of bytes, got " + describe(node));
      parts.merges.emplace_back(*a, *b);
    }
  }

  void read_added(const JsonNode& list) {
    if (!list.is_list()) return wrong(list, "/added_tokens", "must be a list");
    if (list.children.size() > kMostAddedTokens)
      return wrong(list, "/added_tokens",
                   fmt::format("has {} tokens, wanted {} at most", list.children.size(), kMostAddedTokens));
    for (const JsonNode& node : list.children) {
      const std::string place = "/added_tokens";
      const JsonNode* id_node = child_of(node, "id");
      const std::string content = text_of(child_of(node, "content"));
      if (id_node == nullptr || content.empty() || content.size() > kMostTokenBytes)
        return wrong(node, place, fmt::format("a token wants an id and a content of 1 to {} bytes", kMostTokenBytes));
      const std::optional<Tokenizer::Id> id = id_in(*id_node, place);
      if (!id) return;
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        if (flag(node, place, key, false))
          return wrong(node, place, fmt::format("token {} has {}, which is not built", quoted_text(content), key));
      const std::optional<Tokenizer::Id> known = result_.id_of(content);
      if (known ? *known != *id : result_.tokens_.contains(*id))
        return wrong(
            node, place,
            fmt::format("token {} has the id {}, which the vocabulary gives otherwise", quoted_text(content), *id));
      add_token(content, *id, flag(node, place, "special", false));
      (flag(node, place, "normalized", true) ? result_.composed_ : result_.as_written_).add(content, *id);
    }
  }

  void read_post(const JsonNode& node, const std::string& place) {
    const std::string type = type_of(node);
    if (type == "ByteLevel") return;  // ByteLevel sets offsets in the text, which are not used here
    if (type == "Sequence") {
      const JsonNode* parts = child_of(node, "processors");
      if (parts == nullptr || !parts->is_list()) return wrong(node, place, "wants a list \"processors\"");
      for (const JsonNode& part : parts->children) read_post(part, place + "/processors");
      return;
    }
    if (type != "TemplateProcessing")
      return wrong(node, place,
                   "must be ByteLevel, TemplateProcessing or a Sequence of them, got " + quoted_text(type));
    const JsonNode* single = child_of(node, "single");
    if (single == nullptr || !single->is_list()) return wrong(node, place, "wants a list \"single\"");
    bool behind = false;
    for (const JsonNode& part : single->children) {
      if (child_of(part, "Sequence") != nullptr) {
        if (behind) return wrong(part, place, "\"single\" has the text twice");
        behind = true;
        continue;
      }
      const JsonNode* special = child_of(part, "SpecialToken");
      const std::string name = special ? text_of(child_of(*special, "id")) : "";
      const JsonNode* all = child_of(node, "special_tokens");
      const JsonNode* token = all ? child_of(*all, name) : nullptr;
      const JsonNode* ids = token ? child_of(*token, "ids") : nullptr;
      if (ids == nullptr || !ids->is_list())
        return wrong(part, place, "\"single\" wants the text and special tokens that \"special_tokens\" has");
      for (const JsonNode& each : ids->children) {
        const std::optional<Tokenizer::Id> id = id_in(each, place);
        if (!id) return;
        if (!result_.tokens_.contains(*id)) return wrong(each, place, fmt::format("{} is no token", *id));
        (behind ? result_.behind_ : result_.before_).push_back(*id);
      }
    }
  }

  Diagnostics diagnostics_;
  const std::string name_;
  Tokenizer result_;
  bool has_byte_level_ = false;
};

absl::StatusOr<Tokenizer> Tokenizer::parse(std::string_view json, const std::string& name) {
  return TokenizerReader(name, json).read(json);
}

absl::StatusOr<Tokenizer> Tokenizer::read(const std::filesystem::path& path) {
  constexpr char kKind[] = "tokenizer", kName[] = "tokenizer.json";
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path, error);
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           is_folder ? read_input_file_in(path, kName, kKind, kMostFileBytes, ExitCode::kCorruptData)
                                     : read_input_file(path, kKind, kMostFileBytes, ExitCode::kCorruptData));
  return parse(text, (is_folder ? path / kName : path).string());
}

}  // namespace tessera
