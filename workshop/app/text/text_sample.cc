#include "workshop/app/text/text_sample.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "workshop/models/generate.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kBytes = 256;

char printable(std::int64_t token) {
  const bool control = token < 32 && token != '\n' && token != '\t';
  return control || token == 127 || token >= kBytes ? '?' : static_cast<char>(token);
}

/// Returns the number of bytes of the UTF-8 character at `text[i]`; 0 if there is no whole character.
std::size_t length_at(const std::string& text, std::size_t i) {
  const auto lead = static_cast<unsigned char>(text[i]);
  std::size_t length = 0;
  if (lead < 0x80) length = 1;
  if (lead >= 0xc2 && lead < 0xe0) length = 2;
  if (lead >= 0xe0 && lead < 0xf0) length = 3;
  if (lead >= 0xf0 && lead < 0xf5) length = 4;
  for (std::size_t k = 1; k < length; ++k)
    if (i + k >= text.size() || (static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return 0;
  return length;
}

/// Replaces every byte that is not part of a character by '?', since a model of bytes may draw bytes that form no
/// character.
std::string printable(std::string text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = length_at(text, i);
    if (length == 0) text[i] = '?';
    i += length == 0 ? 1 : length;
  }
  return text;
}

}  // namespace

absl::Status check_byte_level(const models::LanguageModel& model) {
  if (model.vocab_size() >= kBytes) return absl::OkStatus();
  return make_error(
      ExitCode::kConfig,
      "a prompt is read as bytes, but the model has only " + std::to_string(model.vocab_size()) +
          " tokens. [T0042] hint: name the model's --tokenizer, or train one with a \"vocab_size\" of 256 or more");
}

std::string continue_text(models::LanguageModel& model, const TextSampling& sampling, const Tokenizer* tokenizer,
                          at::Device device) {
  const std::string prompt = sampling.prompt.empty() ? "\n" : sampling.prompt;
  std::vector<std::uint32_t> ids;
  if (tokenizer) {
    value_or_throw(tokenizer->encode(prompt, /*add_special=*/true, ids));
    if (ids.empty()) throw Error(ExitCode::kUsage, "the prompt has no token. [T0043] hint: give another one");
  } else {
    for (const char byte : prompt) ids.push_back(static_cast<unsigned char>(byte));
  }
  const at::Tensor tokens = at::empty({1, static_cast<std::int64_t>(ids.size())}, at::kLong);
  std::copy(ids.begin(), ids.end(), tokens.mutable_data_ptr<std::int64_t>());
  const models::GenerateOptions options{sampling.tokens, sampling.temperature, sampling.top_k, sampling.seed};
  const at::Tensor all = [&] {
    try {
      return models::generate(model, tokens.to(device), options).cpu();
    } catch (const c10::ValueError& error) {  // an infinite or NaN score means that the weights are wrong
      throw Error(ExitCode::kCorruptData, error.what_without_backtrace());
    }
  }();
  const auto* drawn = all.const_data_ptr<std::int64_t>();
  std::string text;
  if (tokenizer) {
    for (const char byte : tokenizer->decode({drawn, static_cast<std::size_t>(all.numel())}))
      text += printable(static_cast<unsigned char>(byte));
  } else {
    for (std::int64_t i = 0; i < all.numel(); ++i) text += printable(drawn[i]);
  }
  return printable(std::move(text));
}

}  // namespace tessera::app
