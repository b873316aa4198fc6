#pragma once

#include <string_view>

#include "runtime/base/always_inline.h"

#if defined(__x86_64__)
#define TESSERA_TARGET_AVX2 __attribute__((target("arch=x86-64-v3")))
#define TESSERA_TARGET_AVX512 __attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))
#else
#define TESSERA_TARGET_AVX2
#define TESSERA_TARGET_AVX512
#endif

namespace tessera {

/// The instruction sets for which the optimizer's loops are compiled. The loops have one source, which is compiled
/// three times. The loops of a step are compiled in three files (step_loops_*.cc), and the loops of the norm in
/// functions with a target attribute. The operations a * b + c are not contracted into one rounding
/// (-ffp-contract=off), and sums are not reordered. A fused operation is used only where it gives the same bits as
/// separate operations. So every variant gives the same bits, and ranks on different processors agree. Function tables
/// are used instead of `target_clones`, so that tests can call each variant. Clones would also need resolvers, which
/// run before a sanitizer is ready.
enum class InstructionSet {
  kPortable,  ///< x86-64 with SSE2, or the default of another architecture
  kAvx2,      ///< x86-64-v3
  kAvx512,    ///< x86-64-v4
};

/// Returns whether this processor (and this architecture) can run the variant.
bool supports(InstructionSet set);

/// Returns the widest variant that this processor can run.
InstructionSet best_instruction_set();

/// Returns "portable", "avx2" or "avx512".
std::string_view name_of(InstructionSet set);

}  // namespace tessera
