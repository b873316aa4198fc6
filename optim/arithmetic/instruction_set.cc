#include "optim/arithmetic/instruction_set.h"

namespace tessera {

bool supports(InstructionSet set) {
#if defined(__x86_64__)
  switch (set) {
    case InstructionSet::kPortable:
      return true;
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("x86-64-v3");
    case InstructionSet::kAvx512:
      return __builtin_cpu_supports("x86-64-v4");
  }
  return false;
#else
  return set == InstructionSet::kPortable;
#endif
}

InstructionSet best_instruction_set() {
  if (supports(InstructionSet::kAvx512)) return InstructionSet::kAvx512;
  if (supports(InstructionSet::kAvx2)) return InstructionSet::kAvx2;
  return InstructionSet::kPortable;
}

std::string_view name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable:
      return "portable";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
  }
  return "?";
}

}  // namespace tessera
