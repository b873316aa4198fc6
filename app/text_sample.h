#pragma once

#include <absl/status/status.h>

#include <string>

#include "app/commands.h"
#include "models/language_model.h"

namespace tessera::app {

/// 78 unless bytes are tokens of `model`.
absl::Status check_byte_level(const models::LanguageModel& model);

/// Continues `sampling.prompt` byte by byte; returns prompt and continuation. Control characters other than newline
/// and tab, and bytes that are no UTF-8, become '?', since a model may write anything. Collective where the model is
/// sharded: every rank draws the same. REQUIRES: check_byte_level(model), which is on `device`.
std::string continue_text(models::LanguageModel& model, const TextSampling& sampling,
                          at::Device device = at::Device(at::kCPU));

}  // namespace tessera::app
