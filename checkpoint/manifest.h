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

/// The description of a checkpoint's content, with hashes that show whether it is whole. Names of fields are the keys
/// of `manifest.json`.

/// A state that the optimizer keeps for each element of a trainable parameter, or for the whole parameter
/// (state_shapes).
struct SavedState {
  std::string name;  ///< name such as "exp_avg"; it is the `what` of the state's pieces
  /// "fp32", "bf16" or "8bit". States of "8bit" also have pieces "exp_avg.scales", with one F32 scale for each 256
  /// elements.
  std::string format;
  friend bool operator==(const SavedState&, const SavedState&) = default;
};

/// A parameter of the module, with its pieces in the checkpoint.
struct SavedParameter {
  std::string name;                  ///< the parameter's first name in the module
  std::vector<std::string> aliases;  ///< further names, if the parameter is tied
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< order in which the elements are counted; empty: row by row
  std::string dtype;                  ///< safetensors' word for the type in which the run computed: "F32", "BF16", ...
  /// true: the parameter has a piece "master" (F32) and one for each state; false: a piece "value" in `dtype` (see
  /// keeps_states)
  bool trains = false;
  std::int64_t updates = 0;  ///< number of steps in which the parameter took part
  /// Its unit's number, the number of its group in the unit, and its first element in that group's flat buffer. The
  /// parameter's noise depends on these three numbers if states are rounded stochastically.
  std::int64_t unit = 0, group = 0, first_element = 0;
  std::int64_t numel = 0;  ///< number of elements, computed from `shape`
  /// Names of the parameter's states. No value: it has all states of the manifest, or none if it is frozen.
  std::optional<std::vector<std::string>> states = {};
  /// Shapes, by name, of states that belong to the whole parameter and not to each element.
  std::map<std::string, std::vector<std::int64_t>> state_shapes = {};

  /// Whether a frozen parameter also has its "master" (F32), which was rounded to the "value".
  bool keeps_master = false;

  /// Returns whether the parameter has the state `state`.
  bool has_state(const std::string& state) const;
  /// Returns whether the parameter trains, or is frozen and will use its states when it trains again.
  bool keeps_states() const { return trains || (states && !states->empty()); }
  bool has_master() const { return trains || keeps_master; }
  /// These return the shape of a state, and the number of its elements. If the state is kept for each element, the
  /// shape is the parameter's shape.
  const std::vector<std::int64_t>& shape_of(const std::string& state) const;
  std::int64_t numel_of(const std::string& state) const;
};

/// A tensor that every rank has in full.
struct SavedTensor {
  std::string name;
  std::string dtype;  ///< safetensors' word for the type
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> ranks;  ///< for buffers: ranks that have their own values, in pieces such as "buffer.rank3"
  std::int64_t numel = 0;
};

/// The loss scaler's state (LossScalerState).
struct SavedLossScale {
  double scale = 1;
  std::int64_t finite_steps = 0, overflow_steps = 0;
};

/// Losses of earlier steps, with which later losses are compared to find spikes.
struct SavedLosses {
  static constexpr std::int64_t kMost = 10000;

  std::vector<double> window;  ///< losses of steps that were not spikes, oldest first
  std::int64_t spikes_in_a_row = 0;
};

/// The state of the estimate of gradient noise (NoiseState of optim/arithmetic/noise_rule.h, with these names).
struct SavedNoiseScale {
  double square = 0.0, variance = 0.0, weight = 0.0, batch = 0.0;
};

/// The residuals that compression left out of gradients and adds to later gradients (error feedback). They are pieces
/// such as "residual.rank3" and "replica_residual.rank3" of parameters that train, in fp32, as sums over the
/// microbatches of a step.
struct SavedResiduals {
  std::int64_t microbatches = 1;  ///< number of microbatches in a step of a rank, on average and rounded up
  /// The factor b, if the residuals belong to the momentum b m + (1 - b) g (OneBitConfig::momentum); 0 if they belong
  /// to gradients g.
  double momentum = 0;
  friend bool operator==(const SavedResiduals&, const SavedResiduals&) = default;
};

/// The processor with which the ranks of a run with "reproducible" computed. The bits of operators' results depend on
/// the processor.
struct SavedProcessor {
  std::int64_t threads = 0;  ///< LibTorch's threads on each rank; 0 on a GPU, whose operators do not depend on them
  std::string libtorch;      ///< the instruction set of LibTorch's operators, such as "AVX512"
  std::string tessera;       ///< the instruction set of Tessera's loops, such as "avx512"
  std::string gpu;           ///< the GPU that trained, such as "NVIDIA H200"; empty on the CPU
  friend bool operator==(const SavedProcessor&, const SavedProcessor&) = default;
};
/// Returns the processor as the JSON object that manifests and commits have, and that ranks send each other.
std::string to_json(const SavedProcessor& processor);
/// Reads a text that `to_json` returned. Throws std::exception if the text is something else.
SavedProcessor read_processor(const std::string& text);

/// The numbers that the next step needs in addition to parameters and their states (StepProgress of
/// engine/step/step.h).
struct SavedProgress {
  std::int64_t steps_applied = 0;
  std::int64_t samples_seen = 0;  ///< samples of all steps; 0, and not in the file, if the program did not give their
                                  ///< number to backward
  std::optional<SavedLossScale> loss_scale;
  /// Learning rates that were set by hand: the common rate, then the rates of groups that have their own rate.
  std::vector<std::optional<double>> rates;
  /// Numbers of the update rule that were set by hand, by name: the common numbers, then each group's numbers; empty if
  /// there are none.
  std::vector<std::map<std::string, double>> options;
  std::optional<SavedLosses> losses;           ///< set for runs with on_spike
  std::optional<SavedNoiseScale> noise_scale;  ///< set for runs with noise_scale
};

/// A file of the checkpoint.
struct SavedFile {
  static constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;  ///< number of bytes that are hashed together

  std::string name;
  std::int64_t bytes = 0, header_bytes = 0;
  std::uint64_t header_hash = 0;
  /// Hashes of the data behind the header, one for each kChunkBytes; the last chunk may be shorter.
  std::vector<std::uint64_t> chunk_hashes;

  std::int64_t data_bytes() const { return bytes - header_bytes; }
  std::int64_t chunks() const { return (data_bytes() + kChunkBytes - 1) / kChunkBytes; }
};

/// Returns "tessera ", followed by the version in the root's CMakeLists.txt.
std::string this_program();

/// The content of manifest.json. Rank 0 fills it when it saves; every rank reads it when it loads.
struct Manifest {
  /// The newest version that is read. In version 2, a frozen parameter may have states and a master. Manifests without
  /// such parameters are still written as version 1.
  static constexpr std::int64_t kVersion = 2;

  std::string written_by = this_program();
  std::int64_t step = 0;  ///< number of steps, including those that were skipped for an overflow
  SavedProgress progress;
  std::int64_t ranks = 1, replicate = 1, shard = 1;
  std::string strategy;  ///< JSON text with every key
  std::vector<SavedState> states;
  std::vector<std::string> units;
  std::vector<SavedParameter> parameters;
  std::vector<SavedTensor> buffers, items;
  std::map<std::string, std::string> json_items;
  /// "noise": the version of the run's random numbers; 1 if the text lacks the key
  std::int64_t noise_version = kNoiseVersion;
  std::int64_t defaults_version = 1;  ///< "defaults": OptimizerConfig::defaults_version; 1 if the text lacks the key
  std::int64_t generators = 0;  ///< each rank below this number has a piece "generator" of type U8, with the rank as
                                ///< its name
  std::optional<SamplerCursor> data;
  std::vector<SavedFile> files;
  std::optional<SavedResiduals> residuals = {};  ///< set for runs whose compression keeps residuals
  std::optional<SavedProcessor> processor = {};  ///< set by Tessera 0.2 and later, for runs with "reproducible"

  /// Returns the version that the manifest's text has.
  std::int64_t version() const;
};

/// Writes the text of manifest.json. Its first line has the hash of all other lines, so that an incomplete text is
/// never accepted.
std::string write_manifest(const Manifest& manifest);

/// Reads a manifest's text. `file` is the prefix of messages. Errors: 65 if the first line is not a first line of this
/// format; if the hash differs; if this program does not read the version (the message names the version, and the
/// newest version that is read); if anything is missing or out of range; or if a name is given twice or is not a plain
/// file name.
absl::StatusOr<Manifest> read_manifest(const std::string& file, std::string_view text);

/// Returns whether a name cannot lead out of a folder: it has only letters, digits, '.', '_' and '-', and does not
/// begin with '.'.
bool is_plain_name(std::string_view name);

}  // namespace tessera
