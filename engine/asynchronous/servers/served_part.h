#pragma once

// See docs/glossary.md: flat group.

#include <cstdint>

#include "sharding/layout/layout.h"

namespace tessera {

/// Returns the elements of a flat group of `numel` elements that parameter server `server` of `servers` owns. All parts
/// begin on a cache line. Some parts may be empty, but the last part never is.
inline Extent served_part(std::int64_t numel, int server, int servers) {
  const auto begin = [&](std::int64_t k) {
    return k == servers ? numel : numel * k / servers / Layout::kLeastCut * Layout::kLeastCut;
  };
  return {begin(server), begin(server + 1) - begin(server)};
}

/// Returns the elements of a flat group that the `piece`-th of a replica's `pieces` ranks sends and fetches
/// (AsynchronousConfig::replica_ranks). REQUIRES: `pieces` divides the number of the layout's parts.
inline Extent replica_part(std::int64_t numel, int piece, int pieces) {
  return {numel / pieces * piece, numel / pieces};
}

}  // namespace tessera
