#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/noise.h"
#include "tessera/token_options.h"

namespace tessera {

/// The content of a checkpoint, and hashes that show it to be whole. Names here are the keys of `manifest.json`.

/// A state that the optimizer keeps for each element of a trainable parameter, or for the whole parameter
/// (state_shapes).
struct SavedState {
  std::string name;  ///< "exp_avg": the `what` of its pieces
  /// "fp32", "bf16" or "8bit". States of "8bit" also have pieces "exp_avg.scales", with one F32 scale for each 256
  /// elements.
  std::string format;
  friend bool operator==(const SavedState&, const SavedState&) = default;
};

/// A parameter of the module, with its pieces in the checkpoint.
struct SavedParameter {
  std::string name;                  ///< the first of its names in the module
  std::vector<std::string> aliases;  ///< further names, if the parameter is tied
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< order in which its elements are counted; empty: rows one behind the other
  std::string dtype;                  ///< type in safetensors' words, as the run computed with it: "F32", "BF16", ...
  /// true: the parameter has a piece "master" (F32) and one for each state; false: a piece "value" in `dtype` (see
  /// keeps_states)
  bool trains = false;
  std::int64_t updates = 0;  ///< number of steps in which it took part
  /// Its unit's number, the number of its group in the unit, and its first element in that group's flat buffer. The
  /// parameter's noise depends on these three numbers if states are rounded stochastically.
  std::int64_t unit = 0, group = 0, first_element = 0;
  std::int64_t numel = 0;  ///< number of elements, computed from `shape`
  /// Names of the states it has. Empty: all states of the manifest, or none for a frozen parameter.
  std::optional<std::vector<std::string>> states = {};
  /// Shapes, by name, of states that are kept for the whole parameter and not for each element.
  std::map<std::string, std::vector<std::int64_t>> state_shapes = {};

  /// Says that a frozen parameter also has its "master" (F32), which was rounded to the "value".
  bool keeps_master = false;

  /// Returns whether it has the state of this name.
  bool has_state(const std::string& state) const;
  /// Returns whether it trains, or is frozen and will use its states again when it trains again.
  bool keeps_states() const { return trains || (states && !states->empty()); }
  bool has_master() const { return trains || keeps_master; }
  /// Shape of the whole state, or of the parameter if the state is kept for each element; and the number of its
  /// elements.
  const std::vector<std::int64_t>& shape_of(const std::string& state) const;
  std::int64_t numel_of(const std::string& state) const;
};

/// A tensor that every rank has in full.
struct SavedTensor {
  std::string name;
  std::string dtype;  ///< type in safetensors' words
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> ranks;  ///< buffers: ranks that have values of their own, in pieces "buffer.rank3"
  std::int64_t numel = 0;
};

/// The loss scaler's state (LossScalerState).
struct SavedLossScale {
  double scale = 1;
  std::int64_t finite_steps = 0, overflow_steps = 0;
};

/// Losses of earlier steps, which decide what counts as a spike next.
struct SavedLosses {
  static constexpr std::int64_t kMost = 10000;

  std::vector<double> window;  ///< losses of steps that were no spikes, oldest first
  std::int64_t spikes_in_a_row = 0;
};

/// The state of the estimate of gradient noise (NoiseScale::State of optim/noise_scale.h, with these names).
struct SavedNoiseScale {
  double square = 0.0, variance = 0.0, weight = 0.0, batch = 0.0;
};

/// The residuals that compression took from gradients and adds to later ones (error feedback): pieces "residual.rank3"
/// and "replica_residual.rank3" of parameters that train, in fp32, as sums over the microbatches of a step.
struct SavedResiduals {
  std::int64_t microbatches = 1;  ///< number of microbatches in a step of a rank, on average and rounded up
  /// The factor b, if the residuals belong to the momentum b m + (1 - b) g and not to gradients g
  /// (OneBitConfig::momentum); 0: gradients.
  double momentum = 0;
  friend bool operator==(const SavedResiduals&, const SavedResiduals&) = default;
};

/// What the step goes on with beside parameters and their states (StepProgress of engine/step/step.h).
struct SavedProgress {
  std::int64_t steps_applied = 0;
  std::int64_t samples_seen = 0;  ///< samples of all steps; 0, and not in the file, if backward was not told of them
  std::optional<SavedLossScale> loss_scale;
  /// Learning rates set by hand: the common one, then those of groups that have a rate of their own.
  std::vector<std::optional<double>> rates;
  /// Numbers of the update rule set by hand, by name: the common ones, then each group's; empty if there are none.
  std::vector<std::map<std::string, double>> options;
  std::optional<SavedLosses> losses;           ///< set for runs with on_spike
  std::optional<SavedNoiseScale> noise_scale;  ///< set for runs with noise_scale
};

/// A file of the checkpoint.
struct SavedFile {
  static constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;  ///< bytes that are hashed together

  std::string name;
  std::int64_t bytes = 0, header_bytes = 0;
  std::uint64_t header_hash = 0;
  /// Hashes of the data behind the header, one for each kChunkBytes; the last chunk may be shorter.
  std::vector<std::uint64_t> chunk_hashes;

  std::int64_t data_bytes() const { return bytes - header_bytes; }
  std::int64_t chunks() const { return (data_bytes() + kChunkBytes - 1) / kChunkBytes; }
};

/// Returns "tessera ", and the version that the root's CMakeLists.txt says.
std::string this_program();

/// The content of manifest.json. Rank 0 fills it when it saves; every rank reads it when it loads.
struct Manifest {
  /// The newest version that is read. In version 2, a frozen parameter may have states and a master. Other manifests
  /// are still written as version 1.
  static constexpr std::int64_t kVersion = 2;

  std::string written_by = this_program();
  std::int64_t step = 0;  ///< steps taken, including those skipped for an overflow
  SavedProgress progress;
  std::int64_t ranks = 1, replicate = 1, shard = 1;
  std::string strategy;  ///< JSON, every key present
  std::vector<SavedState> states;
  std::vector<std::string> units;
  std::vector<SavedParameter> parameters;
  std::vector<SavedTensor> buffers, items;
  std::map<std::string, std::string> json_items;
  /// "noise": the version of the run's random numbers; 1 if the text has none
  std::int64_t noise_version = kNoiseVersion;
  std::int64_t defaults_version = 1;  ///< "defaults": OptimizerConfig::defaults_version; 1 where the text has none
  std::int64_t generators = 0;  ///< ranks 0 ... generators - 1 have a piece "generator" of type U8, named by the rank
  std::optional<SamplerCursor> data;
  std::vector<SavedFile> files;
  std::optional<SavedResiduals> residuals = {};  ///< set for runs whose compression keeps residuals

  /// Returns the version that the manifest's text has.
  std::int64_t version() const;
};

/// Writes the text of manifest.json. Its first line has the hash of all the others, so that a half-written text is
/// never accepted.
std::string write_manifest(const Manifest& manifest);

/// Reads a manifest's text. `file` is the prefix of messages. Errors (65): a first line that is not this format's,
/// another hash, a version that this program does not read (the message names this version and the newest one that is
/// read), anything missing or out of range, names that are given twice or are no plain file names.
absl::StatusOr<Manifest> read_manifest(const std::string& file, std::string_view text);

/// Returns whether nothing outside of a folder can be opened with the name: letters, digits, '.', '_' and '-', and no
/// '.' in front.
bool is_plain_name(std::string_view name);

}  // namespace tessera
