#pragma once

#include <c10/util/StringUtil.h>

#include "tessera/error.h"

namespace tessera {

/// Throws tessera::Error (64) with `text` unless `good`. It reports a wrong argument, or a call at the wrong time:
/// nothing has happened yet, and the program can continue.
template <class... Text>
void expect(bool good, const Text&... text) {
  if (!good) throw Error(ExitCode::kUsage, c10::str(text...));
}

}  // namespace tessera
