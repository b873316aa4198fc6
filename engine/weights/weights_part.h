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

/// The tensors of a file that are wanted: the LoadOptions, and the names of the module.
struct WeightsRequest {
  std::string part = {};                  ///< LoadOptions::part
  std::vector<std::string> without = {};  ///< LoadOptions::without
  std::set<std::string> wanted = {};      ///< the module's names, without the pieces of `without`
};

/// The part of a file that was chosen: a dictionary, list or module. Names in it are joined by dots, without the pieces
/// of WeightsRequest::without.
struct WeightsPart {
  std::string path = {};  ///< keys from the root on, joined by slashes: "checkpoint/state_dict"; empty means the whole
                          ///< file
  std::vector<std::pair<std::string, std::size_t>> tensors = {};  ///< pairs of a name and WeightsNode::tensor
  /// Entries that are not tensors and contain none, each with a description: {"epoch", "a number"}.
  std::vector<std::pair<std::string, std::string>> others = {};
  std::vector<std::string> unused = {};  ///< keys that do not belong to the part, such as "optimizer"
};

/// Chooses the part that the request names. If the request names none, the function chooses the part that has the
/// largest number of the module's names, and among several such parts the innermost. A part that neither contains the
/// chosen part nor lies in it must have none of these names. If no part has any of them, the only part that could be
/// meant is taken, so that names can be compared. Errors: 65 if there is no such part, if several parts could be meant
/// (the error lists the content of the file), or if a name exists twice.
absl::StatusOr<WeightsPart> choose_part(const WeightsNode& root, const WeightsRequest& request);

/// Returns `name` without `pieces` (such as "module." or "module"). Each piece is left out at the beginning of the name
/// and behind a dot, any number of times. The last word of a name is never left out.
std::string name_without(std::string_view name, const std::vector<std::string>& pieces);

/// Returns a hint that names the pieces or the prefix by which the module's names (`wanted`) differ from those of the
/// file. It is empty if no piece or prefix explains the difference.
std::string hint_of_pieces(const std::set<std::string>& wanted, const std::vector<std::string>& in_file);

}  // namespace tessera
