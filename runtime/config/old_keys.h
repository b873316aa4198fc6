#pragma once

#include <optional>
#include <string>

#include "runtime/base/process/diagnostics.h"
#include "runtime/config/json_document.h"

namespace tessera {

/// Keys of earlier versions, which this version reads and the next one does not. They are the methods of "compression",
/// each of which was a key, and "delay_compensation" of "sync", which was a number.

/// Rewrites old keys in `root` into the form of this version; each value keeps its place in the file. An old key that
/// has no new form, or stands beside its new form, is reported to `diagnostics`. The result is the warning, which shows
/// the new form of this file; empty where the file has no old key.
std::optional<std::string> renew_old_keys(JsonNode& root, Diagnostics& diagnostics, const std::string& file);

}  // namespace tessera
