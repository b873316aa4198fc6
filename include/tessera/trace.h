#pragma once

// See docs/glossary.md: unit.

#include <string>

#include "tessera/mesh.h"
#include "tessera/span.h"

namespace tessera {

/// Writes a picture of training steps, to open in Perfetto (ui.perfetto.dev) or chrome://tracing:
///
///   tessera::Trace::start();
///   ...  // some steps; a tessera::Span names what the program itself does
///   tessera::write_trace("trace.json", mesh);
///
/// The call is collective: it ends the recording on all ranks and writes their spans into one file on rank 0, one
/// process for each rank. An Engine records "backward", "step" (from one step's end to the next), "all_gather UNIT",
/// "reduce UNIT", "agree", "update" with an "update UNIT" for each part of it, "publish UNIT" and "upload";
/// TokenBatches records "batch". Ranks of one host share a clock; clocks of different hosts are shifted against each
/// other. Throws tessera::Error (73) on all ranks if the file cannot be written.
///
/// The same names, without "step", are ranges for a profiler of LibTorch that is attached, whether a trace is on or not
/// (docs/metrics.md).
void write_trace(const std::string& path, const Mesh& mesh);

}  // namespace tessera
