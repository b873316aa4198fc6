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

/// Says which tensors of a file are wanted: the LoadOptions, and the names of the module.
struct WeightsRequest {
  std::string part = {};                  ///< LoadOptions::part
  std::vector<std::string> without = {};  ///< LoadOptions::without
  std::set<std::string> wanted = {};      ///< the module's names, without the pieces of `without`
};

/// The part of a file that was chosen: a dictionary, list or module. Names in it are joined by dots, without the pieces
/// of WeightsRequest::without.
struct WeightsPart {
  std::string path = {};  ///< keys from the root on, with slashes: "checkpoint/state_dict"; empty: the whole file
  std::vector<std::pair<std::string, std::size_t>> tensors = {};  ///< pairs of a name and WeightsNode::tensor
  /// Entries that are no tensor and hold none, with what they are: {"epoch", "a number"}.
  std::vector<std::pair<std::string, std::string>> others = {};
  std::vector<std::string> unused = {};  ///< keys that do not belong to the part, such as "optimizer"
};

/// Chooses the part that the request names or, where it names none, the part that has the module's names: the smallest
/// part with the most of these. No part beside it may have any of these names. A part without any of them is taken
/// where it is the only one that could be meant, so that names can be compared. Errors (65): there is no such part, or
/// several could be meant (the error lists what the file holds); or a name is there twice.
absl::StatusOr<WeightsPart> choose_part(const WeightsNode& root, const WeightsRequest& request);

/// Returns `name` without `pieces` ("module." or "module"): each is left out where it begins the name or stands behind
/// a dot, any number of times. The last word of a name is never left out.
std::string name_without(std::string_view name, const std::vector<std::string>& pieces);

/// Returns a hint that names the pieces or the prefix by which the module's names (`wanted`) differ from those of the
/// file. It is empty where no piece or prefix explains the difference.
std::string hint_of_pieces(const std::set<std::string>& wanted, const std::vector<std::string>& in_file);

}  // namespace tessera
