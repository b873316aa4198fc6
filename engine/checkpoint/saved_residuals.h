#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>

#include <string>

#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/state_writer.h"
#include "sharding/compress/kept_gradients.h"

namespace tessera {

/// Writes residuals of compressed reductions to checkpoints, and reads them (Manifest::residuals).
///
/// Residuals belong to ranks. If the job has the same ranks, units and kind of compression as the job that saved, every
/// rank gets back its own residuals. Otherwise each rank gets a share of the mean. All residuals of an element are
/// added. The sum is divided so that it changes the mean gradient of a later step as much as it would have in the run
/// that was saved.

/// Gives all of `kept` to `writer`, for `rank`. Only rank 0 writes factors, which are the same on all ranks.
void add_residuals(const KeptGradients& kept, int rank, StateWriter& writer);

/// Reads residuals from a checkpoint into the memory that `kept` names.
class ResidualReader {
 public:
  /// `wanted`: the description of this run's residuals, which is equal on all `ranks` ranks. The references must
  /// outlive this object.
  ResidualReader(SavedCheckpoint& checkpoint, const KeptGradients& kept, int rank, int ranks,
                 const SavedResiduals& wanted)
      : checkpoint_(checkpoint), kept_(kept), rank_(rank), ranks_(ranks), wanted_(wanted) {}

  /// Returns whether the checkpoint has as many ranks, as many microbatches and the same momentum as this run, and
  /// holds exactly the residuals that this rank keeps. Ranks may read residuals as their own only if this is true on
  /// all ranks.
  bool has_own() const;
  /// Reads the residuals. If `own`, these are this rank's residuals; if not, they are this rank's share of the mean.
  /// REQUIRES: Manifest::residuals is set, and `kept` holds zeros. `own` may be true only if has_own() was true on
  /// every rank. Errors: those of SavedCheckpoint::read.
  absl::Status read(bool own);

 private:
  bool has_more() const;
  absl::Status read_own(const KeptGradients::Residual& residual);
  absl::Status read_mean(const KeptGradients::Residual& residual);
  absl::Status add(const std::string& what, const std::string& name, Extent elements, float* sums);

  SavedCheckpoint& checkpoint_;
  const KeptGradients& kept_;
  const int rank_, ranks_;
  const SavedResiduals wanted_;
};

}  // namespace tessera
