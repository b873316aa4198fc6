#include "workshop/launch/remote_ranks.h"

#include <fmt/format.h>
#include <limits.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/launch/exit_report.h"
#include "workshop/launch/rank_environment.h"

namespace tessera {

// This file runs ranks on another host, through ssh.
//
// `connect` starts ssh, and a launch-agent at its other end. Bytes before the agent's greeting are skipped
// (`take_bytes`, `take_greeting`), and frames follow. `start` sends the job, and `send` a signal. `take_from_rank`
// tells the listener what the agent reports. `check_deadline` kills an ssh that takes too long, and `check_end` notices
// that ssh has ended. If the ranks had not started, `explain_end` says why; otherwise they are lost (`lose_ranks`).

namespace {

using namespace std::chrono_literals;

constexpr auto kEndAfterKill = 10s;
constexpr auto kLastMoment = 2s;  // time in which ssh may end by itself after it is no longer needed
constexpr std::size_t kLongestGreeting = 1 << 20;
constexpr int kSshFailed = 255, kNoProgram = 127, kNotExecutable = 126;

/// Options of every ssh. ssh then gives the agent (Tessera's program on the other host) no terminal, never asks for
/// anything, and notices within half a minute that the network is gone. The user's own options are placed before these
/// options. If an option is given twice, ssh uses the first.
constexpr std::array<const char*, 9> kSshOptions = {"-T",
                                                    "-o",
                                                    "BatchMode=yes",
                                                    "-o",
                                                    "ConnectTimeout=30",
                                                    "-o",
                                                    "ServerAliveInterval=10",
                                                    "-o",
                                                    "ServerAliveCountMax=3"};

/// Quotes a word for any shell. Only the closing quote is special within single quotes.
std::string quoted_for_shell(const std::string& word) {
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

std::string end_of(const RankExit& exit) {
  return exit.signal() ? fmt::format("signal {}", *exit.signal()) : fmt::format("exit code {}", exit.code());
}

}  // namespace

RemoteRanks::RemoteRanks(Host host, const LaunchOptions& options, Guard& guard, Heartbeat& heartbeat,
                         const sigset_t& mask, RankListener& listener)
    : host_(std::move(host)),
      options_(options),
      guard_(guard),
      heartbeat_(heartbeat),
      mask_(mask),
      listener_(listener),
      errors_(options.stderr_fd, options.prefix ? fmt::format("[host {}] ", host_.name) : ""),
      ranks_(static_cast<std::size_t>(host_.job.ranks)) {}

RemoteRanks::~RemoteRanks() {
  if (ssh_.pid <= 0) return;
  close_input();  // this tells the agent to kill the ranks that it still has
  if (!ended_) {
    pollfd end = {ssh_.exited.get(), POLLIN, 0};
    const auto wait = phase_ == Phase::kConnecting ? 0s : kLastMoment;
    ::poll(&end, 1, static_cast<int>(std::chrono::milliseconds(wait).count()));
    ssh_.send(SIGKILL);
    ::waitpid(ssh_.pid, nullptr, 0);
  }
  ssh_.is_group_empty();  // this reaps other processes that became our children
  guard_.forget(ssh_.pid);
}

std::vector<std::string> RemoteRanks::agent_command() const {
  std::vector<std::string> words = options_.over_ssh.command;
  words.insert(words.end(), kSshOptions.begin(), kSshOptions.end());
  words.push_back(host_.name);
  words.push_back("exec " + quoted_for_shell(tessera_of(options_)) + " launch-agent");
  return words;
}

absl::Status RemoteRanks::connect() {
  auto ssh = start_rank(agent_command(), current_environment(), mask_, StandardInput::kPipe);
  if (!ssh.ok() && exit_code_of(ssh.status()) == ExitCode::kOsResource) return ssh.status();
  if (!ssh.ok())
    return make_error(
        exit_code_of(ssh.status()),
        fmt::format("launch: host {} cannot be reached: there is no {} that starts. [T0859] hint: install ssh's "
                    "client (Debian: openssh-client), or name another program by --ssh",
                    host_.name, quoted_text(options_.over_ssh.command.front())));
  ssh_ = *std::move(ssh);
  guard_.watch(ssh_.pid);
  deadline_ = Clock::now() + time_to_answer();
  return absl::OkStatus();
}

std::chrono::steady_clock::duration RemoteRanks::time_to_answer() const {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.times.connect_s));
}

void RemoteRanks::give_time_to_start() { start_deadline_ = Clock::now() + time_to_answer(); }

absl::Status RemoteRanks::start() {
  phase_ = Phase::kStarting;
  give_time_to_start();
  write({FrameType::kJob, host_.job.first_rank, encode(host_.job)});
  return absl::OkStatus();
}

void RemoteRanks::add_watched(std::vector<pollfd>& watched) const {
  watched.push_back({ssh_.out.get(), POLLIN, 0});
  watched.push_back({ssh_.err.get(), POLLIN, 0});
  watched.push_back({ssh_.exited.get(), POLLIN, 0});
  if (!to_write_.empty() && ssh_.in.is_open()) watched.push_back({ssh_.in.get(), POLLOUT, 0});
}

int RemoteRanks::timeout_ms() const {
  if (ended_ || (!deadline_ && !start_deadline_)) return -1;
  const auto next =
      std::min(deadline_.value_or(Clock::time_point::max()), start_deadline_.value_or(Clock::time_point::max()));
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

void RemoteRanks::react(std::span<const pollfd> ready) {
  if (ready[0].revents) read_output();
  if (ready[1].revents) read_errors();
  flush();
  check_deadline();
  check_end();
}

void RemoteRanks::read_output() {
  read_some(ssh_.out, [this](std::string_view bytes) { take_bytes(bytes); });
}

void RemoteRanks::read_errors() {
  read_some(ssh_.err, [this](std::string_view bytes) { errors_.add(bytes); });
}

/// A login shell may print anything before the agent begins; that text is skipped.
void RemoteRanks::take_bytes(std::string_view bytes) {
  if (phase_ != Phase::kConnecting) {
    frames_.add(bytes);
  } else {
    greeting_ += bytes;
    for (auto end = greeting_.find('\n'); end != std::string::npos; end = greeting_.find('\n')) {
      const std::string line = greeting_.substr(0, end);
      greeting_.erase(0, end + 1);
      take_greeting(line);
      if (phase_ == Phase::kConnecting) continue;
      frames_.add(std::exchange(greeting_, {}));
      break;
    }
    if (greeting_.size() > kLongestGreeting) greeting_.clear();
  }
  while (const auto frame = frames_.next()) take(*frame);
  if (!frames_.is_broken()) return;
  errors_.add("what came from this host is no answer of a launch-agent: something else writes to its stdout\n");
  if (!ended_) ssh_.send(SIGKILL);
}

void RemoteRanks::take_greeting(std::string_view line) {
  if (!line.starts_with(kAgentGreeting) || !failure_.ok()) return;
  const std::string_view version = line.substr(kAgentGreeting.size());
  if (version != own_version())
    return fail(
        ExitCode::kConfig,
        fmt::format("host {} has Tessera {}, and this one has {}. [T0860] hint: install the same version on all hosts",
                    host_.name, clipped(version, 40), own_version()));
  phase_ = Phase::kConnected;
  deadline_.reset();
}

void RemoteRanks::take(const Frame& frame) {
  if (start_deadline_) give_time_to_start();
  if (frame.type == FrameType::kRefused) {
    FieldReader fields(frame.body);
    const auto code = static_cast<ExitCode>(fields.number());
    std::string text_with_hint = fields.text();
    constexpr std::string_view kLaunch = "launch: ";
    if (text_with_hint.starts_with(kLaunch)) text_with_hint.erase(0, kLaunch.size());
    return fail(code, fmt::format("host {}: {}", host_.name, text_with_hint));
  }
  const int first = host_.job.first_rank;
  if (frame.rank < first || frame.rank >= first + host_.job.ranks) return;
  take_from_rank(frame, rank_of(frame.rank));
}

void RemoteRanks::take_from_rank(const Frame& frame, Rank& rank) {
  switch (frame.type) {
    case FrameType::kStarted:
      rank.started = true;
      rank.pid = static_cast<pid_t>(FieldReader(frame.body).number());
      listener_.on_started(frame.rank, rank.pid);
      if (phase_ != Phase::kStarting || !std::ranges::all_of(ranks_, &Rank::started)) return;
      phase_ = Phase::kRunning;
      start_deadline_.reset();
      return;
    case FrameType::kOutput:
      return listener_.on_output(frame.rank, frame.body);
    case FrameType::kErrors:
      return listener_.on_errors(frame.rank, frame.body);
    case FrameType::kStopped:
      rank.stopped = FieldReader(frame.body).number() != 0;
      return;
    case FrameType::kExit:
      if (auto record = decode_exit(frame.rank, frame.body); record && !std::exchange(rank.ended, true))
        listener_.on_exit(*std::move(record));
      return;
    case FrameType::kGone:
      if (rank.ended && !std::exchange(rank.gone, true)) listener_.on_gone(frame.rank);
      if (!std::ranges::all_of(ranks_, &Rank::gone)) return;
      phase_ = Phase::kDone;
      return close_input();
    default:
      return;
  }
}

void RemoteRanks::write(const Frame& frame) {
  if (!ssh_.in.is_open()) return;
  to_write_.push_back(encode(frame));
  flush();
}

void RemoteRanks::flush() {
  while (!to_write_.empty() && ssh_.in.is_open()) {
    std::string& frame = to_write_.front();
    const ssize_t written = ::write(ssh_.in.get(), frame.data(), frame.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) return;
    if (written < 0) return close_input();  // ssh ends now, and its exit tells the reason
    frame.erase(0, static_cast<std::size_t>(written));
    if (frame.empty()) to_write_.pop_front();
  }
  // The heartbeat begins only now, since a frame of the heartbeat must not lie inside the frame with the job. Later
  // frames are small (at most PIPE_BUF), and each is written alone, so the pipe takes each frame whole.
  if (phase_ >= Phase::kStarting && ssh_.in.is_open() && !std::exchange(beats_, true)) heartbeat_.add(ssh_.in.get());
}

void RemoteRanks::close_input() {
  if (std::exchange(beats_, false)) heartbeat_.remove(ssh_.in.get());
  ssh_.in.reset();
  to_write_.clear();
}

void RemoteRanks::send(int number, int signal) {
  if (rank_of(number).gone) return;
  write({FrameType::kSignal, number, FieldWriter().number(signal).take()});
  if (signal == SIGKILL && !deadline_) deadline_ = Clock::now() + kEndAfterKill;
}

void RemoteRanks::check_deadline() {
  if (start_deadline_ && !ended_ && Clock::now() >= *start_deadline_) {
    start_deadline_.reset();
    fail(ExitCode::kUnavailable,
         fmt::format("host {} has answered, and for {:g} s has told nothing of the ranks that it is to start{}. "
                     "[T0934] hint: see "
                     "what hangs there: its disks (df), or a folder of the network in which the program lies",
                     host_.name, options_.times.connect_s, last_words()));
    ssh_.send(SIGKILL);
  }
  if (!deadline_ || ended_ || Clock::now() < *deadline_) return;
  if (phase_ == Phase::kConnecting)
    fail(ExitCode::kUnavailable,
         fmt::format("host {} has not answered within {:g} s{}. [T0861] hint: see whether `{} {} true` ends there",
                     host_.name, options_.times.connect_s, last_words(), joined(options_.over_ssh.command, " "),
                     host_.name));
  deadline_.reset();
  ssh_.send(SIGKILL);
}

void RemoteRanks::check_end() {
  if (ended_) return;
  const auto exit = ssh_.reap();
  if (!exit) return;
  ended_ = true;
  ssh_.exited.reset();
  for (int round = 0; round < 16; ++round) {  // this reads the bytes that are still in the pipes
    read_output();
    read_errors();
  }
  errors_.finish();
  close_input();
  ssh_.out.reset();
  ssh_.err.reset();
  if (phase_ < Phase::kRunning)
    explain_end(*exit);
  else if (phase_ == Phase::kRunning)
    lose_ranks(fmt::format("the connection to its host has ended: ssh ended with {}{}", end_of(*exit), last_words()));
}

void RemoteRanks::fail(ExitCode code, const std::string& text) {
  if (failure_.ok()) failure_ = make_error(code, "launch: " + text);
}

/// Sets the error that says why the agent is gone before all ranks had started.
void RemoteRanks::explain_end(const RankExit& exit) {
  const std::string path = tessera_of(options_);
  const std::string reach = joined(options_.over_ssh.command, " ") + " " + host_.name;
  const bool answered = phase_ != Phase::kConnecting;
  switch (exit.signal() || answered ? 0 : exit.code()) {
    case kSshFailed:
      return fail(
          ExitCode::kUnavailable,
          fmt::format(
              "host {} cannot be reached{}. [T0862] hint: `{} -o BatchMode=yes {} true` must end there without a "
              "question; ssh-copy-id installs a key",
              host_.name, last_words(), joined(options_.over_ssh.command, " "), host_.name));
    case kNoProgram:
    case kNotExecutable:
      return fail(ExitCode::kNoInput,
                  fmt::format("host {} has no {} that starts{}. [T0863] hint: install Tessera there, at the "
                              "same path as here",
                              host_.name, clipped(path, 200), last_words()));
    case static_cast<int>(ExitCode::kUsage):
      return fail(
          ExitCode::kConfig,
          fmt::format("host {} has a Tessera that is not {} as here: it knows no launch-agent{}. [T0864] hint: install "
                      "the same version on all hosts",
                      host_.name, own_version(), last_words()));
    default:
      return fail(
          ExitCode::kUnavailable,
          fmt::format("what ssh started on host {} ended before its ranks had started, with {}{}. [T0865] hint: see "
                      "what `{} {} launch-agent < /dev/null` says",
                      host_.name, end_of(exit), last_words(), reach, clipped(path, 200)));
  }
}

void RemoteRanks::lose_ranks(const std::string& reason) {
  phase_ = Phase::kDone;
  for (int number = host_.job.first_rank; number < host_.job.first_rank + host_.job.ranks; ++number) {
    Rank& rank = rank_of(number);
    if (!std::exchange(rank.ended, true)) {
      RankRecord record;
      record.rank = number;
      record.pid = rank.pid;
      record.exit.wait_status = W_EXITCODE(static_cast<int>(ExitCode::kPeerLost), 0);
      record.exit.when = std::chrono::system_clock::now();
      record.lost = reason;
      listener_.on_exit(std::move(record));
    }
    if (!std::exchange(rank.gone, true)) listener_.on_gone(number);
  }
}

/// Returns ": " and the last line that ssh or the agent wrote; "" if there is none.
std::string RemoteRanks::last_words() const {
  for (auto line = errors_.last_lines().rbegin(); line != errors_.last_lines().rend(); ++line)
    if (line->find_first_not_of(" \t\r") != std::string::npos)
      return ": " + clipped(line->substr(0, line->find('\r')), 300);
  return "";
}

}  // namespace tessera
