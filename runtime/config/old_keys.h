#pragma once

#include <optional>
#include <string>

#include "runtime/base/process/diagnostics.h"
#include "runtime/config/json_document.h"

namespace tessera {

/// Keys of earlier versions, which this version reads and the next one does not: the methods of "compression", each of
/// which was a key, and the number that "delay_compensation" of "sync" was.

/// Puts what such keys say into the form of this version, in `root`, each value with its place in the file. What cannot
/// be said in that form, and an old key beside the new one, goes to `diagnostics`. The result is the warning, with the
/// new form of this very strategy; empty where the file has no old key.
std::optional<std::string> renew_old_keys(JsonNode& root, Diagnostics& diagnostics, const std::string& file);

}  // namespace tessera
