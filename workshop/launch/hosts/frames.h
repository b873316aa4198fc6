#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Frames that a launcher and its agent on another host (workshop/launch/agent.h) send to each other over ssh's pipes.
/// A frame has a type, a rank and a body. The launcher and the agent have the same version of Tessera, so frames have
/// no version of their own.
enum class FrameType : std::uint8_t {
  // These frames go from the launcher to the agent.
  kJob = 1,  ///< body: what to start (host_job.h); sent once, and first
  kSignal,   ///< body: the signal to send to the rank's process group
  kAlive,    ///< no body; this frame shows that the launcher is alive
  // These frames go from the agent to the launcher.
  kRefused,  ///< body: the exit code, and the text of the error; the ranks could not be started
  kStarted,  ///< body: the rank's pid
  kOutput,   ///< body: bytes of the rank's stdout
  kErrors,   ///< body: bytes of the rank's stderr
  kStopped,  ///< body: 1 if the rank is stopped from now on (SIGSTOP), 0 if it runs again
  kExit,     ///< body: how the rank's leader ended (host_job.h)
  kGone,     ///< no body; no process of the rank's group is left, and all of its output was sent
};

struct Frame {
  FrameType type = FrameType::kAlive;
  int rank = 0;
  std::string body;
};

/// Returns the frame as bytes: type, rank, length of the body, body.
std::string encode(const Frame& frame);

/// Cuts a stream of bytes into frames.
class FrameReader {
 public:
  void add(std::string_view bytes) { bytes_ += bytes; }
  /// Returns the next whole frame; nothing if more bytes are needed, or if the stream is broken.
  std::optional<Frame> next();
  /// Returns whether the stream has bytes that are no frame. The bytes that follow them cannot be read.
  bool is_broken() const { return broken_; }

 private:
  std::string bytes_;
  bool broken_ = false;
};

/// Writes numbers and texts into a body.
class FieldWriter {
 public:
  FieldWriter& number(std::int64_t value);
  FieldWriter& text(std::string_view value);
  FieldWriter& texts(const std::vector<std::string>& values);
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads numbers and texts in the order in which they were written. Numbers are 0, texts are empty and `is_ok` is false
/// after the end.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : rest_(bytes) {}

  std::int64_t number();
  std::string text();
  std::vector<std::string> texts();
  bool is_ok() const { return ok_; }

 private:
  std::string_view take(std::uint64_t length);

  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace tessera
