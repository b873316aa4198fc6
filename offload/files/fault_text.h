#pragma once

#include <absl/status/statusor.h>

#include <string_view>
#include <vector>

#include "offload/files/fault_plan.h"

namespace tessera {

/// Reads rules that are written as text, one or more, separated by ';':
///
///     SITE [path=TEXT] nth=N|every=N ACTION
///
/// SITE is open, reserve, read, write, fsync, rename, unlink, mkdir, submit or cqe. ACTION is one of errno=NAME
/// (ENOSPC, EIO, ... or a number), short=BYTES, bitflip=OFFSET, torn=SECTORS, delay=MS, crash or crash=CODE (by default
/// 137), drop_unsynced, and drop_unsynced=keep_renames. Errors (78) name the rule, the word, and the words that are
/// allowed.
absl::StatusOr<std::vector<FaultRule>> parse_fault_rules(std::string_view text);

}  // namespace tessera
