#pragma once

namespace tessera {

/// Lets LibTorch's profilers read the data pointers of parameters. Profilers only record these pointers. Some read them
/// in a C callback, where an error would end the process (torch.profiler with with_stack). Between
/// `observe_pointers(true)` and `observe_pointers(false)`, a sharded parameter on the CPU returns a pointer
/// instead of an error while no operator and no Gathered guard reads it. The memory at that pointer holds NaN in every
/// floating-point type, and cannot be written. Operators get the parameters' values as always.
///
/// The Python package calls this function when torch's profilers start and stop. A C++ program calls it before
/// enableProfiler and after disableProfiler. The thread that drives the Engines makes the calls. Calls nest.
void observe_pointers(bool begins);

}  // namespace tessera
