#pragma once

#include <c10/util/StringUtil.h>

#include "tessera/error.h"

namespace tessera {

/// Throws tessera::Error (64) with `text` unless `good`: a call out of turn or with a wrong argument. Nothing has happened
/// yet, and the program can go on.
template <class... Text>
void expect(bool good, const Text&... text) {
  if (!good) throw Error(ExitCode::kUsage, c10::str(text...));
}

}  // namespace tessera
