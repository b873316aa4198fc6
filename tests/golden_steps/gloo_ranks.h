#pragma once

#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {

/// Joins ranks that are threads of this process as comm.transport "gloo" would, where `ranks.hosts` is 1, or as "auto"
/// would on several hosts: by memory inside a host, and by Gloo between hosts. Messages that Gloo would send go through
/// mailboxes, without a socket; everything else is the transport's own code, compression too.
ThreadRanks over_gloo(ThreadRanks ranks);

}  // namespace tessera::testing
