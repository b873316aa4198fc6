#include "workshop/launch/agent.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/errno_hint.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/launch/host_job.h"
#include "workshop/launch/hosts/frames.h"
#include "workshop/launch/line_forwarder.h"
#include "workshop/launch/local_ranks.h"
#include "workshop/launch/process_scope.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLookEveryMs = 1000;  // time between checks for silence and for stopped ranks

/// The channel is standard input and output. ssh connects them to the launcher. The agent notices that the launcher is
/// gone when standard input or output ends, or when nothing arrives for a while. It then reads and writes nothing more.
class Channel {
 public:
  Channel() {
    for (const int fd : {0, 1}) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  }

  /// Limits the time for which the launcher may be silent, counted from now on.
  void allow_silence(double s) {
    silence_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
    last_heard_ = Clock::now();
  }

  std::optional<Frame> next() {
    std::optional<Frame> frame = frames_.next();
    if (frames_.is_broken()) leave("it sends what is no frame");
    return frame;
  }

  /// Reads the bytes that have arrived.
  void read() {
    std::array<char, 64 << 10> buffer;
    while (!is_gone()) {
      const ssize_t got = ::read(0, buffer.data(), buffer.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return check_silence();
      if (got <= 0) return leave("it has closed the connection");
      last_heard_ = Clock::now();
      frames_.add({buffer.data(), static_cast<std::size_t>(got)});
    }
  }

  void write(const Frame& frame) { write(encode(frame)); }

  /// Waits until the launcher has taken all bytes. Meanwhile it reads the launcher's messages.
  void write(std::string_view bytes) {
    while (!bytes.empty() && !is_gone()) {
      const ssize_t written = ::write(1, bytes.data(), bytes.size());
      if (written >= 0) {
        bytes.remove_prefix(static_cast<std::size_t>(written));
      } else if (errno == EAGAIN) {
        std::array<pollfd, 2> ready = {{{1, POLLOUT, 0}, {0, POLLIN, 0}}};
        ::poll(ready.data(), ready.size(), kLookEveryMs);
        read();
      } else if (errno != EINTR) {
        leave("it takes nothing: " + errno_text(errno));
      }
    }
  }

  bool is_gone() const { return !why_gone_.empty(); }
  const std::string& why_gone() const { return why_gone_; }

 private:
  void check_silence() {
    if (!silence_ || Clock::now() - last_heard_ < *silence_) return;
    leave(fmt::format("nothing was heard of it for {:g} s", std::chrono::duration<double>(*silence_).count()));
  }
  void leave(std::string why) { why_gone_ = std::move(why); }

  FrameReader frames_;
  std::optional<Clock::duration> silence_;
  Clock::time_point last_heard_;
  std::string why_gone_;
};

/// Sends the events of the ranks to the launcher, as frames.
class Teller : public RankListener {
 public:
  explicit Teller(Channel& channel) : channel_(channel) {}

  void on_started(int rank, pid_t pid) override {
    channel_.write({FrameType::kStarted, rank, FieldWriter().number(pid).take()});
  }
  void on_output(int rank, std::string_view bytes) override {
    channel_.write({FrameType::kOutput, rank, std::string(bytes)});
  }
  void on_errors(int rank, std::string_view bytes) override {
    channel_.write({FrameType::kErrors, rank, std::string(bytes)});
  }
  void on_exit(RankRecord record) override { channel_.write({FrameType::kExit, record.rank, encode_exit(record)}); }
  void on_gone(int rank) override { channel_.write({FrameType::kGone, rank, ""}); }

 private:
  Channel& channel_;
};

/// The ranks of this host from their start to their end.
class Agent {
 public:
  Agent(Channel& channel, HostJob job, const SignalScope& signals)
      : channel_(channel), job_(std::move(job)), signals_(signals), teller_(channel) {}

  absl::Status run() {
    TESSERA_RETURN_IF_ERROR(enter());
    TESSERA_ASSIGN_OR_RETURN(const ErrorDirectory directory, ErrorDirectory::make());
    job_.job.error_directory = directory.path();
    job_.job.omp_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / job_.ranks);
    TESSERA_ASSIGN_OR_RETURN(Guard guard,
                             Guard::start(directory.path(), error_files(job_.job, job_.first_rank, job_.ranks)));
    LocalRanks ranks(job_.options, job_.job, {job_.first_rank, job_.ranks}, guard, signals_.old_mask(), teller_);
    TESSERA_RETURN_IF_ERROR(ranks.start());
    stopped_.assign(static_cast<std::size_t>(job_.ranks), false);
    while (!channel_.is_gone() && ranks.phase() != HostRanks::Phase::kDone) poll_once(ranks);
    return absl::OkStatus();
  }

 private:
  /// Gives this process the job's environment and working directory.
  absl::Status enter() {
    for (const std::string& entry : job_.environment) {
      const auto equals = entry.find('=');
      if (equals != std::string::npos) ::setenv(entry.substr(0, equals).c_str(), entry.c_str() + equals + 1, 1);
    }
    if (::chdir(job_.directory.c_str()) == 0) return absl::OkStatus();
    return make_error(
        ExitCode::kNoInput,
        fmt::format("launch: no working directory {}: {}. [T0839] hint: ranks of all hosts start in the folder in "
                    "which the launcher was started, so it must be there on each of them",
                    clipped(job_.directory, 200), errno_text(errno)));
  }

  void poll_once(LocalRanks& ranks) {
    std::vector<pollfd> watched = {{0, POLLIN, 0}, {signals_.fd(), POLLIN, 0}};
    ranks.add_watched(watched);
    const int ms = ranks.timeout_ms();
    ::poll(watched.data(), watched.size(), ms < 0 ? kLookEveryMs : ms);
    if (watched[1].revents) take_signal(ranks);
    channel_.read();
    while (const auto frame = channel_.next())
      if (frame->type == FrameType::kSignal && has(frame->rank))
        ranks.send(frame->rank, static_cast<int>(FieldReader(frame->body).number()));
    ranks.react(std::span<const pollfd>(watched).subspan(2));
    tell_of_stops(ranks);
  }

  bool has(int rank) const { return rank >= job_.first_rank && rank < job_.first_rank + job_.ranks; }

  /// Passes a signal on to the ranks, as a launcher does. Slurm and others end all processes of a job with a signal.
  void take_signal(LocalRanks& ranks) {
    signalfd_siginfo info;
    if (::read(signals_.fd(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return;
    for (int i = 0; i < job_.ranks; ++i) ranks.send(job_.first_rank + i, static_cast<int>(info.ssi_signo));
  }

  void tell_of_stops(const LocalRanks& ranks) {
    if (Clock::now() - looked_ < std::chrono::milliseconds(kLookEveryMs)) return;
    looked_ = Clock::now();
    for (int i = 0; i < job_.ranks; ++i) {
      const bool stopped = ranks.is_stopped(job_.first_rank + i);
      if (stopped == stopped_[static_cast<std::size_t>(i)]) continue;
      stopped_[static_cast<std::size_t>(i)] = stopped;
      channel_.write({FrameType::kStopped, job_.first_rank + i, FieldWriter().number(stopped).take()});
    }
  }

  Channel& channel_;
  HostJob job_;
  const SignalScope& signals_;
  Teller teller_;
  std::vector<bool> stopped_;
  Clock::time_point looked_;
};

int leave(ExitCode code, const std::string& text) {
  write_all(2, "tessera launch-agent: " + text + "\n");
  return static_cast<int>(code);
}

}  // namespace

int serve_launch_agent() {
  if (::isatty(0))
    return leave(
        ExitCode::kUsage,
        "this command is not for people: `tessera launch --hosts` starts it on other hosts. [T0840] hint: write "
        "tessera launch --hosts a:2,b:2 -- program");
  take_process_limits();
  const SignalScope signals;
  Channel channel;
  channel.write(fmt::format("\n{}{}\n", kAgentGreeting, own_version()));  // "\n": a login shell may leave a line open
  std::optional<Frame> first;
  while (!channel.is_gone() && !(first = channel.next())) {
    pollfd ready = {0, POLLIN, 0};
    ::poll(&ready, 1, -1);
    channel.read();
  }
  if (!first) return leave(ExitCode::kUnavailable, "the launcher is gone: " + channel.why_gone());
  auto job = first->type == FrameType::kJob ? decode_job(first->body) : std::nullopt;
  if (!job) return leave(ExitCode::kInternal, "what the launcher sent is no job");
  channel.allow_silence(job->options.times.silence_s);
  const absl::Status status = Agent(channel, *std::move(job), signals).run();
  if (!status.ok()) {
    FieldWriter fields;
    fields.number(static_cast<int>(exit_code_of(status))).text(message_of(status));
    channel.write({FrameType::kRefused, first->rank, fields.take()});
  }
  return channel.is_gone() ? leave(ExitCode::kUnavailable, "the launcher is gone: " + channel.why_gone()) : 0;
}

}  // namespace tessera
