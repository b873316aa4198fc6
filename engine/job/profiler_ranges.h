#pragma once

// See docs/glossary.md: unit.

namespace tessera {

/// Makes every Span of the process a range of LibTorch's RecordFunction (scope USER_SCOPE) from now on, named as in a
/// trace: "all_gather blocks.3". A profiler that is attached shows units and collectives by it, beside the operators:
/// torch.profiler and Kineto show user annotations, and torch.autograd.profiler.emit_nvtx, or nsys with
/// --pytorch=autograd-nvtx, NVTX ranges. A range lasts as long as its call on the host; on a GPU a profiler shows with
/// it what the call queued.
///
/// A span inside of an Unrecorded, which hides operators from observers, is hidden with them.
///
/// Without a profiler, a span only looks for callbacks of its thread, which takes some nanoseconds and no memory. An
/// observer
/// that throws has no effect on training: LibTorch logs the exception. Where memory for a range is missing, that range
/// is left out. Every Engine calls this; calling it again changes nothing.
void show_spans_to_profilers();

}  // namespace tessera
