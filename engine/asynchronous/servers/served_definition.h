#pragma once

// See docs/glossary.md: unit.

#include <absl/status/statusor.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/asynchronous/servers/served_cut.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The data about a run that a parameter server reads from a worker's definition (ServedJob).
struct ServedDefinition {
  Strategy strategy;
  int server = 0, servers = 1, ranks = 1;
  std::chrono::milliseconds limit{0};  ///< comm.timeout_s
  /// One unit for each shard of this server; each unit has one group. The units are ordered by the group of the model,
  /// then by the rank of a replica. All parts of a group (FlatGroup::parameter_part and others) are the elements that
  /// this server owns; they may be empty. Groups have no memory. Parameters have their numbers, sizes and groups of
  /// options, and no tensors.
  std::vector<std::unique_ptr<Unit>> units;
};

/// Returns a trainable group as a definition describes it.
nlohmann::json describe_group(const FlatGroup& group);
/// Reads a definition. Throws a std::exception if the text is not a definition. Errors are those of the strategy.
absl::StatusOr<ServedDefinition> read_definition(const std::string& text);

}  // namespace tessera
