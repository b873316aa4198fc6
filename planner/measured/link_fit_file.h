#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <string>

#include "runtime/comm/rounds/link_fit.h"

namespace tessera {

/// A LinkFit as a file, which `tessera bench collectives --fit --fit-file` writes. Every key is needed. Numbers are
/// seconds, finite and from 0 to 1e9:
///
///     {"round_s": 4e-5, "message_s": 1e-5, "byte_s": 8e-10, "add_s": 2e-10}
///
/// Returns an error (65) if the text is wrong. The message has one line for each mistake: the file, the line, the key,
/// the wanted value, and the value found. `name` is the file's name in the message.
absl::StatusOr<LinkFit> parse_link_fit(const std::string& text, const std::string& name);
/// Reads the file at `path`. Further errors: those of read_input_file.
absl::StatusOr<LinkFit> read_link_fit(const std::filesystem::path& path);
/// Returns a text that parse_link_fit reads as an equal fit.
std::string to_json(const LinkFit& fit);

}  // namespace tessera
