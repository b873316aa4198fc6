#include "engine/weights/matched_tensors.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/tensor_header.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestName = 200, kMostUnused = 8;
constexpr std::size_t kMostNearNames = 8;     ///< similar names are searched for only if at most this many tensors are
                                              ///< missing
constexpr std::size_t kMostCandidates = 500;  ///< similar names are searched for only if at most this many names are
                                              ///< left
constexpr std::int64_t kComparedElements = std::int64_t{1} << 20;

/// Returns the reason why values of the file's type cannot become `type`; empty if they can.
std::string mismatch(const StoredTensor& in_file, c10::ScalarType type) {
  const bool both_floating =
      in_file.scalar_type && c10::isFloatingType(*in_file.scalar_type) && c10::isFloatingType(type);
  if (both_floating || in_file.scalar_type == type) return "";
  return "the model wants " + std::string(c10::toString(type)) + ", the file has " + in_file.type;
}

std::vector<std::int64_t> exchanged(std::vector<std::int64_t> sizes) {
  if (sizes.size() == 2) std::swap(sizes[0], sizes[1]);
  return sizes;
}

bool is_ignored(const std::string& name, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns,
                             [&](const std::string& each) { return ::fnmatch(each.c_str(), name.c_str(), 0) == 0; });
}

absl::StatusOr<bool> same_elements(TensorSource& source, const std::string& one, const std::string& other,
                                   std::int64_t numel) {
  for (std::int64_t begin = 0; begin < numel; begin += kComparedElements) {
    const std::int64_t count = std::min(kComparedElements, numel - begin);
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor of_one, source.read(one, begin, count));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor of_other, source.read(other, begin, count));
    if (std::memcmp(of_one.const_data_ptr(), of_other.const_data_ptr(), of_one.nbytes()) != 0) return false;
  }
  return true;
}

/// Finds the tensors of files, and notes which of them are used.
class Matching {
 public:
  Matching(TensorSource& source, const MatchRules& rules) : source_(source), rules_(rules) {}

  absl::Status add(const WantedTensor& wanted) {
    NameInFile in_file = name_of(wanted.name);
    for (const std::string& alias : wanted.aliases) {
      const NameInFile other = name_of(alias);
      in_file.names.insert(in_file.names.end(), other.names.begin(), other.names.end());
      in_file.copies.insert(in_file.copies.end(), other.copies.begin(), other.copies.end());
    }
    wanted_.insert(wanted_.end(), in_file.names.begin(), in_file.names.end());
    const auto found = std::ranges::find_if(in_file.names, [&](const auto& name) { return has(name); });
    if (found == in_file.names.end()) {
      missing_.push_back({wanted.name, in_file.names});
      return absl::OkStatus();
    }
    const StoredTensor& stored = use(*found);
    const auto sizes = in_file.transposed ? exchanged(wanted.sizes) : wanted.sizes;
    if (stored.sizes != sizes)
      problem(*found,
              "the model wants the shape " + text_of_shape(sizes) + ", the file has " + text_of_shape(stored.sizes));
    if (const std::string what = mismatch(stored, wanted.type); !what.empty()) problem(*found, what);
    matched_.tensors.push_back({*found, stored.sizes, in_file.transposed && sizes.size() == 2});
    for (auto again = found + 1; again != in_file.names.end(); ++again)
      TESSERA_RETURN_IF_ERROR(compare(*found, *again));
    for (const std::string& copy : in_file.copies) TESSERA_RETURN_IF_ERROR(compare(*found, copy));
    return absl::OkStatus();
  }

  absl::StatusOr<MatchedTensors> finish() {
    std::vector<std::string> unused, superfluous, names;
    for (const auto& [name, tensor] : source_.tensors()) {
      names.push_back(name);
      if (used_.contains(name)) continue;
      is_ignored(name, rules_.ignored) ? unused.push_back(quoted_text(name, kLongestName))
                                       : superfluous.push_back(name);
    }
    std::set<std::string_view> missing;
    for (const Missing& each : missing_) missing.insert(each.in_file.front());
    std::map<std::string_view, std::string_view> others;  // entries that are no tensors, by name
    for (const auto& [name, what] : source_.others()) {
      others.emplace(name, what);
      if (is_ignored(name, rules_.ignored))
        unused.push_back(quoted_text(name, kLongestName));
      else if (!missing.contains(name))
        problem(name, what + ", and no tensor");
    }
    name_missing(superfluous, others);
    for (const std::string& name : superfluous) problem(name, "the model has no such tensor");
    if (!problems_.empty())
      return make_error(ExitCode::kCorruptData,
                        "the tensors do not fit the model:" + problems_ + rules_.hint(wanted_, names));
    for (const std::string& beside : source_.unused()) unused.push_back(quoted_text(beside, kLongestName));
    if (!unused.empty()) {
      const std::size_t count = unused.size();
      unused.resize(std::min(count, kMostUnused));
      matched_.unused = std::to_string(count) + (count == 1 ? " is not used: " : " are not used: ") + joined(unused) +
                        (count > kMostUnused ? ", ..." : "");
    }
    return std::move(matched_);
  }

 private:
  struct Missing {
    std::string name;
    std::vector<std::string> in_file;  ///< the names that the tensor may have in the file
  };

  NameInFile name_of(const std::string& name) const { return rules_.names ? rules_.names(name) : NameInFile{{name}}; }
  bool has(const std::string& name) const { return source_.tensors().contains(name); }
  const StoredTensor& use(const std::string& name) {
    used_.insert(name);
    return source_.tensors().at(name);
  }
  void problem(const std::string& name, const std::string& what) {
    problems_ += "\n  " + quoted_text(name, kLongestName) + ": " + what;
  }

  /// Reports the missing tensors, and the entries that the file has in their place (`others`). If an unused name of the
  /// file is nearly the same as a missing name, the report shows it.
  void name_missing(const std::vector<std::string>& superfluous,
                    const std::map<std::string_view, std::string_view>& others) {
    const bool looks = missing_.size() <= kMostNearNames && superfluous.size() <= kMostCandidates;
    for (const Missing& each : missing_) {
      if (const auto other = others.find(each.in_file.front()); other != others.end()) {
        problem(each.name, "the file has " + std::string(other->second) + " in its place");
        continue;
      }
      const bool is_the_models = each.in_file == std::vector<std::string>{each.name};
      const std::string near = looks ? nearest(each.in_file.front(), superfluous) : "";
      problem(each.name, (is_the_models ? "missing in the file"
                                        : "missing; the file would call it " + joined(each.in_file, " or ")) +
                             (near.empty() ? "" : ", and it has " + quoted_text(near, kLongestName)));
    }
  }

  /// Checks that two names of the file have the same values, because the model has one tensor for both names.
  absl::Status compare(const std::string& name, const std::string& again) {
    if (again == name || !has(again)) return absl::OkStatus();
    const StoredTensor &one = use(name), &other = use(again);
    bool same = one.scalar_type && one.type == other.type && one.sizes == other.sizes;
    if (same) {
      TESSERA_ASSIGN_OR_RETURN(same, same_elements(source_, name, again, tessera::numel_of(one.sizes)));
    }
    if (!same)
      problem(again, "it has other values than " + quoted_text(name, kLongestName) +
                         ", and the model has one tensor for both. [T0303] hint: a model that does not tie them takes "
                         "both; of Hugging Face that is one with \"tie_word_embeddings\": false in its config.json");
    return absl::OkStatus();
  }

  TensorSource& source_;
  const MatchRules& rules_;
  MatchedTensors matched_;
  std::vector<std::string> wanted_;
  std::vector<Missing> missing_;
  std::set<std::string> used_;
  std::string problems_;
};

}  // namespace

MatchRules rules_of(const ImportOptions& options) {
  return {.names = options.names, .ignored = options.ignored, .hint = [](const auto&, const auto&) {
            return "\n[T0304] hint: ImportOptions::names says what the file calls each parameter, "
                   "ImportOptions::ignored what to pass over";
          }};
}

absl::StatusOr<MatchedTensors> match_tensors(TensorSource& source, const std::vector<WantedTensor>& wanted,
                                             const MatchRules& rules) {
  Matching matching(source, rules);
  for (const WantedTensor& tensor : wanted) TESSERA_RETURN_IF_ERROR(matching.add(tensor));
  return matching.finish();
}

absl::StatusOr<at::Tensor> read_whole(TensorSource& source, const MatchedTensor& matched) {
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor flat, source.read(matched.name, 0, numel_of(matched.sizes)));
  const at::Tensor values = flat.view(matched.sizes);
  return matched.transposed ? values.t() : values;
}

}  // namespace tessera
