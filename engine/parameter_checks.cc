#include "engine/parameter_checks.h"

#include "sharding/value_hash.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::uint32_t version_of(const FlatParameter& parameter) {
  return parameter.tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

[[noreturn]] void throw_written(const FlatParameter& parameter) {
  throw Error(
      ExitCode::kUsage,
      "parameter " + parameter.name +
          " was written in place outside tessera::Gathered(engine, tessera::Gathered::kWrite), where the Engine "
          "cannot follow. hint: make such a guard around the write, on all ranks; a module that writes its "
          "parameters in forward cannot be trained sharded");
}

[[noreturn]] void throw_written_secretly(const FlatParameter& parameter) {
  throw Error(ExitCode::kUsage, "parameter " + parameter.name +
                                    " was written through .data() or a raw pointer outside tessera::Gathered(engine, "
                                    "tessera::Gathered::kWrite) (\"check.values\"). hint: make such a guard around the "
                                    "write, on all ranks");
}

[[noreturn]] void throw_unfrozen(const FlatParameter& parameter) {
  throw Error(ExitCode::kUsage,
              "parameter " + parameter.name +
                  " was frozen when the Engine was made and requires gradients now, for which there is "
                  "no memory. hint: call engine.set_trainable(\"" +
                  parameter.name + "\", true) on all ranks in place of requires_grad_(true)");
}

}  // namespace

void ParameterChecks::accept() {
  for (const auto& unit : units_) accept(*unit);
}

void ParameterChecks::accept(Unit& unit) {
  for_each_parameter(unit, [&](FlatGroup& group, std::size_t i) {
    FlatParameter& parameter = group.parameters[i];
    parameter.version = version_of(parameter);
    if (checks_values_) parameter.hash = hash_of_part(group, i);
  });
}

void ParameterChecks::expect_accepted() const {
  for_each_parameter(units_, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    expect_in_place(group, i);
    if (version_of(parameter) != parameter.version) throw_written(parameter);
    if (checks_values_ && hash_of_part(group, i) != parameter.hash) throw_written_secretly(parameter);
    if (!group.trainable && parameter.tensor.requires_grad()) throw_unfrozen(parameter);
  });
}

}  // namespace tessera
