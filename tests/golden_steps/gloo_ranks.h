#pragma once

#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {

/// Joins ranks that are threads of this process. One host is joined as by comm.transport "gloo". Several hosts are
/// joined as by "auto": by memory inside a host, and by Gloo between hosts. Messages that Gloo would send go through
/// mailboxes, without a socket. Everything else is the transport's own code, also for compression.
ThreadRanks over_gloo(ThreadRanks ranks);

}  // namespace tessera::testing
