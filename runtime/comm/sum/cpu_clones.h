#pragma once

// TESSERA_CPU_CLONES before a function makes one copy of the function for each instruction set. One copy is chosen when
// the program is loaded. Sanitizers' run-times are not ready when the copy is chosen, so their builds have only the
// portable copy. The functions that such a function calls must be inlined into it (TESSERA_INLINE). Otherwise they
// would be compiled for the portable set.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TESSERA_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TESSERA_CPU_CLONES
#endif
#define TESSERA_INLINE [[gnu::always_inline]] inline
