#pragma once

#include <memory>
#include <string>

#include "engine/memory/durable_files.h"
#include "runtime/comm/collectives.h"

namespace tessera {

/// Opens this rank's files and finds the last commit that all ranks hold. It is collective. Throws tessera::Error, the
/// same on every rank: the errors of DurableFiles::look and choose.
std::unique_ptr<DurableFiles> open_durable(const DurableConfig& config, const MemoryPlan& plan,
                                           const std::string& layout, Collectives& control);

}  // namespace tessera
