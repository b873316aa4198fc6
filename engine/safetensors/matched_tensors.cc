#include "engine/safetensors/matched_tensors.h"

#include <ATen/ops/empty.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

#include "engine/checkpoint/tensor_bytes.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestName = 200, kMostUnused = 8;
constexpr std::int64_t kComparedBytes = std::int64_t{1} << 22;

/// Why values of `word` cannot be `type`'s; empty: they can.
std::string mismatch(const std::string& word, c10::ScalarType type) {
  const auto in_file = type_of_word(word);
  const bool both_floating = in_file && c10::isFloatingType(*in_file) && c10::isFloatingType(type);
  if (in_file && (both_floating || *in_file == type)) return "";
  return "the model wants " + std::string(c10::toString(type)) + ", the file has " + word;
}

std::vector<std::int64_t> exchanged(std::vector<std::int64_t> sizes) {
  if (sizes.size() == 2) std::swap(sizes[0], sizes[1]);
  return sizes;
}

bool is_ignored(const std::string& name, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns,
                             [&](const std::string& each) { return ::fnmatch(each.c_str(), name.c_str(), 0) == 0; });
}

absl::StatusOr<bool> same_bytes(TensorFiles& files, const TensorFiles::Place& one, const TensorFiles::Place& other) {
  std::vector<std::byte> of_one, of_other;
  for (std::int64_t begin = 0; begin < one.tensor.bytes; begin += kComparedBytes) {
    of_one.resize(static_cast<std::size_t>(std::min(kComparedBytes, one.tensor.bytes - begin)));
    of_other.resize(of_one.size());
    TESSERA_RETURN_IF_ERROR(files.read(one, begin, of_one));
    TESSERA_RETURN_IF_ERROR(files.read(other, begin, of_other));
    if (of_one != of_other) return false;
  }
  return true;
}

/// Finds the tensors of files, and keeps account of what is used.
class Matching {
 public:
  Matching(TensorFiles& files, const ImportOptions& options) : files_(files), options_(options) {}

  absl::Status add(const WantedTensor& wanted) {
    NameInFile in_file = name_of(wanted.name);
    for (const std::string& alias : wanted.aliases) {
      const NameInFile other = name_of(alias);
      in_file.names.insert(in_file.names.end(), other.names.begin(), other.names.end());
      in_file.copies.insert(in_file.copies.end(), other.copies.begin(), other.copies.end());
    }
    const auto found = std::ranges::find_if(in_file.names, [&](const auto& name) { return has(name); });
    if (found == in_file.names.end()) {
      problem(wanted.name, "missing; the file would call it " + joined(in_file.names, " or "));
      return absl::OkStatus();
    }
    const TensorFiles::Place& place = use(*found);
    const auto sizes = in_file.transposed ? exchanged(wanted.sizes) : wanted.sizes;
    if (place.tensor.shape != sizes)
      problem(*found, "the model wants the shape " + text_of_shape(sizes) + ", the file has " +
                          text_of_shape(place.tensor.shape));
    if (const std::string what = mismatch(place.tensor.dtype, wanted.type); !what.empty()) problem(*found, what);
    matched_.tensors.push_back({place, in_file.transposed && sizes.size() == 2});
    for (auto again = found + 1; again != in_file.names.end(); ++again)
      TESSERA_RETURN_IF_ERROR(compare(*found, *again));
    for (const std::string& copy : in_file.copies) TESSERA_RETURN_IF_ERROR(compare(*found, copy));
    return absl::OkStatus();
  }

  absl::StatusOr<MatchedTensors> finish() {
    std::vector<std::string> unused;
    for (const auto& [name, place] : files_.tensors()) {
      if (used_.contains(name)) continue;
      if (is_ignored(name, options_.ignored))
        unused.push_back(quoted_text(name, kLongestName));
      else
        problem(name, "the model has no such tensor");
    }
    if (!problems_.empty())
      return make_error(ExitCode::kCorruptData, "the tensors do not fit the model:" + problems_ +
                                                    "\nhint: ImportOptions::names says what the file calls each "
                                                    "parameter, ImportOptions::ignored what to pass over");
    if (!unused.empty()) {
      const std::size_t count = unused.size();
      unused.resize(std::min(count, kMostUnused));
      matched_.unused = std::to_string(count) + (count == 1 ? " is not used: " : " are not used: ") + joined(unused) +
                        (count > kMostUnused ? ", ..." : "");
    }
    return std::move(matched_);
  }

 private:
  NameInFile name_of(const std::string& name) const {
    return options_.names ? options_.names(name) : NameInFile{{name}};
  }
  bool has(const std::string& name) const { return files_.tensors().contains(name); }
  const TensorFiles::Place& use(const std::string& name) {
    used_.insert(name);
    return files_.tensors().at(name);
  }
  void problem(const std::string& name, const std::string& what) {
    problems_ += "\n  " + quoted_text(name, kLongestName) + ": " + what;
  }

  /// The model has one tensor for both names.
  absl::Status compare(const std::string& name, const std::string& again) {
    if (again == name || !has(again)) return absl::OkStatus();
    const TensorFiles::Place &one = use(name), &other = use(again);
    bool same = one.tensor.dtype == other.tensor.dtype && one.tensor.shape == other.tensor.shape;
    if (same) {
      TESSERA_ASSIGN_OR_RETURN(same, same_bytes(files_, one, other));
    }
    if (!same)
      problem(again, "it has other values than " + quoted_text(name, kLongestName) +
                         ", and the model has one tensor for both. hint: a model that does not tie them takes both; of "
                         "Hugging Face that is one with \"tie_word_embeddings\": false in its config.json");
    return absl::OkStatus();
  }

  TensorFiles& files_;
  const ImportOptions& options_;
  MatchedTensors matched_;
  std::set<std::string> used_;
  std::string problems_;
};

}  // namespace

absl::StatusOr<MatchedTensors> match_tensors(TensorFiles& files, const std::vector<WantedTensor>& wanted,
                                             const ImportOptions& options) {
  Matching matching(files, options);
  for (const WantedTensor& tensor : wanted) TESSERA_RETURN_IF_ERROR(matching.add(tensor));
  return matching.finish();
}

absl::StatusOr<at::Tensor> read_elements(TensorFiles& files, const TensorFiles::Place& place, std::int64_t first,
                                         std::int64_t numel) {
  const c10::ScalarType type = *type_of_word(place.tensor.dtype);
  const at::Tensor values = at::empty({numel}, at::TensorOptions(type));
  TESSERA_RETURN_IF_ERROR(
      files.read(place, first * static_cast<std::int64_t>(c10::elementSize(type)), bytes_of(values)));
  return values;
}

absl::StatusOr<at::Tensor> read_whole(TensorFiles& files, const MatchedTensor& matched) {
  const FileTensor& tensor = matched.place.tensor;
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor flat, read_elements(files, matched.place, 0, numel_of(tensor.shape)));
  const at::Tensor values = flat.view(tensor.shape);
  return matched.transposed ? values.t() : values;
}

}  // namespace tessera
