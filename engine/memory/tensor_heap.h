#pragma once

namespace tessera {

/// From now on LibTorch's CPU tensors of this process come from malloc, aligned to 64 bytes by hand. LibTorch's own
/// allocator asks posix_memalign, which before glibc 2.38 asks its heap for more than the block it returns, and so
/// never finds a block of the same size that was freed: every step's activations and gradients land somewhere new,
/// between what is still in use, and the heap grows to several times what is alive (glibc bug 14581). With malloc a
/// step's tensors lie where the last step's lay.
///
/// And what a step gave back stays with the process for the next one. Else the heap's end goes to the system whenever more than some 32 MiB of
/// it are free, and comes back as pages that fault and are cleared one by one: that was some 20 ms of a step
/// of 510 (benchmarks/README.md, over a network). Where the
/// environment sets malloc (MALLOC_*, GLIBC_TUNABLES), malloc stays as it says. Blocks above 32 MiB are mappings of their own still.
///
/// Tensors made before go back where they came from. The Engine installs it; before the model is made it serves better,
/// since what making a model leaves in the heap is then used again too. Idempotent, from any thread.
void install_tensor_heap();

}  // namespace tessera
