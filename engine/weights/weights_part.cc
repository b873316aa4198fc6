#include "engine/weights/weights_part.h"

#include <absl/status/status.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/border/phrase.h"

namespace tessera {
namespace {

// This file works as follows. A file is a tree of dictionaries, lists and modules with tensors as leaves (WeightsNode).
// choose_part looks for the node that is meant. If the request names the node, the path is followed key by key
// (`find_way`). Otherwise Search counts, for every node, how many of the module's names it has: first exactly, then up
// to a prefix (`way_by_names`). If no node has any of these names, the only set of weights is taken (`only_way`).
// Listing then names the tensors of the part, and the entries beside it. hint_of_pieces finds out which pieces of names
// a program should leave out.

constexpr std::size_t kMostListed = 8;
constexpr std::size_t kLongestEntry = 200;  ///< number of characters of a name that messages repeat
constexpr std::size_t kMostTried = 16;      ///< largest number of prefixes that are tried

/// The pieces that wrappers of PyTorch put into the names of their modules: DataParallel and DDP, torch.compile, FSDP,
/// checkpoint_wrapper.
const std::vector<std::string> kWrappers = {"module.", "_orig_mod.", "_fsdp_wrapped_module.",
                                            "_checkpoint_wrapped_module."};

std::string in_quotes(std::string_view text) { return quoted_text(text, kLongestEntry); }

std::string list_of(const std::vector<std::string>& words) {
  std::vector<std::string> all;
  for (const std::string& word : words) all.push_back(in_quotes(word));
  return joined(all);
}

bool holds_tensor(const WeightsNode& node) {
  return node.kind == WeightsNode::Kind::kTensor || std::ranges::any_of(node.entries, holds_tensor);
}

/// Returns whether the node holds a number or a text somewhere, and not only modules without weights.
bool holds_other(const WeightsNode& node) {
  return node.kind == WeightsNode::Kind::kOther || std::ranges::any_of(node.entries, holds_other);
}

std::string what_of(const WeightsNode& node) {
  if (node.kind == WeightsNode::Kind::kOther) return node.what;
  return std::string(node.kind == WeightsNode::Kind::kList ? "a list" : "a dictionary") + " of " +
         counted(node.entries.size(), "entry", "entries");
}

std::string below(const std::string& path, const std::string& name, char separator) {
  return path.empty() ? name : path + separator + name;
}

/// Calls `visit` with the ends of a name ("a.b.c", "b.c", "c") until `visit` returns true.
template <class Visit>
bool any_end_of(std::string_view name, const Visit& visit) {
  for (std::size_t begin = 0;; ++begin) {
    if (visit(name.substr(begin))) return true;
    begin = name.find('.', begin);
    if (begin == std::string_view::npos) return false;
  }
}

/// A dictionary, list or module that a request could mean.
struct Candidate {
  const WeightsNode* node = nullptr;
  std::size_t above = 0;       ///< index of the candidate that contains this one; for the root, its own index
  std::size_t name_begin = 0;  ///< index of the candidate's first name among the root's names
  std::size_t found = 0;       ///< number of wanted names that the candidate has
};

using IsWanted = std::function<bool(std::string_view name)>;

/// Lists all candidates, each after the candidate that contains it, and counts how many wanted names each candidate
/// has.
class Search {
 public:
  Search(const WeightsNode& root, const IsWanted& is_wanted) : is_wanted_(is_wanted) { visit(root, 0); }

  std::optional<std::size_t> best() const {
    std::optional<std::size_t> best;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      // If two candidates have the same number of wanted names, and one contains the other, the inner candidate is
      // better: it has fewer unwanted tensors.
      if (all_[i].found > 0 &&
          (!best || all_[i].found > all_[*best].found || (all_[i].found == all_[*best].found && is_above(*best, i))))
        best = i;
    }
    return best;
  }

  /// Returns whether no other candidate has any of the wanted names, except candidates that contain the chosen one or
  /// lie in it.
  bool is_alone(std::size_t chosen) const {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (all_[i].found > 0 && !is_above(i, chosen) && !is_above(chosen, i)) return false;
    }
    return true;
  }

  std::vector<const WeightsNode*> way_to(std::size_t i) const {
    std::vector<const WeightsNode*> way = {all_[i].node};
    for (; i != 0; i = all_[i].above) way.push_back(all_[all_[i].above].node);
    std::ranges::reverse(way);
    return way;
  }

 private:
  void visit(const WeightsNode& node, std::size_t above) {
    const std::size_t place = all_.size();
    all_.push_back({&node, above, name_.size(), 0});
    open_.push_back(place);
    const std::size_t length = name_.size();
    for (const WeightsNode& entry : node.entries) {
      name_ += entry.name;
      if (entry.kind == WeightsNode::Kind::kTensor) {
        count();
      } else if (!entry.entries.empty()) {
        name_ += '.';
        visit(entry, place);
      }
      name_.resize(length);
    }
    open_.pop_back();
  }

  void count() {
    for (const std::size_t i : open_)
      all_[i].found += is_wanted_(std::string_view(name_).substr(all_[i].name_begin)) ? 1 : 0;
  }

  /// Returns whether `upper` contains `lower`, or is the same candidate.
  bool is_above(std::size_t upper, std::size_t lower) const {
    while (lower > upper) lower = all_[lower].above;
    return lower == upper;
  }

  const IsWanted& is_wanted_;
  std::vector<Candidate> all_;
  std::vector<std::size_t> open_;  ///< the candidates from the root down to the present candidate
  std::string name_;
};

/// Returns the path from the root towards the tensors. It ends at a module, or at a node that has tensors in several
/// entries or directly.
std::vector<const WeightsNode*> only_way(const WeightsNode& root) {
  std::vector<const WeightsNode*> way = {&root};
  for (;;) {
    const WeightsNode& node = *way.back();
    if (node.kind == WeightsNode::Kind::kModule) return way;
    std::vector<const WeightsNode*> holders;
    for (const WeightsNode& entry : node.entries) {
      if (holds_tensor(entry)) holders.push_back(&entry);
    }
    if (holders.size() != 1 || holders.front()->kind == WeightsNode::Kind::kTensor) return way;
    way.push_back(holders.front());
  }
}

/// Returns whether the node itself is a set of weights, and not something that holds several sets.
bool is_one_set(const WeightsNode& node) {
  return node.kind == WeightsNode::Kind::kModule || std::ranges::any_of(node.entries, [](const WeightsNode& entry) {
           return entry.kind == WeightsNode::Kind::kTensor;
         });
}

std::size_t tensors_in(const WeightsNode& node) {
  std::size_t count = node.kind == WeightsNode::Kind::kTensor ? 1 : 0;
  for (const WeightsNode& entry : node.entries) count += tensors_in(entry);
  return count;
}

std::string first_name(const WeightsNode& node) {
  for (const WeightsNode& entry : node.entries) {
    if (entry.kind == WeightsNode::Kind::kTensor) return entry.name;
    if (holds_tensor(entry)) return below(entry.name, first_name(entry), '.');
  }
  return "";
}

/// Adds a line for each set of weights. An example of a line is `"state_dict": 12 tensors, such as "fc.weight"`.
void list_sets(const WeightsNode& node, const std::string& path, std::vector<std::string>& lines) {
  if (!holds_tensor(node)) return;
  if (is_one_set(node)) {
    lines.push_back("\n  " + in_quotes(path) + ": " + counted(tensors_in(node), "tensor") + ", such as " +
                    in_quotes(first_name(node)));
    return;
  }
  for (const WeightsNode& entry : node.entries) list_sets(entry, below(path, entry.name, '/'), lines);
}

absl::Status list_and_refuse(const WeightsNode& root, const std::string& what) {
  std::vector<std::string> lines;
  list_sets(root, "", lines);
  const std::size_t count = lines.size();
  lines.resize(std::min(count, kMostListed));
  if (count > kMostListed) lines.push_back("\n  and " + std::to_string(count - kMostListed) + " more");
  return make_error(ExitCode::kCorruptData,
                    what + ":" + joined(lines, "") + "\n[T0342] hint: choose one of them by " + say(phrases::kPart));
}

/// Finds the nodes through which a path of keys leads. A key may contain a slash, so every way to split the path into
/// keys is tried.
bool find_way(const WeightsNode& node, std::string_view path, std::vector<const WeightsNode*>& way) {
  way.push_back(&node);
  if (path.empty()) return true;
  for (const WeightsNode& entry : node.entries) {
    if (entry.name.empty() || !path.starts_with(entry.name)) continue;
    std::string_view rest = path.substr(entry.name.size());
    if (!rest.empty() && rest.front() != '/') continue;
    if (!rest.empty()) rest.remove_prefix(1);
    if (find_way(entry, rest, way)) return true;
  }
  way.pop_back();
  return false;
}

/// Lists the tensors of a part, and the entries beside the path to it.
class Listing {
 public:
  explicit Listing(const WeightsRequest& request) : request_(request) {}

  absl::StatusOr<WeightsPart> of(const std::vector<const WeightsNode*>& way) {
    for (std::size_t i = 0; i + 1 < way.size(); ++i) {
      for (const WeightsNode& entry : way[i]->entries) {
        if (&entry != way[i + 1]) part_.unused.push_back(below(part_.path, entry.name, '/'));
      }
      part_.path = below(part_.path, way[i + 1]->name, '/');
    }
    TESSERA_RETURN_IF_ERROR(add(*way.back(), ""));
    return std::move(part_);
  }

 private:
  absl::Status add(const WeightsNode& node, const std::string& prefix) {
    for (const WeightsNode& entry : node.entries) {
      const std::string name = below(prefix, entry.name, '.');
      if (entry.kind == WeightsNode::Kind::kTensor) {
        TESSERA_RETURN_IF_ERROR(add_tensor(name, entry.tensor));
      } else if (holds_tensor(entry)) {
        TESSERA_RETURN_IF_ERROR(add(entry, name));
      } else if (holds_other(entry)) {
        part_.others.emplace_back(name, what_of(entry));
      }
    }
    return absl::OkStatus();
  }

  absl::Status add_tensor(const std::string& name, std::size_t tensor) {
    const std::string shorter = name_without(name, request_.without);
    if (!names_.insert(shorter).second)
      return make_error(ExitCode::kCorruptData, "has the name " + in_quotes(shorter) + " twice" +
                                                    (shorter == name ? ". [T0343] hint: write it anew, each name once"
                                                                     : ", the second time as " + in_quotes(name) +
                                                                           ". [T0344] hint: leave fewer pieces of " +
                                                                           "names out by " + say(phrases::kWithout)));
    part_.tensors.emplace_back(shorter, tensor);
    return absl::OkStatus();
  }

  const WeightsRequest& request_;
  WeightsPart part_;
  std::set<std::string> names_;
};

/// Returns the path to the part that has the module's names, or to the only part that could be meant.
absl::StatusOr<std::vector<const WeightsNode*>> way_by_names(const WeightsNode& root, const WeightsRequest& request) {
  const IsWanted has_it = [&](std::string_view name) {
    return request.wanted.contains(name_without(name, request.without));
  };
  // A name resembles a wanted name if one of the two names is the other name with a prefix in front.
  std::set<std::string, std::less<>> ends;
  for (const std::string& name : request.wanted)
    any_end_of(name, [&](std::string_view end) { return ends.emplace(end), false; });
  const IsWanted resembles = [&](std::string_view name) {
    const std::string bare = name_without(name_without(name, request.without), kWrappers);
    return ends.contains(bare) ||
           any_end_of(bare, [&](std::string_view end) { return request.wanted.contains(std::string(end)); });
  };
  for (const IsWanted* const is_wanted : {&has_it, &resembles}) {
    const Search search(root, *is_wanted);
    const auto best = search.best();
    if (best && search.is_alone(*best)) return search.way_to(*best);
    if (best)
      return list_and_refuse(root, std::string("holds several sets of weights, and more than one of them has names ") +
                                       (is_wanted == &has_it ? "of the model" : "like the model's"));
  }
  const auto way = only_way(root);
  if (!is_one_set(*way.back()))
    return list_and_refuse(root, "holds several sets of weights, and none of them has a name of the model");
  return way;
}

}  // namespace

std::string name_without(std::string_view name, const std::vector<std::string>& pieces) {
  if (pieces.empty()) return std::string(name);
  std::string rest;
  while (!name.empty()) {
    const auto fits = [&](std::string_view piece) {
      if (piece.ends_with('.')) piece.remove_suffix(1);
      return !piece.empty() && name.size() > piece.size() + 1 && name.starts_with(piece) && name[piece.size()] == '.';
    };
    const auto piece = std::ranges::find_if(pieces, fits);
    if (piece != pieces.end()) {
      name.remove_prefix(piece->size() + (piece->ends_with('.') ? 0 : 1));
      continue;
    }
    const std::size_t end = std::min(name.find('.'), name.size() - 1) + 1;
    rest += name.substr(0, end);
    name.remove_prefix(end);
  }
  return rest;
}

std::string hint_of_pieces(const std::set<std::string>& wanted, const std::vector<std::string>& in_file) {
  const auto found_without = [&](const std::vector<std::string>& pieces) {
    std::set<std::string> bare;
    for (const std::string& name : wanted) bare.insert(name_without(name, pieces));
    return std::ranges::count_if(in_file,
                                 [&](const std::string& name) { return bare.contains(name_without(name, pieces)); });
  };
  std::vector<std::string> pieces;
  auto most = found_without(pieces);
  const auto take_if_better = [&](std::vector<std::string> tried) {
    const auto found = found_without(tried);
    if (found <= most) return;
    most = found;
    pieces = std::move(tried);
  };
  take_if_better(kWrappers);
  std::erase_if(pieces, [&](const std::string& piece) {
    const auto has_it = [&](const std::string& name) { return name_without(name, {piece}) != name; };
    return std::ranges::none_of(in_file, has_it) && std::ranges::none_of(wanted, has_it);
  });
  // A prefix is the text in front of a model's name in the file, or in front of a file's name in the model.
  std::set<std::string> names, prefixes;
  for (const std::string& name : in_file) names.insert(name_without(name, pieces));
  const auto add_prefixes = [&](const std::string& longer, const std::set<std::string>& among) {
    any_end_of(longer, [&](std::string_view end) {
      if (end.size() < longer.size() && among.contains(std::string(end)))
        prefixes.insert(longer.substr(0, longer.size() - end.size()));
      return prefixes.size() >= kMostTried;
    });
  };
  for (const std::string& name : names) add_prefixes(name, wanted);
  for (const std::string& name : wanted) add_prefixes(name, names);
  const std::vector<std::string> without_prefix = pieces;
  for (const std::string& prefix : prefixes) {
    std::vector<std::string> more = without_prefix;
    more.push_back(prefix);
    take_if_better(std::move(more));
  }
  if (pieces.empty()) return "";
  return "\n[T0345] hint: leave " + list_of(pieces) + " out of all names by " + say(phrases::kWithout);
}

absl::StatusOr<WeightsPart> choose_part(const WeightsNode& root, const WeightsRequest& request) {
  if (!holds_tensor(root))
    return make_error(ExitCode::kCorruptData,
                      "holds no tensor, but " + what_of(root) +
                          ". [T0346] hint: write a dictionary from names to tensors, such as model.state_dict()");
  std::vector<const WeightsNode*> way;
  if (request.part.empty()) {
    TESSERA_ASSIGN_OR_RETURN(way, way_by_names(root, request));
  } else if (!find_way(root, request.part, way) || !holds_tensor(*way.back()) ||
             way.back()->kind == WeightsNode::Kind::kTensor) {
    return list_and_refuse(root, "holds no set of weights " + in_quotes(request.part) + ", but");
  }
  return Listing(request).of(way);
}

}  // namespace tessera
