#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

namespace tessera {

/// While an Unrecorded lives, Tessera's tensor operators on this thread are neither recorded for autograd nor checked
/// for units (sharding/gather/op_watch.h).
struct Unrecorded {
  at::NoGradGuard no_grad;
  at::DisableRecordFunctionGuard no_record;
};

}  // namespace tessera
