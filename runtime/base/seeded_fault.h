#pragma once

namespace tessera {

/// Deliberately wrong lines, one in each of twenty folders, which test the tests. The environment variable
/// TESSERA_SEEDED_FAULT switches one of them on, and scripts/seeded_faults checks that a test then fails.
/// tests/seeded_faults.json describes each fault: its effect, its place, and the tests that should find it.
///
/// Only builds with the CMake option TESSERA_FAULTS have these lines; builds with tests set this option. Everywhere
/// else `seeded_fault` is the constant false, and the compiler removes the wrong lines.
enum class SeededFault {
  kNone,
  kCrcWithoutLastByte,
  kTwoReplicasOfFullShard,
  kSumSplitInTheMiddle,
  kRemainderOfOwnHost,
  kLaterBlockReplaces,
  kSliceEndsAtALine,
  kEpochsAlike,
  kInheritedRankWins,
  kNoLastGap,
  kPartSentToItself,
  kFirstGradientNotCleared,
  kBiasCorrectionOneAhead,
  kRecordWrittenOnce,
  kPortionsAlike,
  kLastRankUnheard,
  kMastersNotWritten,
  kJumpOneWordFar,
  kBiasedRunningVariance,
  kTopKOneMore,
  kLastAnswerUnread,
};

#ifdef TESSERA_SEEDED_FAULTS

/// Returns the fault that TESSERA_SEEDED_FAULT names, or kNone. The variable is read at the first call; an unknown name
/// ends the process.
SeededFault chosen_seeded_fault();

/// Returns whether `which` is switched on. Call it before or after hot loops, never for each element.
inline bool seeded_fault(SeededFault which) { return chosen_seeded_fault() == which; }

#else

constexpr bool seeded_fault(SeededFault) { return false; }

#endif

}  // namespace tessera
