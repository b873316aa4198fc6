#include "workshop/models/model_docs.h"

#include <fmt/format.h>

#include "workshop/models/config_fields.h"

namespace tessera::models {
namespace {

/// Writes a table row for each key.
class PageVisitor final : public ConfigVisitor {
 public:
  void integer(const std::string& key, std::int64_t& value, const IntegerRule& rule, const char* doc) override {
    const bool has_default = !rule.required && value >= rule.least;
    row(key, doc, fmt::format("an integer from {} to {}", rule.least, rule.most),
        has_default     ? fmt::format("`{}`", value)
        : rule.required ? "needed"
                        : "see meaning");
  }
  void number(const std::string& key, double& value, const NumberRule& rule, const char* doc) override {
    row(key, doc,
        fmt::format("a number {} {} and below {:g}", rule.least_excluded ? "above" : "from", rule.least, rule.below),
        fmt::format("`{}`", value));
  }
  void boolean(const std::string& key, bool& value, const char* doc) override {
    row(key, doc, "true or false", fmt::format("`{}`", value));
  }
  void word(const std::string& key, std::string& value, const std::vector<std::string>& allowed,
            const char* doc) override {
    std::string words;
    for (const std::string& each : allowed) words += (words.empty() ? "`" : ", `") + each + "`";
    row(key, doc, words, fmt::format("`{}`", value));
  }
  const std::string& text() const { return text_; }

 private:
  void row(const std::string& key, const char* doc, const std::string& allowed, const std::string& standard) {
    text_ += fmt::format("| `{}` | {} | {} | {} |\n", key, doc, allowed, standard);
  }
  std::string text_ = "| key | meaning | allowed | default |\n|---|---|---|---|\n";
};

template <class Config>
std::string table_of() {
  Config config;
  PageVisitor page;
  visit_fields(config, page);
  return page.text();
}

constexpr char kIntroduction[] = R"(# The model file

<!-- Made by tessera_model_docs from workshop/models/config_fields.cc. Change the fields there, not this page. -->

One JSON object describes a language model for `tessera train`, `plan` and `sample`. In its place a folder of Hugging Face may be
named, whose `config.json` is read (GPT-2, Llama, Mistral, Qwen2, Qwen3; [huggingface.md](huggingface.md)). `"model"` says which kind it is and
is always needed; the tables list the other keys. A file is read strictly: JSON without comments or trailing commas, at
most 1 MiB, every key known and given once. All errors are reported together, each with its place, and the program ends
with exit code 78:

```
model.json:1:48: /seq_len: must be an integer from 1 to 1048576, got 0
model.json:1:51: /layer: unknown key. [T0426] hint: did you mean "layers"?
```

Bounds keep a slip from filling the machine. All parameters together may be 1e14 at most.

)";

}  // namespace

std::string gpt_example() {
  return R"({"model": "gpt", "vocab_size": 256, "seq_len": 256, "layers": 6, "width": 384, "heads": 6}
)";
}

std::string llama_example() {
  return R"({"model": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
 "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
)";
}

std::string model_reference() {
  std::string text = kIntroduction;
  text +=
      "## `\"model\": \"gpt\"`\n\nGPT-2's shape (Radford et al., 2019). The class of its blocks, for `\"units\"`, is "
      "`Block`.\n\n```json\n" +
      gpt_example() + "```\n\n" + table_of<GPTConfig>();
  text +=
      "\n## `\"model\": \"llama\"`\n\nLlama's shape (Touvron et al., arXiv 2302.13971), with the names of Hugging "
      "Face's config.json. With a sliding window it is Mistral, with biases of queries, keys and values Qwen2, and "
      "with norms of queries and keys Qwen3. The class of its blocks, for `\"units\"`, is `LlamaBlock`.\n\n```json\n" +
      llama_example() + "```\n\n" + table_of<LlamaConfig>();
  return text;
}

}  // namespace tessera::models
