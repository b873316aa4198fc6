// Fuzzes files of weights. The tree of an archive's pickle stays within its bounds, and its parts have different names.
// The code that recognizes other files is fuzzed, too.

#include <set>

#include "engine/weights/weights_kind.h"
#include "engine/weights/weights_part.h"
#include "engine/weights/weights_pickle.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

namespace {

/// Returns the number of nodes in this tree.
std::size_t count(const WeightsNode& node, std::size_t tensors, int depth) {
  fuzz::expect(depth <= WeightsNode::kDeepest, "a tree is no deeper than kDeepest");
  const bool is_tensor = node.kind == WeightsNode::Kind::kTensor;
  fuzz::expect(!is_tensor || node.tensor < tensors, "a leaf is a tensor of the file");
  fuzz::expect(!is_tensor || node.entries.empty(), "a leaf has nothing below it");
  std::size_t nodes = 1;
  for (const WeightsNode& entry : node.entries) nodes += count(entry, tensors, depth + 1);
  return nodes;
}

void try_to_choose(const PickledWeights& weights, const WeightsRequest& request) {
  const auto part = choose_part(weights.root, request);
  if (!part.ok()) return;
  fuzz::expect(!part->tensors.empty(), "a part has a tensor");
  std::set<std::string> names;
  for (const auto& [name, number] : part->tensors) {
    fuzz::expect(names.insert(name).second, "a part has each name once");
    fuzz::expect(number < weights.tensors.size(), "a part has tensors of the file");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  fuzz::expect(!kind_of_beginning(text.substr(0, kBytesOfBeginning)).what.empty(), "each file is of a kind");
  const ReadBytes read = [&](std::uint64_t place, std::size_t bytes, char* to) {
    if (place > text.size() || bytes > text.size() - place) return false;
    text.copy(to, bytes, place);
    return true;
  };
  if (const auto names = names_in_zip(read, text.size())) static_cast<void>(kind_of_zip(*names));
  const auto weights = read_weights_pickle(text);
  if (!weights.ok()) return 0;
  fuzz::expect(count(weights->root, weights->tensors.size(), 0) <= WeightsNode::kMost,
               "a tree has at most kMost nodes");
  try_to_choose(*weights, {});
  try_to_choose(*weights, {.wanted = {"weight", "linear.weight", "0"}});
  try_to_choose(*weights, {.without = {"module.", "linear"}, .wanted = {"weight", "bias"}});
  for (const char* part : {"model", "state_dict", "0", "a/b"}) try_to_choose(*weights, {.part = part});
  return 0;
}
