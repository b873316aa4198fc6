#pragma once

namespace tessera {

/// Wrong lines on purpose, one in each of twenty rooms. They are there so that the tests can be tested: the environment variable
/// TESSERA_SEEDED_FAULT switches one of them on, and scripts/seeded_faults asks whether a test fails then. tests/seeded_faults.json says
/// what each does, where it is, and whose tests are to find it.
///
/// Only builds with the CMake option TESSERA_FAULTS have them, which builds with tests set. In all others `seeded_fault` is the constant
/// false, and the compiler leaves the wrong lines out.
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

/// The one that TESSERA_SEEDED_FAULT names, or kNone. The variable is read at the first call; an unknown name ends the process.
SeededFault chosen_seeded_fault();

/// Whether `which` is switched on. It is asked at the edges of hot loops, never for each element.
inline bool seeded_fault(SeededFault which) { return chosen_seeded_fault() == which; }

#else

constexpr bool seeded_fault(SeededFault) { return false; }

#endif

}  // namespace tessera
