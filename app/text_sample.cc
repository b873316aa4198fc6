#include "app/text_sample.h"

#include <ATen/ops/empty.h>

#include "models/generate.h"
#include "runtime/base/error.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kBytes = 256;

char printable(std::int64_t token) {
  const bool control = token < 32 && token != '\n' && token != '\t';
  return control || token == 127 || token >= kBytes ? '?' : static_cast<char>(token);
}

}  // namespace

absl::Status check_byte_level(const models::LanguageModel& model) {
  if (model.vocab_size() >= kBytes) return absl::OkStatus();
  return make_error(ExitCode::kConfig, "a prompt is read as bytes, but the model has only " +
                                           std::to_string(model.vocab_size()) + " tokens. hint: vocab_size of 256 or more");
}

std::string continue_text(models::LanguageModel& model, const TextSampling& sampling) {
  const std::string prompt = sampling.prompt.empty() ? "\n" : sampling.prompt;
  const at::Tensor tokens = at::empty({1, static_cast<std::int64_t>(prompt.size())}, at::kLong);
  auto* out = tokens.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < prompt.size(); ++i) out[i] = static_cast<unsigned char>(prompt[i]);
  const at::Tensor all = models::generate(
      model, tokens, {sampling.tokens, sampling.temperature, sampling.top_k, sampling.seed});
  std::string text;
  const auto* drawn = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < all.numel(); ++i) text += printable(drawn[i]);
  return text;
}

}  // namespace tessera::app
