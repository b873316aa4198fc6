#pragma once

#include <absl/status/status.h>

#include <cstdint>
#include <string>

#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/state_writer.h"
#include "sharding/compress/kept_gradients.h"

namespace tessera {

/// What reductions keep of gradients, in checkpoints (Manifest::residuals).
///
/// Residuals belong to ranks. The same ranks with the same units and kind of compression get back what they had. Others get the mean: of each
/// element, all residuals are added, and what is added to all contributions of a later step together moves the mean gradient as much as
/// it would have moved it in the run that was saved.

/// Adds all of `kept` to what `rank` writes; factors are written by rank 0.
void add_residuals(const KeptGradients& kept, int rank, StateWriter& writer);

/// Brings residuals from a checkpoint.
class ResidualReader {
 public:
  /// `wanted`: how this run's residuals are to be read, on each of `ranks`.
  ResidualReader(SavedCheckpoint& checkpoint, const KeptGradients& kept, int rank, int ranks,
                 const SavedResiduals& wanted)
      : checkpoint_(checkpoint), kept_(kept), rank_(rank), ranks_(ranks), wanted_(wanted) {}

  /// Whether the checkpoint is of as many ranks, of as many microbatches and of the same momentum, and has all that this rank keeps. Only where that is so on all ranks may they be read as their own.
  bool has_own() const;
  /// REQUIRES: Manifest::residuals, and `kept` is of zeros. `own`: has_own on every rank.
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
