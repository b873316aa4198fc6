#pragma once

#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {

/// Ranks as threads of this process that are joined as by comm.transport "gloo", where `ranks.hosts` is 1, or as by
/// "auto" on several hosts: by memory inside a host, and by Gloo between hosts. What Gloo sends from rank to rank goes
/// through mailboxes here, with no socket; all else is the transport's own code, compression too.
ThreadRanks over_gloo(ThreadRanks ranks);

}  // namespace tessera::testing
