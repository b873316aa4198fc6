#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/layout.h"

namespace tessera {

struct FlatGroup;

/// Residuals of gradients that this rank keeps from one step to the next, by kind (MemoryCategory::kFeedback). For each
/// element, the sum of its residuals over all ranks is added to the sum of contributions.
struct KeptGradients {
  enum class What {
    kContributions,         ///< residual of this rank's contributions to sums over the shard axis
    kReplicaContributions,  ///< residual of this rank's contributions to sums over the replicate axis
    kSums,                  ///< residual of the sums that this rank made and sent to all ranks (OneBit)
    /// a momentum instead of a residual: the momentum of this rank's gradients (TopK), or this rank's share of the
    /// momentum of all ranks' gradients (OneBit)
    kMomentum,
  };
  struct Residual {
    FlatGroup* group = nullptr;
    What what = What::kContributions;
    Extent run;               ///< a run of the group's flat buffer
    float* values = nullptr;  ///< [run.numel]
  };
  /// PowerSGD's factor Q of one parameter. The next step begins with this factor. It is the same on every rank.
  struct Factors {
    FlatGroup* group = nullptr;
    std::size_t parameter = 0;
    std::span<float> values;
  };

  std::vector<Residual> residuals;
  std::vector<Factors> factors;
  /// The number of residuals of one element that all ranks together hold.
  std::int64_t holders = 0;
};

/// Returns the runs of a reduction's input that a rank rounds, in order, if it rounds one of `part` parts
/// (Collectives::compressed_part). `scatters` says whether the reduction is a reduce_scatter. If the input of an
/// all-reduce is not a multiple of `part`, no rank rounds the last elements.
std::vector<Extent> rounded_runs(int rank, int ranks, int part, std::int64_t numel, bool scatters);

}  // namespace tessera
