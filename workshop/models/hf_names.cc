#include "workshop/models/hf_names.h"

namespace tessera::models {
namespace {

struct Renamed {
  const char* ours;
  const char* theirs;
  bool is_linear;  ///< linear layer of a block, which is a Conv1D in the file
};
constexpr Renamed kOfModel[] = {{"token_embedding.", "transformer.wte.", false},
                                {"position_embedding.", "transformer.wpe.", false},
                                {"norm.", "transformer.ln_f.", false},
                                {"head.", "lm_head.", false}};
constexpr Renamed kOfBlock[] = {{"norm1.", "ln_1.", false},
                                {"attention.qkv.", "attn.c_attn.", true},
                                {"attention.projection.", "attn.c_proj.", true},
                                {"norm2.", "ln_2.", false},
                                {"mlp.up.", "mlp.c_fc.", true},
                                {"mlp.down.", "mlp.c_proj.", true}};
constexpr std::string_view kBlocks = "blocks.", kPrefix = "transformer.";

/// "blocks.3.mlp.up.weight" has the name "mlp.c_fc.weight" in block 3 of the file.
NameInFile gpt2_name(const std::string& name) {
  NameInFile result{{name}};
  std::string_view rest = name;
  std::string begin;
  if (rest.starts_with(kBlocks)) {
    const std::size_t number_end = rest.find('.', kBlocks.size()) + 1;
    begin = "transformer.h." + std::string(rest.substr(kBlocks.size(), number_end - kBlocks.size()));
    rest.remove_prefix(number_end);
    for (const Renamed& each : kOfBlock) {
      if (!rest.starts_with(each.ours)) continue;
      const std::string_view last = rest.substr(std::string_view(each.ours).size());
      result = {{begin + each.theirs + std::string(last)}, each.is_linear && last == "weight"};
    }
  } else {
    for (const Renamed& each : kOfModel)
      if (rest.starts_with(each.ours))
        result = {{each.theirs + std::string(rest.substr(std::string_view(each.ours).size()))}};
  }
  if (result.names[0].starts_with(kPrefix)) result.names.push_back(result.names[0].substr(kPrefix.size()));
  return result;
}

}  // namespace

TensorNames hf_names(const ModelConfig& config) {
  const auto* gpt = std::get_if<GPTConfig>(&config);
  const bool tied = gpt ? gpt->tie_head : std::get<LlamaConfig>(config).tie_word_embeddings;
  const std::string embedding = gpt ? "token_embedding.weight" : "model.embed_tokens.weight";
  return [is_gpt = gpt != nullptr, tied, embedding](const std::string& name) {
    NameInFile result = is_gpt ? gpt2_name(name) : NameInFile{{name}};
    if (tied && name == embedding) result.copies = {"lm_head.weight"};
    return result;
  };
}

std::vector<std::string> hf_ignored(const ModelConfig& config) {
  const auto* gpt = std::get_if<GPTConfig>(&config);
  return gpt ? std::vector<std::string>{"*h.*.attn.bias", "*h.*.attn.masked_bias"}
             : std::vector<std::string>{"*.rotary_emb.inv_freq"};
}

}  // namespace tessera::models
