#pragma once

// See docs/glossary.md: unit.

namespace tessera {

/// Makes every Span of the process a range of LibTorch's RecordFunction (scope USER_SCOPE) from now on, named as in a
/// trace: "all_gather blocks.3". A profiler that is attached then shows units and collectives beside the operators.
/// torch.profiler and Kineto show them as user annotations. torch.autograd.profiler.emit_nvtx, and nsys with
/// --pytorch=autograd-nvtx, show them as NVTX ranges. A range lasts as long as its call on the host. On a GPU, a
/// profiler also shows the work that the call queued.
///
/// An Unrecorded hides operators from observers; it also hides the spans that begin inside it.
///
/// Without a profiler, a span only looks for callbacks of its thread, which takes some nanoseconds and no memory. An
/// observer that throws has no effect on training: LibTorch logs the exception. If there is no memory for a range, that
/// range is left out. Every Engine calls this function; calling it again changes nothing.
void show_spans_to_profilers();

}  // namespace tessera
