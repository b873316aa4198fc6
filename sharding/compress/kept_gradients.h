#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/unit.h"

namespace tessera {

/// What this rank keeps of gradients from one step to the next, by where it belongs (MemoryCategory::kFeedback). What
/// is added to all contributions of an element together is the sum of its residuals over the ranks that hold one.
struct KeptGradients {
  enum class What {
    kContributions,         ///< what this rank's contributions to the sum over the shard axis lacked so far
    kReplicaContributions,  ///< the same for the sum over the replicate axis
    kSums,                  ///< what the sums that this rank made and sent to all lacked so far (OneBit)
    kMomentum,              ///< no residual: of this rank's gradients (TopK), or its share of that of all (OneBit)
  };
  struct Residual {
    FlatGroup* group = nullptr;
    What what = What::kContributions;
    Extent run;               ///< a run of the group's flat buffer
    float* values = nullptr;  ///< [run.numel]
  };
  /// What PowerSGD begins the next step with, of one parameter: the same on every rank.
  struct Factors {
    FlatGroup* group = nullptr;
    std::size_t parameter = 0;
    std::span<float> values;
  };

  std::vector<Residual> residuals;
  std::vector<Factors> factors;
  /// How many residuals of one element all ranks together hold.
  std::int64_t holders = 0;
};

/// Which elements of a reduction's input a rank rounds, one run behind the other, where it rounds one of `part` parts
/// (Collectives::compressed_part). `scatters`: the reduction is a reduce_scatter. Nobody rounds the elements, fewer
/// than `part`, that an all-reduce leaves over.
std::vector<Extent> rounded_runs(int rank, int ranks, int part, std::int64_t numel, bool scatters);

}  // namespace tessera
