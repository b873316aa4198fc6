#pragma once

namespace tessera {

/// Lets LibTorch's profilers read parameters' pointers. Profilers ask for pointers only to note them, and some ask in a
/// C callback, where a refusal would end the process (torch.profiler with with_stack). Between `observe_pointers(true)`
/// and `observe_pointers(false)`, a sharded parameter on the CPU that no operator and no Gathered guard reads gives a
/// pointer instead of an error. That memory holds NaN in every floating type and cannot be written. Operators see the
/// parameters' values as always.
///
/// The Python package calls it where torch's profilers start and stop; a C++ program calls it around enableProfiler and
/// disableProfiler. The thread that drives the Engines makes the calls. Calls nest.
void observe_pointers(bool begins);

}  // namespace tessera
