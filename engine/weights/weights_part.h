#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/weights/weights_tree.h"

namespace tessera {

/// Which tensors of a file are wanted: what LoadOptions says, and what the module has.
struct WeightsRequest {
  std::string part = {};                  ///< LoadOptions::part
  std::vector<std::string> without = {};  ///< LoadOptions::without
  std::set<std::string> wanted = {};      ///< the module's names, without those pieces
};

/// A dictionary, list or module of a file. Names of what is in it are joined by dots, and are without the request's
/// pieces.
struct WeightsPart {
  std::string path = {};  ///< keys from the root on, with slashes: "checkpoint/state_dict"; empty: the whole file
  std::vector<std::pair<std::string, std::size_t>> tensors = {};  ///< names, and WeightsNode::tensor
  /// What is neither a tensor nor holds one, and what it is: {"epoch", "a number"}.
  std::vector<std::pair<std::string, std::string>> others = {};
  std::vector<std::string> unused = {};  ///< what lies beside the part, by keys: "optimizer"
};

/// The part that the request names; or, where it names none, the one that has the module's names. That is the smallest
/// one with the most of them, and no other part, beside it, may have any. A part without any of them is taken if it is
/// the only one that could be meant, so that names can be compared. Errors (65): there is no such part, or several
/// could be meant; they list what the file holds. A name twice.
absl::StatusOr<WeightsPart> choose_part(const WeightsNode& root, const WeightsRequest& request);

/// `name` without `pieces` ("module." or "module"), wherever one begins it or stands behind a dot, any number of times.
/// The last word stays.
std::string name_without(std::string_view name, const std::vector<std::string>& pieces);

/// How a name that is wanted and those of the file differ, as a hint; empty: by nothing that a piece or a prefix would
/// explain. `wanted`: the module's names.
std::string hint_of_pieces(const std::set<std::string>& wanted, const std::vector<std::string>& in_file);

}  // namespace tessera
