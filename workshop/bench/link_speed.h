#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <vector>

#include "planner/measured/links.h"
#include "runtime/comm/collectives.h"
#include "workshop/bench/alpha_beta.h"
#include "workshop/bench/codec_speed.h"

namespace tessera {

/// The options of measure_links.
struct LinkSpeedOptions {
  int hosts = 1;                                     ///< number of hosts of the groups' ranks
  std::int64_t most_bytes = std::int64_t{32} << 20;  ///< size of the largest buffer
  double seconds = 0.5;  ///< approximate time for each operation and size; at least three calls are made
};

/// Calls of one operation: the bytes that a rank sends in a call, and the median time of these calls. There are also
/// calls that ran while all ranks computed, if the transport works in the background.
struct MeasuredOperation {
  const char* name = "";
  std::vector<TimedBytes> points, busy_points;
  OperationFit fit;
};

/// The measurements, and the fit that `tessera doctor --links` writes.
struct LinkSpeed {
  Links links;
  std::vector<MeasuredOperation> operations;
  std::vector<CodecSpeed> codecs;  ///< speeds on this rank, for every codec except kPlain
};

/// Times collectives of fp32 buffers, and fits these times. Times codecs, and measures how much computation time calls
/// and codecs cost. `gather` and `reduce` are two groups of the same ranks (at least two), as an Engine has them. The
/// call is collective; every rank gets the times of the slowest rank. Errors: those of the groups.
absl::StatusOr<LinkSpeed> measure_links(Collectives& gather, Collectives& reduce, const LinkSpeedOptions& options = {});

}  // namespace tessera
