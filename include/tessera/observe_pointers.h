#pragma once

namespace tessera {

/// LibTorch's profilers ask parameters for their pointers only to note them, and some ask in a C callback, where a refusal would end the
/// process (torch.profiler with with_stack). From `observe_pointers(true)` until `observe_pointers(false)` a sharded parameter on the CPU
/// that no operator and no Gathered guard reads answers with memory that holds NaN in every floating type and cannot be written, in place
/// of an error. Operators see their values as ever.
///
/// The Python package calls it where torch's profilers start and stop; a C++ program calls it around enableProfiler and disableProfiler.
/// By the thread that drives the Engines; calls nest.
void observe_pointers(bool begins);

}  // namespace tessera
