#pragma once

#include <optional>
#include <string>

#include "tessera/mesh.h"

namespace tessera {

/// What `tessera::run` knows while its body runs on this thread: the mesh to tell of an exception.
struct RunScope {
  RunScope() { current = this; }
  ~RunScope() { current = nullptr; }
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  static inline thread_local RunScope* current = nullptr;
  std::optional<Mesh> mesh;
  /// Of an Engine that an exception took along: what to say if memory was short (explain_out_of_memory).
  std::string memory_story;
};

}  // namespace tessera
