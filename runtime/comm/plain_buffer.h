#pragma once

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// A CommBuffer of this process's own memory: zero-filled, aligned to cache lines.
class PlainBuffer : public CommBuffer {
 public:
  explicit PlainBuffer(std::size_t bytes)
      : lines_(std::make_unique<Line[]>(bytes / sizeof(Line) + 1)), bytes_(bytes) {}
  std::byte* data() const override { return lines_[0].bytes; }
  std::size_t bytes() const override { return bytes_; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const std::unique_ptr<Line[]> lines_;
  const std::size_t bytes_;
};

}  // namespace tessera
