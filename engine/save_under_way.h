#pragma once

#include <absl/status/statusor.h>

#include <string>

#include "tessera/checkpoint.h"

namespace tessera {

/// The save of a checkpoint that goes on beside training, as the Engine sees it: engine/saving makes it (BackgroundSave). Its destructor
/// waits for the end.
class SaveUnderWay {
 public:
  virtual ~SaveUnderWay() = default;
  virtual CheckpointProgress progress() const = 0;
  virtual bool has_ended() const = 0;
  /// Waits for the end: the checkpoint's path, or why there is none, which is the same on every rank.
  virtual absl::StatusOr<std::string> wait() = 0;
  /// Lets it fail soon, since training ends with an error.
  virtual void cancel() = 0;
};

}  // namespace tessera
