// tessera checkpoint ...: looks at checkpoints on disk, without a model.
//
// There is a function for each command: `list`, `show`, `verify`, `diff` and `reshard`. Each function opens checkpoints
// with SavedCheckpoint. A damaged header is an error before anything is printed, but `list` prints this error beside
// the checkpoint's name. `verify` reads all chunks in the order of the files. `diff` reads the tensors of both
// checkpoints, kPortion elements at a time.

#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/reshard.h"
#include "checkpoint/saved_checkpoint.h"
#include "runtime/base/bytes.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/app/commands.h"
#include "workshop/app/exit_code_after.h"

namespace tessera::app {
namespace {

constexpr char kWho[] = "tessera checkpoint";
constexpr std::int64_t kPortion = std::int64_t{1} << 18;  // elements compared at once
constexpr int kDiffers = 1;

int report(const absl::StatusOr<int>& code) { return code.ok() ? *code : exit_code_after(code.status()); }

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

absl::StatusOr<std::unique_ptr<SavedCheckpoint>> open_at(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string folder, find_checkpoint(path, kWho));
  return SavedCheckpoint::open(folder, kWho);
}

std::int64_t bytes_of(const Manifest& manifest) {
  std::int64_t bytes = 0;
  for (const SavedFile& file : manifest.files) bytes += file.bytes;
  return bytes;
}

/// Returns a text such as "exp_avg fp32, exp_avg_sq fp32".
std::string states_text(const Manifest& manifest) {
  std::vector<std::string> words;
  for (const SavedState& state : manifest.states) words.push_back(state.name + " " + state.format);
  return words.empty() ? "none" : joined(words);
}

absl::StatusOr<int> list(const std::string& folder) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<ListedCheckpoint> there, list_checkpoints(folder, kWho));
  const absl::StatusOr<std::string> latest = latest_checkpoint(folder, kWho), best = best_checkpoint(folder, kWho);
  for (const ListedCheckpoint& each : there) {
    const auto checkpoint = SavedCheckpoint::open(folder + "/" + each.name, kWho);
    std::string about = "damaged: " + message_of(checkpoint.status());
    if (checkpoint.ok()) {
      const Manifest& manifest = (*checkpoint)->manifest();
      about = c10::str(format_bytes(bytes_of(manifest)), "  ", manifest.ranks, " ranks  ", manifest.parameters.size(),
                       " parameters");
    }
    if (latest.ok() && *latest == each.name) about += "  latest";
    if (best.ok() && *best == each.name) about += "  best";
    print(each.name + "  " + about + "\n");
  }
  if (there.empty()) print("no checkpoints in " + folder + "\n");
  if (!there.empty() && !latest.ok()) return latest.status();
  return 0;
}

/// Returns "11 updates" or "frozen", or "frozen after 11 updates" if the parameter has earlier states.
std::string training_of(const SavedParameter& parameter) {
  const std::string updates = c10::str(parameter.updates, " updates");
  if (parameter.trains) return updates;
  return parameter.keeps_states() ? "frozen after " + updates : "frozen";
}

void print_parameters(const Manifest& manifest) {
  for (const SavedParameter& parameter : manifest.parameters) {
    const std::string tied = parameter.aliases.empty() ? "" : "  tied to " + joined(parameter.aliases);
    print(c10::str("  ", quoted_text(parameter.name, 200), "  ", parameter.dtype, " ",
                   c10::IntArrayRef(parameter.shape), "  ", training_of(parameter), tied, "\n"));
  }
}

void print_tensors(const char* title, const std::vector<SavedTensor>& tensors) {
  if (tensors.empty()) return;
  print(c10::str(title, "\n"));
  for (const SavedTensor& tensor : tensors)
    print(c10::str("  ", quoted_text(tensor.name, 200), "  ", tensor.dtype, " ", c10::IntArrayRef(tensor.shape), "\n"));
}

absl::StatusOr<int> show(const CheckpointCommand& command) {
  TESSERA_ASSIGN_OR_RETURN(const auto checkpoint, open_at(command.path));
  const Manifest& manifest = checkpoint->manifest();
  if (command.json) {
    print(write_manifest(manifest));
    return 0;
  }
  print(c10::str(checkpoint->folder(), "\nwritten by ", manifest.written_by, "\nstep ", manifest.step, ", of which ",
                 manifest.progress.steps_applied, " updated parameters\n", manifest.ranks, " ranks, mesh ",
                 manifest.replicate, " x ", manifest.shard, ", ", format_bytes(bytes_of(manifest)), " in ",
                 manifest.files.size(), " files\n"));
  print("optimizer states: " + states_text(manifest) + "\n");
  if (manifest.progress.loss_scale) print(c10::str("loss scale ", manifest.progress.loss_scale->scale, "\n"));
  if (const auto& processor = manifest.processor) {
    const std::string threads = counted(processor->threads, "thread") + " a rank";
    print(c10::str("processor: ", processor->gpu.empty() ? threads : processor->gpu, ", LibTorch's operators for ",
                   processor->libtorch, ", Tessera's for ", processor->tessera, "\n"));
  }
  if (manifest.residuals)
    print(c10::str("residuals of gradients that were compressed: of ", manifest.ranks, " ranks\n"));
  if (manifest.data)
    print(c10::str("data: epoch ", manifest.data->epoch, ", ", manifest.data->consumed, " of ",
                   manifest.data->num_samples, " samples taken, seed ", manifest.data->seed, "\n"));
  print(c10::str(manifest.parameters.size(), " parameters\n"));
  print_parameters(manifest);
  print_tensors("buffers", manifest.buffers);
  print_tensors("items", manifest.items);
  for (const auto& [name, text] : manifest.json_items)
    print("item " + quoted_text(name) + ": " + clipped(text, 1000) + "\n");
  return 0;
}

absl::StatusOr<int> verify(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const auto checkpoint, open_at(path));
  absl::Status first;
  std::int64_t damaged = 0;
  for (std::int64_t chunk = 0; chunk < checkpoint->chunks(); ++chunk) {
    const absl::Status status = checkpoint->verify(chunk);
    if (status.ok()) continue;
    std::fprintf(stderr, "%s\n", message_of(status).c_str());
    if (damaged++ == 0) first = status;
  }
  if (damaged > 0)
    return make_error(
        exit_code_of(first),
        c10::str(checkpoint->folder(), ": ", damaged, " of ", checkpoint->chunks(),
                 " chunks are damaged. [T0010] hint: load an earlier checkpoint, or another copy of this one"));
  print(c10::str(checkpoint->folder(), " is whole: ", format_bytes(bytes_of(checkpoint->manifest())), " in ",
                 checkpoint->manifest().files.size(), " files, ", checkpoint->chunks(), " chunks\n"));
  return 0;
}

/// A tensor of a checkpoint. Its key in Tensors is its kind ("master", "exp_avg") and its name.
struct Tensor {
  std::string dtype;
  std::int64_t numel = 0;
  friend bool operator==(const Tensor&, const Tensor&) = default;
};
using Tensors = std::map<std::pair<std::string, std::string>, Tensor>;

Tensors tensors_of(const SavedCheckpoint& checkpoint) {
  Tensors tensors;
  const auto add = [&](const std::string& what, const std::string& name) {
    const auto pieces = checkpoint.pieces(what, name);
    if (!pieces.empty())
      tensors[{what, name}] = {pieces[0].piece.dtype, pieces.back().piece.offset + pieces.back().piece.numel};
  };
  const Manifest& manifest = checkpoint.manifest();
  for (const SavedParameter& parameter : manifest.parameters) {
    for (const char* what : {kMaster, kValue}) add(what, parameter.name);
    for (const SavedState& state : manifest.states) {
      add(state.name, parameter.name);
      add(state.name + kScales, parameter.name);
    }
  }
  for (const SavedTensor& buffer : manifest.buffers) add(kBuffer, buffer.name);
  for (const SavedTensor& item : manifest.items) add(kItem, item.name);
  return tensors;
}

/// The differences of two tensors of one type and size.
struct Difference {
  std::int64_t elements = 0;
  double largest = 0;  ///< largest difference of two elements, for F32
};

absl::StatusOr<Difference> compare(SavedCheckpoint& a, SavedCheckpoint& b, const std::string& what,
                                   const std::string& name, const Tensor& tensor) {
  Difference difference;
  const auto size = static_cast<std::size_t>(element_bytes(tensor.dtype));
  std::vector<std::byte> left, right;
  for (std::int64_t begin = 0; begin < tensor.numel; begin += kPortion) {
    const auto count = static_cast<std::size_t>(std::min(kPortion, tensor.numel - begin));
    left.resize(count * size);
    right.resize(count * size);
    TESSERA_RETURN_IF_ERROR(a.read(what, name, begin, left));
    TESSERA_RETURN_IF_ERROR(b.read(what, name, begin, right));
    for (std::size_t i = 0; i < count; ++i) {
      if (std::memcmp(left.data() + i * size, right.data() + i * size, size) == 0) continue;
      ++difference.elements;
      if (tensor.dtype != "F32") continue;
      float x = 0, y = 0;
      std::memcpy(&x, left.data() + i * size, sizeof x);
      std::memcpy(&y, right.data() + i * size, sizeof y);
      difference.largest = std::max(difference.largest, std::fabs(static_cast<double>(x) - static_cast<double>(y)));
    }
  }
  return difference;
}

absl::StatusOr<int> diff(const CheckpointCommand& command) {
  TESSERA_ASSIGN_OR_RETURN(const auto a, open_at(command.path));
  TESSERA_ASSIGN_OR_RETURN(const auto b, open_at(command.other));
  const Tensors left = tensors_of(*a), right = tensors_of(*b);
  std::set<std::pair<std::string, std::string>> keys;
  for (const Tensors* tensors : {&left, &right})
    for (const auto& [key, tensor] : *tensors) keys.insert(key);
  std::size_t differing = 0;
  const auto note = [&](const std::pair<std::string, std::string>& key, const std::string& text) {
    ++differing;
    print(key.first + " of " + quoted_text(key.second, 200) + ": " + text + "\n");
  };
  for (const auto& key : keys) {
    const auto in_a = left.find(key), in_b = right.find(key);
    if (in_a == left.end() || in_b == right.end()) {
      note(key, "only in " + (in_a == left.end() ? b : a)->folder());
    } else if (!(in_a->second == in_b->second)) {
      note(key,
           c10::str(in_a->second.numel, " ", in_a->second.dtype, " and ", in_b->second.numel, " ", in_b->second.dtype));
    } else {
      TESSERA_ASSIGN_OR_RETURN(const Difference found, compare(*a, *b, key.first, key.second, in_a->second));
      if (found.elements == 0) continue;
      const std::string by = in_a->second.dtype == "F32" ? c10::str(", by at most ", found.largest) : "";
      note(key, c10::str(found.elements, " of ", in_a->second.numel, " elements differ", by));
    }
  }
  if (a->manifest().step != b->manifest().step)
    print(c10::str("steps ", a->manifest().step, " and ", b->manifest().step, "\n"));
  print(c10::str(differing, " of ", keys.size(), " tensors differ\n"));
  return differing == 0 ? 0 : kDiffers;
}

absl::StatusOr<int> reshard(const CheckpointCommand& command) {
  TESSERA_ASSIGN_OR_RETURN(const auto checkpoint, open_at(command.path));
  TESSERA_ASSIGN_OR_RETURN(const std::string path,
                           reshard_checkpoint(*checkpoint, command.to, command.files, "tessera checkpoint reshard"));
  TESSERA_ASSIGN_OR_RETURN(const auto written, open_at(path));
  print(
      c10::str(path, ": ", format_bytes(bytes_of(written->manifest())), " in ", counted(command.files, "file"), "\n"));
  return 0;
}

}  // namespace

int run_checkpoint_ls(const CheckpointCommand& command) { return report(list(command.path)); }
int run_checkpoint_show(const CheckpointCommand& command) { return report(show(command)); }
int run_checkpoint_verify(const CheckpointCommand& command) { return report(verify(command.path)); }
int run_checkpoint_diff(const CheckpointCommand& command) { return report(diff(command)); }
int run_checkpoint_reshard(const CheckpointCommand& command) { return report(reshard(command)); }

}  // namespace tessera::app
