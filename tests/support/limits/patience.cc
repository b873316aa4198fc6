#include "tests/support/limits/patience.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPieces = 8;
constexpr int kSteps = 4'000'000;  // steps of `compute` in one piece, which take some milliseconds
constexpr std::size_t kWritten = 64 << 10;

std::atomic<double> longest_s{0};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Computes numbers that each depend on the number before, so that no two numbers are computed at the same time.
std::uint64_t compute(std::uint64_t number) {
  for (int i = 0; i < kSteps; ++i) number = number * 6364136223846793005u + 1442695040888963407u;
  return number;
}

/// Opens a file without a name, which leaves nothing behind. Returns -1 if that is impossible, which is no reason to
/// fail.
int scratch_file() { return ::open("/tmp", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600); }

/// Does the work of one of the two processes. The child has none of the parent's threads, so it only makes system
/// calls.
[[noreturn]] void work(int peer, int file) {
  static constexpr std::array<char, kWritten> kText{};
  std::uint64_t number = 1;
  bool meets = true;
  for (int piece = 0; piece < kPieces && meets; ++piece) {
    number = compute(number);
    const char mine = static_cast<char>(number >> 56);
    char other = 0;
    meets = ::write(peer, &mine, 1) == 1 && ::read(peer, &other, 1) == 1;
  }
  if (file >= 0 && ::write(file, kText.data(), kText.size()) >= 0) ::fdatasync(file);
  ::_exit(meets ? 0 : 1);
}

void measure() {
  const double took = measure_reference_s();
  double known = longest_s.load();
  while (known < took && !longest_s.compare_exchange_weak(known, took)) continue;
}

/// Returns the slowness that is known so far, or 1 if nothing was measured.
double known_slowness() { return std::max(1.0, longest_s.load() / kReferenceAtRest); }

}  // namespace

double measure_reference_s() {
  const Clock::time_point begin = Clock::now();
  std::array<int, 2> ends;
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) throw std::runtime_error("socketpair");
  std::array<pid_t, 2> pids = {-1, -1};
  const int file = scratch_file();
  for (std::size_t i = 0; i < pids.size(); ++i) {
    pids[i] = ::fork();
    if (pids[i] == 0) {
      ::close(ends[1 - i]);  // then each process notices when the other process ends
      work(ends[i], i == 0 ? file : -1);
    }
  }
  for (const int end : ends) ::close(end);
  if (file >= 0) ::close(file);
  for (const pid_t pid : pids) {
    if (pid > 0) ::waitpid(pid, nullptr, 0);
  }
  if (pids[0] < 0 || pids[1] < 0) throw std::runtime_error("fork");
  return seconds_since(begin);
}

double slowness() {
  if (longest_s.load() == 0) measure();
  return known_slowness();
}

Deadline::Deadline(std::chrono::duration<double> at_rest)
    : begin_(Clock::now()), at_rest_s_(at_rest.count()), limit_s_(at_rest_s_ * known_slowness()) {}

bool Deadline::passed() {
  if (seconds() < limit_s_) return false;
  measure();
  limit_s_ = at_rest_s_ * known_slowness();
  return seconds() >= limit_s_;
}

double Deadline::seconds() const { return seconds_since(begin_); }

bool in_time(double seconds, double at_rest_s) {
  if (seconds <= at_rest_s * known_slowness()) return true;
  measure();
  return seconds <= at_rest_s * known_slowness();
}

}  // namespace tessera
