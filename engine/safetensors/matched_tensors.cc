#include "engine/safetensors/matched_tensors.h"

#include <ATen/ops/empty.h>
#include <fnmatch.h>

#include <algorithm>
#include <set>
#include <utility>

#include "engine/checkpoint/tensor_bytes.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestName = 200;

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

}  // namespace

absl::StatusOr<std::vector<MatchedTensor>> match_tensors(const TensorFiles& files,
                                                         const std::vector<WantedTensor>& wanted,
                                                         const ImportOptions& options) {
  std::string problems;
  const auto problem = [&](const std::string& name, const std::string& what) {
    problems += "\n  " + quoted_text(name, kLongestName) + ": " + what;
  };
  std::vector<MatchedTensor> matched;
  std::set<std::string> used;
  for (const WantedTensor& tensor : wanted) {
    const NameInFile in_file = options.names ? options.names(tensor.name) : NameInFile{{tensor.name}};
    const auto name =
        std::ranges::find_if(in_file.names, [&](const auto& each) { return files.tensors().contains(each); });
    if (name == in_file.names.end()) {
      problem(tensor.name, "missing; the file would call it " + joined(in_file.names, " or "));
      continue;
    }
    const TensorFiles::Place& place = files.tensors().at(*name);
    used.insert(*name);
    const auto sizes = in_file.transposed ? exchanged(tensor.sizes) : tensor.sizes;
    if (place.tensor.shape != sizes)
      problem(*name, "the model wants the shape " + text_of_shape(sizes) + ", the file has " +
                         text_of_shape(place.tensor.shape));
    if (const std::string what = mismatch(place.tensor.dtype, tensor.type); !what.empty()) problem(*name, what);
    matched.push_back({place, in_file.transposed && sizes.size() == 2});
  }
  for (const auto& [name, place] : files.tensors())
    if (!used.contains(name) && !is_ignored(name, options.ignored)) problem(name, "the model has no such tensor");
  if (problems.empty()) return matched;
  return make_error(ExitCode::kCorruptData, "the tensors do not fit the model:" + problems);
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
