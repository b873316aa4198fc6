#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <utility>

#include "runtime/base/status.h"
#include "tessera/error.h"

namespace tessera {

/// The border between the two error channels: failures are `absl::Status` below it and tessera::Error above it. Code
/// above calls code below through these functions.

/// Returns the exception for a status that is not OK, with its exit code and its message.
inline Error error_of(const absl::Status& status) { return Error(exit_code_of(status), message_of(status)); }

/// Throws error_of(status) unless the status is OK.
inline void throw_if_error(const absl::Status& status) {
  if (!status.ok()) throw error_of(status);
}

/// Returns the value of a result, or throws error_of its status.
template <class T>
T value_or_throw(absl::StatusOr<T> result) {
  if (!result.ok()) throw error_of(result.status());
  return *std::move(result);
}

}  // namespace tessera
