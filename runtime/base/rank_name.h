#pragma once

#include <string>

namespace tessera {

/// Returns a rank's name as messages begin with it, such as "rank 1/4" for rank 1 of `size` ranks.
inline std::string rank_name(int rank, int size) { return "rank " + std::to_string(rank) + "/" + std::to_string(size); }

}  // namespace tessera
