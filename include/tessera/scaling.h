#pragma once

namespace tessera {

/// Gustafson's law ("Reevaluating Amdahl's law", 1988). The ranks of a run communicate for a share s of their time, s =
/// T_comm / (T_comp + T_comm) (StepResult::communication_share). Each rank has work of its own, so the work grows with
/// the ranks. These are pure functions, for any thread. `ranks` is P, 1 or more.

/// Returns by which factor P ranks get through more work a second than one rank that does not communicate: P - s (P -
/// 1).
constexpr double scaled_speedup(double share, int ranks) { return ranks - share * (ranks - 1); }

/// Returns the speed-up for each rank, scaled_speedup / P: 1 if no rank communicates, 1 / P if ranks do nothing else.
constexpr double scaling_efficiency(double share, int ranks) { return scaled_speedup(share, ranks) / ranks; }

}  // namespace tessera
