#pragma once

namespace tessera {

/// While one lives, on this thread: an epoch that a RankSampler begins has each sample once, so that ranks may get different numbers of
/// samples and batches. Engine::evaluate and tessera::uneven, which go on where ranks differ, make one for the moment in which a loader
/// begins. A loop that makes one itself must do without a batch on some ranks.
class UnpaddedEpoch {
 public:
  UnpaddedEpoch();
  ~UnpaddedEpoch();
  UnpaddedEpoch(const UnpaddedEpoch&) = delete;
  UnpaddedEpoch& operator=(const UnpaddedEpoch&) = delete;

  /// Whether one lives on this thread.
  static bool lives();
};

}  // namespace tessera
