#pragma once

namespace tessera {

/// Lets LibTorch's CPU tensors of this process come from malloc from now on, aligned to 64 bytes by hand.
///
/// LibTorch's own allocator calls posix_memalign. posix_memalign before glibc 2.38 takes more from the heap than the
/// block it returns, so it never finds a freed block of the same size. Every step's activations and gradients then lie
/// somewhere new, between what is still in use, and the heap grows to several times what is alive (glibc bug 14581). If
/// tensors come from malloc, a step's tensors lie where the last step's lay.
///
/// Memory that a step freed also stays with the process for the next step. The heap's end would otherwise go back to
/// the system whenever more than some 32 MiB at the end are free. The system would then clear these pages one by one
/// when they are used again. Clearing them took about 20 ms of a step of 510 ms (benchmarks/README.md, over a network).
/// Settings of malloc in the environment (MALLOC_*, GLIBC_TUNABLES) are respected. Blocks above 32 MiB are still
/// mappings of their own.
///
/// Tensors that were made before are freed by the allocator they came from. The Engine installs the heap. A program
/// that installs it before it makes the model gains more, since memory that was freed while the model was made is then
/// used again too. Only the first call does anything; any thread may make it.
void install_tensor_heap();

}  // namespace tessera
