#pragma once

#include <absl/status/status.h>

#include <string>

#include "workshop/app/commands.h"
#include "workshop/models/language_model.h"
#include "workshop/tokenizer/tokenizer.h"

namespace tessera::app {

/// Checks that all bytes are tokens of `model`. Errors: 78 if a byte is no token.
absl::Status check_byte_level(const models::LanguageModel& model);

/// Continues `sampling.prompt`, token by token of `tokenizer`, or byte by byte if there is none. Returns the prompt and
/// its continuation. Control characters other than newline and tab, and bytes that are no UTF-8, become '?', since a
/// model may write anything. The call is collective if the model is sharded: every rank draws the same tokens.
/// REQUIRES: check_vocabulary or check_byte_level has found no error, and the model is on `device`.
std::string continue_text(models::LanguageModel& model, const TextSampling& sampling, const Tokenizer* tokenizer,
                          at::Device device = at::Device(at::kCPU));

}  // namespace tessera::app
