#pragma once

// See docs/glossary.md: unit.

#include <string>

#include "tessera/mesh.h"
#include "tessera/span.h"

namespace tessera {

/// Writes a timeline of training steps into a file, which Perfetto (ui.perfetto.dev) or chrome://tracing shows:
///
///   tessera::Trace::start();
///   ...  // some steps; a tessera::Span names what the program itself does
///   tessera::write_trace("trace.json", mesh);
///
/// The call is collective: it ends the recording on all ranks and writes their spans into one file on rank 0, one
/// process for each rank. An Engine records "backward", "step" (from one step's end to the next), "all_gather UNIT",
/// "reduce UNIT", "agree", "publish UNIT" and "upload". It also records "update", and an "update UNIT" for each part of
/// the update. TokenBatches records "batch". Ranks of one host share a clock; clocks of different hosts are not
/// synchronised. Throws tessera::Error (73) on all ranks if the file cannot be written.
///
/// A LibTorch profiler that is attached gets ranges with the same names, except "step", whether or not a trace is
/// recorded (docs/metrics.md).
void write_trace(const std::string& path, const Mesh& mesh);

}  // namespace tessera
