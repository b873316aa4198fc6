#pragma once

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

/// What a checkpoint holds, and how to tell that it is whole. The names here are the keys
/// of `manifest.json`.

/// A number that the optimizer keeps for each element of a parameter that trains, or what it keeps of the whole (state_shapes).
struct SavedState {
  std::string name;  ///< "exp_avg": the `what` of its pieces
  std::string
      format;  ///< "fp32", "bf16", or "8bit": then a second kind of pieces, "exp_avg.scales", has an F32 for 256 elements
  friend bool operator==(const SavedState&, const SavedState&) = default;
};

struct SavedParameter {
  std::string name;                  ///< the first under which the module has it
  std::vector<std::string> aliases;  ///< further names, of a tied parameter
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< its elements are counted in this order; empty: rows one behind the other
  std::string dtype;                  ///< of safetensors, as the run computed with it: "F32", "BF16", ...
  bool trains = false;       ///< pieces "master" (F32) and one a state; else "value" of `dtype`, and see keeps_states
  std::int64_t updates = 0;  ///< steps that it took part in
  /// What its noise depends on where states are rounded stochastically: numbers of its unit and of its group there, and its
  /// first element in that group's flat buffer.
  std::int64_t unit = 0, group = 0, first_element = 0;
  std::int64_t numel = 0;  ///< made from `shape`
  /// Names of those it has; nothing: all of the manifest's, or of a frozen parameter none.
  std::optional<std::vector<std::string>> states = {};
  /// Of states that are not kept of each element, but of the whole: their shapes, by name.
  std::map<std::string, std::vector<std::int64_t>> state_shapes = {};

  /// A frozen parameter has its "master" (F32) too, of which rounding made the "value".
  bool keeps_master = false;

  bool has_state(const std::string& state) const;
  /// Whether it trains, or is frozen and goes on with its states when it trains again.
  bool keeps_states() const { return trains || (states && !states->empty()); }
  bool has_master() const { return trains || keeps_master; }
  const std::vector<std::int64_t>& shape_of(const std::string& state) const;
  std::int64_t numel_of(const std::string& state) const;
};

/// A tensor that every rank has in full.
struct SavedTensor {
  std::string name;
  std::string dtype;  ///< of safetensors
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> ranks;  ///< of a buffer: ranks that have values of their own, pieces "buffer.rank3"
  std::int64_t numel = 0;
};

struct SavedLossScale {
  double scale = 1;
  std::int64_t finite_steps = 0, overflow_steps = 0;
};

/// Losses of the steps before, by which the next ones' spikes are told.
struct SavedLosses {
  static constexpr std::int64_t kMost = 10000;

  std::vector<double> window;  ///< of steps that were no spikes, oldest first
  std::int64_t spikes_in_a_row = 0;
};

/// What compression took from gradients and is to be added to later ones: pieces "residual.rank3" and "replica_residual.rank3" of
/// parameters that train, in fp32, as sums over the microbatches of a step.
struct SavedResiduals {
  std::int64_t microbatches = 1;  ///< of a step
  /// They are of momentum b m + (1 - b) g in place of gradients g (CompressionConfig::one_bit_momentum): b. 0: of gradients.
  double momentum = 0;
  friend bool operator==(const SavedResiduals&, const SavedResiduals&) = default;
};

/// A file of the checkpoint.
struct SavedFile {
  static constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;  ///< that are hashed together

  std::string name;
  std::int64_t bytes = 0, header_bytes = 0;
  std::uint64_t header_hash = 0;
  std::vector<std::uint64_t>
      chunk_hashes;  ///< of the data behind the header, each kChunkBytes long, the last one perhaps shorter

  std::int64_t data_bytes() const { return bytes - header_bytes; }
  std::int64_t chunks() const { return (data_bytes() + kChunkBytes - 1) / kChunkBytes; }
};

/// "tessera ", and the version that the CMakeLists.txt of the root says.
std::string this_program();

struct Manifest {
  /// The newest version that is read. 2: of a frozen parameter there may be states and a master. Others are still written as 1.
  static constexpr std::int64_t kVersion = 2;

  std::string written_by = this_program();
  std::int64_t step = 0;  ///< steps taken, those skipped for an overflow included
  std::int64_t steps_applied = 0;
  std::int64_t ranks = 1, replicate = 1, shard = 1;
  std::string strategy;  ///< JSON, every key present
  std::vector<SavedState> states;
  std::vector<std::string> units;
  std::vector<SavedParameter> parameters;
  std::vector<SavedTensor> buffers, items;
  std::map<std::string, std::string> json_items;
  std::int64_t noise_version = kNoiseVersion;  ///< "noise": of what the run draws; 1 where the text has none
  std::int64_t defaults_version = 1;  ///< "defaults": OptimizerConfig::defaults_version; 1 where the text has none
  std::int64_t generators = 0;  ///< ranks 0 ... generators - 1 have a piece "generator" of type U8, named by the rank
  std::optional<SavedLossScale> loss_scale;
  /// Learning rates set by hand: everybody's, then those of groups that have one of their own.
  std::vector<std::optional<double>> rates;
  /// Numbers of the update rule set by hand, by name: everybody's, then each group's. Empty where none is.
  std::vector<std::map<std::string, double>> options = {};
  std::optional<SamplerCursor> data;
  std::vector<SavedFile> files;
  std::optional<SavedLosses> losses = {};        ///< of a run with on_spike
  std::optional<SavedResiduals> residuals = {};  ///< of a run whose compression keeps some

  /// That its text has.
  std::int64_t version() const;
};

/// The text of manifest.json. Its first line has the hash of all the others, so that nobody can read it half-written.
std::string write_manifest(const Manifest& manifest);

/// Reads such a text. `file` stands in front of messages. Errors (65): a first line that is not this format's, another hash, a
/// version that this program does not read (both versions are named), anything missing or out of range, names that are given
/// twice or are no plain file names.
absl::StatusOr<Manifest> read_manifest(const std::string& file, std::string_view text);

/// A name with which nothing outside of a folder can be opened: letters, digits, '.', '_' and '-', and no '.' in front.
bool is_plain_name(std::string_view name);

}  // namespace tessera
