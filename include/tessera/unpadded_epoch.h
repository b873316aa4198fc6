#pragma once

namespace tessera {

/// A guard: while one lives on this thread, an epoch that a RankSampler begins has each sample once, so ranks may get
/// different numbers of samples and batches. Engine::evaluate and tessera::uneven, which can handle different numbers,
/// make a guard only at the moment when the iteration over a loader begins. A loop that makes a guard itself must be
/// able to handle ranks without a batch.
class UnpaddedEpoch {
 public:
  /// Makes the guard active. The destructor makes it inactive again, on the same thread.
  UnpaddedEpoch();
  ~UnpaddedEpoch();
  UnpaddedEpoch(const UnpaddedEpoch&) = delete;
  UnpaddedEpoch& operator=(const UnpaddedEpoch&) = delete;

  /// Returns whether a guard lives on this thread.
  static bool lives();
};

}  // namespace tessera
