#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"

namespace tessera {

/// Returns the bytes of a piece of a made-up checkpoint. They depend on `seed`, and on the piece's `what`, name and
/// elements.
std::vector<std::byte> made_up_bytes(const Piece& piece, std::uint64_t seed);

/// Writes a file of a checkpoint with made_up_bytes.
SavedFile write_made_up(const std::string& folder, const std::string& name, std::vector<Piece> pieces,
                        std::uint64_t seed);

/// Makes a checkpoint of two ranks with everything that a checkpoint can have: tied and frozen parameters, a state of
/// each format, buffers that differ, items. It writes the files to `folder`, but not the manifest. It returns the
/// manifest.
Manifest write_made_up_files(const std::string& folder, std::uint64_t seed = 1);

/// Writes the files and the manifest, and returns the manifest's text.
std::string write_made_up_checkpoint(const std::string& folder, std::uint64_t seed = 1);

/// Changes `text`, a manifest, and gives it the hash of the changed text, as an attacker would.
std::string changed_manifest(const std::string& text, const std::string& from, const std::string& to);

std::string content_of(const std::string& path);

/// Returns the header of a safetensors file with the JSON text `json`, without padding, as other programs may write it.
std::string head_of(const std::string& json);
void write_content(const std::string& path, std::string_view bytes);

}  // namespace tessera
