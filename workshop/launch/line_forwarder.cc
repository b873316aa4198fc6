#include "workshop/launch/line_forwarder.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace tessera {

void LineForwarder::add(std::string_view bytes) {
  for (auto end = bytes.find('\n'); end != std::string_view::npos; end = bytes.find('\n')) {
    partial_ += bytes.substr(0, end);
    bytes.remove_prefix(end + 1);
    take_line(partial_);
    partial_.clear();
  }
  partial_ += bytes;
  while (partial_.size() >= kLongestLine) {
    take_line(std::string_view(partial_).substr(0, kLongestLine));
    partial_.erase(0, kLongestLine);
  }
  const int error = write_all(fd_, prefixed_);
  if (error_ == 0 && error != EPIPE) error_ = error;
  prefixed_.clear();
}

void LineForwarder::finish() {
  if (partial_.empty()) return;
  partial_ += '\n';
  add(std::exchange(partial_, {}));
}

void LineForwarder::take_line(std::string_view line) {
  prefixed_ += prefix_;
  prefixed_ += line;
  prefixed_ += '\n';
  last_lines_.emplace_back(line.substr(0, kKeptBytesPerLine));
  if (last_lines_.size() > kKeptLines) last_lines_.pop_front();
}

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd ready = {fd, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace tessera
