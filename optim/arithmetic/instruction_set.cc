#include "optim/arithmetic/instruction_set.h"

namespace tessera {
namespace {

#if defined(__x86_64__)
#if defined(__clang__) && __clang_major__ < 18
// Only Clang 18 and newer versions accept the names of the levels of x86-64. Code for older versions tests these
// features instead: each processor that has them has the other features of the level too.
bool has_level_3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
bool has_level_4() {
  return has_level_3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool has_level_3() { return __builtin_cpu_supports("x86-64-v3"); }
bool has_level_4() { return __builtin_cpu_supports("x86-64-v4"); }
#endif
#endif

}  // namespace

bool supports(InstructionSet set) {
#if defined(__x86_64__)
  switch (set) {
    case InstructionSet::kPortable:
      return true;
    case InstructionSet::kAvx2:
      return has_level_3();
    case InstructionSet::kAvx512:
      return has_level_4();
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
