#include "engine/asynchronous/servers/parameter_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <limits>
#include <span>
#include <system_error>
#include <utility>

#include "offload/files/atomic_file.h"
#include "offload/files/scratch_directory.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kLook{100}, kShortLook{5};
constexpr std::chrono::milliseconds kForStrangers{10'000};  // time in which a connection has to send the secret
constexpr std::chrono::milliseconds kStandstill{60'000};
constexpr int kMostStrangers = 64;
constexpr char kThisServer[] = "parameter server";
constexpr std::int64_t kMostDefinition = std::int64_t{256} << 20;

/// Compares all bytes, so that the time of the comparison does not show where the first difference is.
bool is_same(const std::string& said, const std::string& secret) {
  unsigned difference = said.size() == secret.size() ? 0 : 1;
  for (std::size_t i = 0; i < said.size() && i < secret.size(); ++i)
    difference |= static_cast<unsigned char>(said[i]) ^ static_cast<unsigned char>(secret[i]);
  return difference == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterServer>> ParameterServer::start(const std::string& address,
                                                                        const std::string& secret,
                                                                        const std::optional<KeepOptions>& keep,
                                                                        const std::string& offload) {
  if (secret.size() < kLeastSecret || secret.size() > kMostSecret)
    return make_error(ExitCode::kConfig,
                      "parameter server: the secret of a job has " + std::to_string(kLeastSecret) + " to " +
                          std::to_string(kMostSecret) + " bytes, got " + std::to_string(secret.size()) +
                          ". [T0958] hint: set TESSERA_SERVERS_SECRET to a random text, the same for "
                          "servers and workers");
  if (keep && (keep->folder.empty() || keep->lose < 0 || keep->lose > KeepOptions::kMostLose))
    return make_error(ExitCode::kConfig, "parameter server: shards are kept in a folder, and 0 to " +
                                             std::to_string(KeepOptions::kMostLose) + " pushes may be lost, got \"" +
                                             keep->folder + "\" and " + std::to_string(keep->lose) +
                                             ". [T1000] hint: write --state FOLDER --lose 16");
  // Workers come later, perhaps much later, so a folder that cannot be used is reported at the start.
  if (keep) TESSERA_RETURN_IF_ERROR(make_folders(keep->folder, kThisServer));
  if (!offload.empty()) TESSERA_RETURN_IF_ERROR(look_at_scratch_directory(offload, kThisServer).status());
  TESSERA_ASSIGN_OR_RETURN(ServerSocket listener, listen_for_workers(address));
  return std::unique_ptr<ParameterServer>(new ParameterServer(std::move(listener), secret, keep, offload));
}

ParameterServer::ParameterServer(ServerSocket listener, std::string secret, std::optional<KeepOptions> keep,
                                 std::string offload)
    : listener_(std::move(listener)),
      secret_(std::move(secret)),
      keep_(std::move(keep)),
      offload_(std::move(offload)),
      accepting_([this] { accept_all(); }) {}

ParameterServer::~ParameterServer() {
  is_ending_ = true;
  accepting_.join();
  for (Connection& connection : connections_) connection.link.shut();
  connections_.clear();  // this joins the connections' threads
  ::close(listener_.socket);
}

void ParameterServer::accept_all() {
  while (!is_ending_) {
    look_at_connections();
    if (!has_place_for_stranger()) {  // a rank that comes now waits in the socket's queue
      std::this_thread::sleep_for(kShortLook);
      continue;
    }
    pollfd ready{listener_.socket, POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(kLook.count())) <= 0) continue;
    const int socket = ::accept4(listener_.socket, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) {
      std::this_thread::sleep_for(kLook);  // there may be no free descriptor; the connection waits in the socket's
                                           // queue
      continue;
    }
    Connection& added = connections_.emplace_back(socket);
    try {
      added.thread = std::jthread([this, &added] {
        serve(added);
        added.link.shut();
        added.has_ended = true;
      });
    } catch (const std::system_error&) {
      log_warning("parameter server: the system refuses a thread for another worker");
      connections_.pop_back();
    }
  }
}

void ParameterServer::look_at_connections() {
  connections_.remove_if([](const Connection& connection) { return connection.has_ended.load(); });
  const auto now = ServerLink::Clock::now();
  for (Connection& each : connections_)
    if (!each.is_known && now - each.since > kForStrangers) each.link.shut();
}

bool ParameterServer::has_place_for_stranger() const {
  return std::ranges::count_if(connections_, [](const Connection& each) { return !each.is_known; }) < kMostStrangers;
}

absl::Status ParameterServer::hear_secret(Connection& connection) {
  ServerLink& link = connection.link;
  TESSERA_ASSIGN_OR_RETURN(const MessageHead head, link.receive_head(kForStrangers));
  if (head.kind != MessageKind::kSecret || head.bytes > static_cast<std::int64_t>(kMostSecret))
    return make_error(ExitCode::kPeerLost,
                      "a stranger. [T0959] hint: only ranks with \"sync\": {\"owners\": \"servers\"} connect here");
  std::string said(static_cast<std::size_t>(head.bytes), '\0');
  TESSERA_RETURN_IF_ERROR(link.receive(std::as_writable_bytes(std::span(said)), kForStrangers));
  if (!is_same(said, secret_)) {
    log_warning("parameter server: a connection with another secret was refused");
    const absl::Status refused = make_error(
        ExitCode::kPermission,
        "the secret is another one. [T0960] hint: TESSERA_SERVERS_SECRET must be the same for servers and workers of a "
        "job");
    TESSERA_RETURN_IF_ERROR(link.refuse(refused, kStandstill));
    return refused;
  }
  connection.is_known = true;
  return link.send({.kind = MessageKind::kDone}, {}, kStandstill);
}

absl::StatusOr<ParameterServer::Joined> ParameterServer::join(const MessageHead& head, Connection& connection) {
  ServerLink& link = connection.link;
  if (head.kind != MessageKind::kJoin || head.bytes > kMostDefinition)
    return make_error(ExitCode::kPeerLost,
                      "no definition came. [T0961] hint: run `tessera serve` of the workers' own version");
  std::string definition(static_cast<std::size_t>(head.bytes), '\0');
  TESSERA_RETURN_IF_ERROR(link.receive(std::as_writable_bytes(std::span(definition)), kStandstill));
  const MutexLock lock(mutex_);
  if (job_ && ServedJob::run_of(job_->definition()) != ServedJob::run_of(definition)) {
    // Workers of the previous run are still leaving, or the previous run lasts as long as the server.
    if (job_->members().lasts() || !job_->members().is_empty()) return Joined();
    job_.reset();
  }
  if (!job_) {
    TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<ServedJob> made, ServedJob::make(definition, keep_, offload_));
    if (head.second < 0 && !made->has_come_back() && made->bytes() > 0)
      return make_error(
          ExitCode::kUnavailable,
          "this server has nothing of the run any more. [T1001] hint: start the server again with its --state "
          "folder, or go on from a checkpoint");
    job_ = std::move(made);
    log_info("parameter server " + listener_.address + (job_->has_come_back() ? ": a run goes on" : ": a run begins") +
             "; its shards have " + std::to_string(job_->bytes()) + " bytes");
  }
  if (job_->definition() != definition)
    return make_error(
        ExitCode::kConfig,
        "another worker of this run has other shards here. [T0962] hint: all ranks need the same model, strategy "
        "and TESSERA_SERVERS, in the same order");
  TESSERA_ASSIGN_OR_RETURN(const auto place, job_->join(static_cast<int>(head.first), /*returns=*/head.second < 0));
  return place ? Joined{job_, *place} : Joined();
}

bool ParameterServer::is_idle() const {
  const MutexLock lock(mutex_);
  return !job_ || job_->members().is_empty();
}

bool ParameterServer::may_end() const {
  const MutexLock lock(mutex_);
  if (job_ && !job_->members().is_empty()) return false;
  const bool may_have_come_back = keep_ && (!job_ || job_->has_come_back());
  return !may_have_come_back || ServerLink::Clock::now() - since_ > ServedJob::kForReturns;
}

void ParameterServer::drop_if_empty(const std::shared_ptr<ServedJob>& job) {
  const MutexLock lock(mutex_);
  if (job_ == job && !job->members().lasts() && job->members().is_empty()) job_.reset();
}

void ParameterServer::serve(Connection& connection) {
  ServerLink& link = connection.link;
  if (!hear_secret(connection).ok()) return;
  std::shared_ptr<ServedJob> job;
  JobMembers::Place place;
  std::int64_t life = 0;
  while (!job) {
    const auto head = link.receive_head(std::nullopt);
    if (!head.ok()) return;
    life = std::abs(std::max(head->second, -std::numeric_limits<std::int64_t>::max()));
    try {
      auto joined = join(*head, connection);
      if (!joined.ok()) {
        link.refuse(joined.status(), kStandstill).IgnoreError();
        return;
      }
      job = joined->job;
      place = joined->place;
    } catch (const std::exception& error) {  // there is no memory for the shards
      link.refuse(ExitCode::kOsResource, error.what(), kStandstill).IgnoreError();
      return;
    }
    const MessageHead answer{.kind = job ? MessageKind::kDone : MessageKind::kBusy,
                             .shard = job && job->is_kept() ? 1U : 0U,
                             .first = place.number,
                             .turn = place.gives_values ? 1 : MessageHead::kNoTurn,
                             .clock = job ? job->life() : 0};
    if (!link.send(answer, {}, kStandstill).ok()) break;
  }
  if (!job) return;
  const int rank = place.number;
  const auto is_gone = [&] { return is_ending_.load() || link.is_closed(); };
  absl::Status status;
  try {
    ServedJob::Worker worker(*job, rank, life, is_gone);
    while (status.ok()) {
      const auto head = link.receive_head(std::nullopt);
      status = head.ok() ? worker.answer(*head, link) : head.status();
    }
  } catch (const std::exception& error) {
    status = make_error(ExitCode::kInternal, error.what());
  }
  if (is_ending_) return;  // workers keep their numbers for a server that comes back
  // A worker that ends closes its connection, whether it has made all steps or not. Its launcher reports the reason.
  log_info("parameter server " + listener_.address + ": rank " + std::to_string(rank) + " has gone" +
           (link.is_closed() ? "" : " (" + message_of(status) + ")"));
  job->leave(rank);
  drop_if_empty(job);
}

}  // namespace tessera
