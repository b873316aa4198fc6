#pragma once

namespace tessera {

/// Gustafson's law ("Reevaluating Amdahl's law", 1988). The ranks of a run communicate for a fraction s of their time,
/// s = T_comm / (T_comp + T_comm) (StepResult::communication_share). Each rank has its own work, so the work grows with
/// the number of ranks. The functions below are pure, and any thread may call them. `share` is s, and `ranks` is P, 1
/// or more.

/// Returns the factor by which P ranks do more work per second than one rank that does not communicate: P - s (P - 1).
constexpr double scaled_speedup(double share, int ranks) { return ranks - share * (ranks - 1); }

/// Returns the speed-up for each rank, scaled_speedup / P: 1 if ranks do not communicate, and 1 / P if they only
/// communicate.
constexpr double scaling_efficiency(double share, int ranks) { return scaled_speedup(share, ranks) / ranks; }

}  // namespace tessera
