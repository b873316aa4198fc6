#pragma once

namespace tessera {

/// From now on, makes LibTorch allocate the CPU tensors of this process with malloc, and aligns them to 64 bytes.
///
/// LibTorch's own allocator calls posix_memalign. posix_memalign before glibc 2.38 takes more from the heap than the
/// block it returns, so it never finds a freed block of the same size. The activations and gradients of every step then
/// lie at new places, between blocks that are still in use. The heap grows to several times the memory in use (glibc
/// bug 14581). If tensors come from malloc, a step's tensors lie where the last step's tensors lay.
///
/// Memory that a step freed also stays with the process for the next step. Otherwise malloc would give the end of the
/// heap back to the system whenever more than some tens of MiB are free there. The system would then clear these pages
/// one by one when they are used again. Clearing them took about 20 ms of a step of 510 ms (benchmarks/README.md has
/// other times, without and with this setting). Settings of malloc in the environment (MALLOC_*, GLIBC_TUNABLES) are
/// respected. Each block above 32 MiB is still a separate mapping.
///
/// Tensors that were made before are freed by the allocator that made them. The Engine calls this function. A program
/// gains more if it calls this function before it makes the model: memory that was freed while the model was made is
/// then used again too. Only the first call has an effect. Any thread may call it.
void install_tensor_heap();

}  // namespace tessera
