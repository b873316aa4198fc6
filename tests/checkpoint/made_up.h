#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"

namespace tessera {

/// Bytes that every piece of made-up checkpoints holds: they depend on what, name and element.
std::vector<std::byte> made_up_bytes(const Piece& piece, std::uint64_t seed);

/// Writes a file of a checkpoint with such bytes.
SavedFile write_made_up(const std::string& folder, const std::string& name, std::vector<Piece> pieces,
                        std::uint64_t seed);

/// A checkpoint of two ranks with all that a checkpoint can have: tied and frozen parameters, a state of each format, buffers
/// that differ, items. Its files are written to `folder`; the manifest is not.
Manifest write_made_up_files(const std::string& folder, std::uint64_t seed = 1);

/// Both, and returns the manifest's text.
std::string write_made_up_checkpoint(const std::string& folder, std::uint64_t seed = 1);

/// `text`, a manifest, with one change and the hash that belongs to it: what somebody would write who means harm.
std::string changed_manifest(const std::string& text, const std::string& from, const std::string& to);

std::string content_of(const std::string& path);

/// The head of a safetensors file with this JSON, without padding: what other programs may write.
std::string head_of(const std::string& json);
void write_content(const std::string& path, std::string_view bytes);

}  // namespace tessera
