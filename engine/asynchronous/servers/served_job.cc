#include "engine/asynchronous/servers/served_job.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "engine/asynchronous/servers/served_definition.h"
#include "engine/step/rules/own_optimizer.h"
#include "offload/files/block_file.h"
#include "optim/master_assigner.h"
#include "optim/muon_optimizer.h"
#include "runtime/base/errno_hint.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_names.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {

// This file makes the shards of a run, keeps them on the disk, and answers the questions of workers.
//
// `make` reads a worker's definition (ServedDefinition), and takes memory for the groups (`place_all`). A thread writes
// shards that have changed (`keep_shard`), and a question that changes a shard is answered after `await_kept`. Each
// connection has a Worker, whose `answer` calls a `do_...` function for each kind of question. These functions compare
// the sizes in the head with those of the shard before they receive anything, and hold the group's mutex while they
// read or change the shard.

namespace {

constexpr std::chrono::milliseconds kBetweenTurns{200};

absl::Status broken(const std::string& part) {
  return make_error(ExitCode::kPeerLost, "a message does not fit the definition: " + part +
                                             ". [T0963] hint: run `tessera serve` of the workers' own version");
}

absl::Status strange_file(const std::string& folder) {
  return make_error(ExitCode::kCorruptData, "parameter server: a file of " + folder +
                                                " is none of this version. [T1003] hint: end the run, remove this "
                                                "folder, and go on from a checkpoint");
}

/// Returns memory for all shards, filled with zeros. If this memory is a mapped file, the system keeps the used bytes
/// in memory, and writes the other bytes to the file. For a server, a mapped file is better than records that one
/// thread reads and writes, since each worker's thread updates a different shard.
absl::StatusOr<Arena> memory_of_shards(std::int64_t bytes, const std::string& offload) {
  if (offload.empty() || bytes == 0) return Arena::plain("shards", bytes);
  constexpr std::int64_t kPage = 4096;
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<BlockFile> file,
                           BlockFile::create({.directory = offload,
                                              .bytes = (bytes + kPage - 1) / kPage * kPage,
                                              .who = "parameter server",
                                              .direct = false,
                                              .write_zeros = false}));
  const auto length = static_cast<std::size_t>(bytes);
  void* const memory = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd(), 0);
  if (memory == MAP_FAILED)
    return make_error(ExitCode::kOsResource,
                      "parameter server: a file in " + offload + " cannot be mapped: " + reason_of(errno));
  return Arena::given("shards", bytes,
                      {static_cast<std::byte*>(memory), [file, length](std::byte* first) { ::munmap(first, length); }});
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServedJob>> ServedJob::make(const std::string& definition,
                                                           const std::optional<KeepOptions>& keep,
                                                           const std::string& offload) {
  std::unique_ptr<ServedJob> made(new ServedJob());
  made->definition_ = definition;
  try {
    TESSERA_ASSIGN_OR_RETURN(ServedDefinition read,
                             read_definition(definition.substr(std::min(definition.size(), kRunName))));
    made->limit_ = read.limit;
    made->strategy_ = std::move(read.strategy);
    made->server_ = read.server;
    made->members_ = std::make_unique<JobMembers>(made->strategy_.sync.is_elastic() ? 0 : read.ranks, made->limit_);
    made->units_ = std::move(read.units);
    TESSERA_RETURN_IF_ERROR(made->place_all(offload));
    if (keep) TESSERA_RETURN_IF_ERROR(made->begin_keeping(*keep));
  } catch (const std::exception& error) {
    return make_error(ExitCode::kConfig, std::string("the definition of shards cannot be read: ") + error.what() +
                                             ". [T0965] hint: run `tessera serve` of the workers' own version");
  }
  return made;
}

absl::Status ServedJob::place_all(const std::string& offload) {
  const OptimizerConfig& optimizer = strategy_.optimizer;
  const bool is_muon = optimizer.type == OptimizerType::kMuon;
  const StateFormats of_elements = make_optimizer(optimizer, strategy_.ema, OwnRules{})->state_formats();
  const StateFormats of_matrices = is_muon ? MuonOptimizer(optimizer, strategy_.ema).state_formats()
                                           : MasterAssigner(optimizer, strategy_.ema).state_formats();
  const bool is_adaptive = strategy_.sync.asynchronous.delay_compensation.adaptive;
  std::int64_t bytes = 0;
  for (const auto& unit : units_) {
    Group& group = *groups_.emplace_back(std::make_unique<Group>());
    FlatGroup& flat = *unit->groups[0];
    group.flat = &flat;
    group.part = flat.optimizer_part;
    group.first = elements_;
    group.formats = flat.matrices.empty() ? of_elements : of_matrices;
    if (group.part.numel > 0) flat.of_tensors.part = {0, flat.tensor_states.numel()};
    elements_ += group.part.numel;
    largest_ = std::max(largest_, group.part.numel);
    const auto copies = static_cast<std::int64_t>(1 + group.formats.size() + (is_adaptive ? 1 : 0));
    bytes += 4 * (copies * group.part.numel + flat.of_tensors.part.numel);
    if (group.part.numel > 0) work_ = std::max(work_, work_where_it_lies(flat, {.is_muon = is_muon}, /*is_cut=*/false));
  }
  TESSERA_ASSIGN_OR_RETURN(memory_, memory_of_shards(bytes, offload));
  for (const auto& group : groups_) place(*group, is_adaptive);
  return absl::OkStatus();
}

void ServedJob::place(Group& group, bool is_adaptive) {
  FlatGroup& flat = *group.flat;
  const std::int64_t bytes = 4 * group.part.numel;
  flat.shard = memory_.take(bytes);
  if (is_adaptive) group.mean_squares = reinterpret_cast<float*>(memory_.take(bytes));
  for (std::size_t i = 0; i < group.formats.size(); ++i) flat.state[i].data = memory_.take(bytes);
  if (flat.of_tensors.part.numel > 0)
    flat.of_tensors.data = reinterpret_cast<float*>(memory_.take(4 * flat.of_tensors.part.numel));
  if (bytes > 0) {
    TieredState state;
    state.states = group.formats;
    flat.records = RecordLayout(group.part.numel, state);
    if (adapts_layers(strategy_.optimizer.type)) group.norms.emplace(flat);
  }
  const MutexLock lock(group.mutex);
  group.counts.resize(flat.parameters.size());
}

/// A worker that gives the first values tells each server when all values are written, and server 0 last. If the worker
/// ends before it has told server 0, the next worker gives all servers its own values.
bool ServedJob::has_begun(std::size_t group) {
  if (!members_->lasts()) return false;
  if (server_ == 0 || group >= groups_.size()) return true;
  const MutexLock lock(groups_[group]->mutex);
  return groups_[group]->version > 0;
}

std::int64_t ServedJob::tick(std::int64_t seen) {
  const MutexLock lock(mutex_);
  clock_ = std::max(clock_, seen) + 1;
  return clock_;
}

absl::Status ServedJob::await_turn(Group& group, std::int64_t turn, const std::function<bool()>& is_gone) const {
  const Clock::time_point deadline = Clock::now() + limit_;
  while (group.played < turn) {  // a pull after a rank's last turn has the number of all turns
    if (is_gone()) return worker_gone();
    if (Clock::now() > deadline)
      return make_error(
          ExitCode::kPeerLost,
          "timed out waiting for a turn of sync.play_order (comm.timeout_s sets the limit). [T0969] hint: a rank "
          "that has its turn before this one has ended, or runs another program");
    group.turned.wait_until(group.mutex, Clock::now() + kBetweenTurns);
  }
  return absl::OkStatus();
}

void ServedJob::end_turn(Group& group, std::int64_t turn) {
  if (turn < 0) return;
  ++group.played;
  group.turned.notify_all();
}

ServedJob::~ServedJob() {
  if (!keeping_) return;
  keeping_.reset();
  if (const absl::Status status = keep_members(); !status.ok()) log_error(message_of(status));
}

/// Reads the shards of this run that a server with the same number has kept. Then begins to keep this server's shards.
absl::Status ServedJob::begin_keeping(const KeepOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(kept_, KeptShards::open(options, server_, definition_));
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::byte> image, kept_->read(i));
    if (image.empty()) continue;
    Group& group = *groups_[i];
    const MutexLock lock(group.mutex);
    if (!read_image(group, image)) return strange_file(kept_->folder());
    has_come_back_ = true;
  }
  TESSERA_RETURN_IF_ERROR(restore_members());
  if (has_come_back_) members_->expect_back(std::min(kForReturns, limit_ / 2));  // a wait for workers ends after limit_
  keeping_ = std::make_unique<KeepingThread>(
      [this, image = std::vector<std::byte>()](bool is_last) mutable { return keep_shards(is_last, image); });
  return absl::OkStatus();
}

/// Server 0 has the data about workers that come and go. The other servers only need to know whether they have values,
/// and they have values if they have kept shards.
absl::Status ServedJob::restore_members() {
  if (!members_->is_elastic()) return absl::OkStatus();
  if (server_ != 0) return has_come_back_ ? members_->begin(/*number=*/0) : absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::byte> image, kept_->read(groups_.size()));
  if (image.empty()) return absl::OkStatus();
  std::vector<std::int64_t> numbers((image.size() - KeptShards::kHeadBytes) / sizeof(std::int64_t));
  std::memcpy(numbers.data(), image.data() + KeptShards::kHeadBytes, numbers.size() * sizeof(std::int64_t));
  if (!members_->restore(numbers)) return strange_file(kept_->folder());
  has_come_back_ = true;
  return absl::OkStatus();
}

absl::Status ServedJob::keep_members() {
  if (!kept_ || server_ != 0 || !members_->is_elastic()) return absl::OkStatus();
  const std::int64_t wanted = members_->changes();
  const MutexLock lock(members_mutex_);
  if (kept_changes_ >= wanted) return absl::OkStatus();  // another thread has already written these changes
  const auto [numbers, changes] = members_->image();
  std::vector<std::byte> image(KeptShards::kHeadBytes);
  const auto bytes = std::as_bytes(std::span(numbers));
  image.insert(image.end(), bytes.begin(), bytes.end());
  TESSERA_RETURN_IF_ERROR(kept_->write(groups_.size(), image));
  kept_changes_ = changes;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<JobMembers::Place>> ServedJob::join(int wanted, bool returns) {
  TESSERA_ASSIGN_OR_RETURN(const auto place, members_->join(wanted, returns));
  if (!place) return place;
  const absl::Status kept = keep_members();
  if (kept.ok()) return place;
  members_->leave(place->number);
  return kept;
}

void ServedJob::leave(int number) {
  members_->leave(number);
  if (const absl::Status status = keep_members(); !status.ok()) log_error(message_of(status));
}

absl::Status ServedJob::keep_shards(bool all, std::vector<std::byte>& image) {
  for (std::size_t i = 0; i < groups_.size(); ++i) TESSERA_RETURN_IF_ERROR(keep_shard(i, all, image));
  return absl::OkStatus();
}

absl::Status ServedJob::keep_shard(std::size_t index, bool all, std::vector<std::byte>& image) {
  Group& group = *groups_[index];
  std::int64_t changes = 0;
  {
    const MutexLock lock(group.mutex);
    const std::int64_t unwritten = group.changes - group.kept;
    if (unwritten <= kept_->lose() / 2 && group.wanted <= group.kept && !(all && unwritten > 0))
      return absl::OkStatus();
    changes = group.changes;
    write_image(group, image);
  }
  TESSERA_RETURN_IF_ERROR(kept_->write(index, image));
  const MutexLock lock(group.mutex);
  group.kept = changes;
  group.saved.notify_all();
  return absl::OkStatus();
}

absl::Status ServedJob::await_kept(Group& group, std::int64_t lose, const std::function<bool()>& is_gone) {
  if (!kept_) return absl::OkStatus();
  const std::int64_t own = group.changes;
  group.wanted = std::max(group.wanted, own - lose);
  if (own - group.kept > kept_->lose() / 2 || group.wanted > group.kept) keeping_->wake();
  while (own - group.kept > lose) {
    TESSERA_RETURN_IF_ERROR(keeping_->failure());
    if (is_gone()) return worker_gone();
    group.saved.wait_until(group.mutex, Clock::now() + kBetweenTurns);
  }
  return absl::OkStatus();
}

std::vector<std::span<std::byte>> ServedJob::data_of(const Group& group) const {
  const auto bytes = static_cast<std::size_t>(4 * group.part.numel);
  std::vector<std::span<std::byte>> data;
  data.emplace_back(group.flat->shard, bytes);
  for (std::size_t i = 0; i < group.formats.size(); ++i) data.emplace_back(group.flat->state[i].data, bytes);
  const TensorStateMemory& of_tensors = group.flat->of_tensors;
  if (of_tensors.part.numel > 0)
    data.push_back(std::as_writable_bytes(std::span(of_tensors.data, static_cast<std::size_t>(of_tensors.part.numel))));
  if (group.mean_squares != nullptr) data.emplace_back(reinterpret_cast<std::byte*>(group.mean_squares), bytes);
  return data;
}

/// The image consists of the version, the lengths of the lists `counts` and `last`, these lists, and the elements.
void ServedJob::write_image(const Group& group, std::vector<std::byte>& image) const {
  std::vector<std::int64_t> numbers = {group.version, static_cast<std::int64_t>(group.counts.size()),
                                       static_cast<std::int64_t>(group.last.size())};
  numbers.insert(numbers.end(), group.counts.begin(), group.counts.end());
  for (const LastPush& last : group.last) numbers.insert(numbers.end(), {last.life, last.step});
  image.assign(KeptShards::kHeadBytes, std::byte{0});
  const auto add = [&](std::span<const std::byte> bytes) { image.insert(image.end(), bytes.begin(), bytes.end()); };
  add(std::as_bytes(std::span(numbers)));
  for (const auto& data : data_of(group)) add(data);
}

bool ServedJob::read_image(Group& group, std::span<const std::byte> image) {
  std::span<const std::byte> rest = image.subspan(KeptShards::kHeadBytes);
  const auto take = [&](std::span<std::byte> into) {
    if (rest.size() < into.size()) return false;
    if (!into.empty()) std::memcpy(into.data(), rest.data(), into.size());
    rest = rest.subspan(into.size());
    return true;
  };
  std::array<std::int64_t, 3> numbers{};
  if (!take(std::as_writable_bytes(std::span(numbers)))) return false;
  const auto most = static_cast<std::int64_t>(rest.size() / sizeof(LastPush));
  if (numbers[1] != static_cast<std::int64_t>(group.counts.size()) || numbers[2] < 0 || numbers[2] > most) return false;
  group.version = group.first_version = numbers[0];
  group.last.resize(static_cast<std::size_t>(numbers[2]));
  if (!take(std::as_writable_bytes(std::span(group.counts))) || !take(std::as_writable_bytes(std::span(group.last))))
    return false;
  for (const auto& data : data_of(group))
    if (!take(data)) return false;
  return rest.empty();
}

ServedJob::Worker::Worker(ServedJob& job, int rank, std::int64_t life, std::function<bool()> is_gone)
    : job_(job),
      rank_(rank),
      life_(life),
      is_gone_(std::move(is_gone)),
      rates_(job.strategy_.optimizer),
      options_(job.strategy_.optimizer),
      rule_(job.strategy_, OwnRules{}, rates_),
      update_(job.strategy_.sync.asynchronous) {
  known_options_.assign(options_.all().begin(), options_.all().end());
  numbers_.resize(rates_.all().size() + known_options_.size());
  room_ = Arena::plain("what a worker sends", 2 * 4 * job.largest_);
  work_ = Arena::plain("whole matrices", 4 * job.work_);
  is_early_.resize(job.groups_.size());
}

absl::Status ServedJob::Worker::take(std::span<std::byte> bytes, ServerLink& link) {
  return link.receive(bytes, job_.limit_);
}

absl::Status ServedJob::Worker::answer(const MessageHead& head, ServerLink& link) {
  if (head.shard >= job_.groups_.size() && head.shard != 0) return broken("a group");
  switch (head.kind) {
    case MessageKind::kPull:
    case MessageKind::kCopy:
      return do_copies(head, link);
    case MessageKind::kPush:
    case MessageKind::kApply:
      return do_push(head, link);
    case MessageKind::kStage:
      return do_stage(head, link);
    case MessageKind::kReadVersions:
      return do_versions(head, link);
    case MessageKind::kNote:
      if (head.bytes != 0) return broken("a note");
      job_.members_->note(rank_, head.first, head.second);
      return absl::OkStatus();
    case MessageKind::kAwaitSlowest:
    case MessageKind::kAwaitRound:
      return do_wait(head, link);
    case MessageKind::kBegin:
    case MessageKind::kTake:
    case MessageKind::kEndResults:
    case MessageKind::kHold:
    case MessageKind::kRelease:
      return do_elastic(head, link);
    case MessageKind::kReadCounts:
    case MessageKind::kWriteCounts:
      if (head.kind == MessageKind::kWriteCounts && job_.has_begun(head.shard))
        return broken("it came after the start");
      return do_counts(head, link);
    case MessageKind::kWrite:
    case MessageKind::kWriteTensorStates:
      if (job_.has_begun(head.shard)) return broken("it came after the start");
      [[fallthrough]];
    case MessageKind::kReadStates:
    case MessageKind::kReadTensorStates:
      return do_range(head, link);
    default:
      return broken("its kind");
  }
}

/// Answers with the shard's values. They are copied while the mutex is held, and sent after it is released.
absl::Status ServedJob::Worker::do_copies(const MessageHead& head, ServerLink& link) {
  if (head.bytes != 0 || job_.groups_.empty()) return broken("a pull");
  Group& group = *job_.groups_[head.shard];
  const auto bytes = static_cast<std::size_t>(4 * group.part.numel);
  MessageHead reply;
  {
    const MutexLock lock(group.mutex);
    if (const absl::Status status = job_.await_turn(group, head.turn, is_gone_); !status.ok())
      return link.refuse(status, job_.limit_);
    std::memcpy(room_.data(), group.flat->shard, bytes);
    reply.first = group.version;
    reply.clock = head.kind == MessageKind::kPull ? job_.tick(head.clock) : head.clock;
    job_.end_turn(group, head.turn);
  }
  return link.send(reply, {room_.data(), bytes}, job_.limit_);
}

/// Receives gradients ahead of the push that uses them; that push may never come.
absl::Status ServedJob::Worker::do_stage(const MessageHead& head, ServerLink& link) {
  if (job_.groups_.empty()) return broken("gradients");
  const Group& group = *job_.groups_[head.shard];
  if (head.bytes == 0 || head.bytes != 4 * group.part.numel) return broken("gradients");
  if (early_.bytes() == 0) early_ = Arena::plain("gradients that come early", 4 * job_.elements_);
  TESSERA_RETURN_IF_ERROR(take({early_.data() + 4 * group.first, static_cast<std::size_t>(head.bytes)}, link));
  is_early_[head.shard] = 1;
  return absl::OkStatus();
}

absl::Status ServedJob::Worker::do_push(const MessageHead& head, ServerLink& link) {
  if (job_.groups_.empty()) return broken("a push");
  Group& group = *job_.groups_[head.shard];
  const auto part_bytes = static_cast<std::size_t>(4 * group.part.numel);
  const bool has_pulled = job_.strategy_.sync.asynchronous.delay_compensation.lambda != 0;
  const bool is_early = head.kind == MessageKind::kApply;
  PushedNumbers numbers;
  used_.resize(group.flat->parameters.size());
  const std::size_t wanted = sizeof numbers + numbers_.size() * sizeof(double) + used_.size() +
                             (has_pulled ? part_bytes : 0) + (is_early ? 0 : part_bytes);
  if (head.bytes != static_cast<std::int64_t>(wanted)) return broken("a push");
  if (is_early && std::exchange(is_early_[head.shard], char{0}) == 0) return broken("a push without gradients");
  std::byte* const gradients = is_early ? early_.data() + 4 * group.first : room_.data();
  std::byte* const pulled = room_.data() + 4 * job_.largest_;
  TESSERA_RETURN_IF_ERROR(take(std::as_writable_bytes(std::span<PushedNumbers, 1>(&numbers, 1)), link));
  TESSERA_RETURN_IF_ERROR(take(std::as_writable_bytes(std::span(numbers_)), link));
  TESSERA_RETURN_IF_ERROR(take(std::as_writable_bytes(std::span(used_)), link));
  if (!is_early) TESSERA_RETURN_IF_ERROR(take({gradients, part_bytes}, link));
  if (has_pulled) TESSERA_RETURN_IF_ERROR(take({pulled, part_bytes}, link));
  const std::span<const double> rates = std::span(numbers_).first(rates_.all().size());
  const std::span<const double> options = std::span(numbers_).subspan(rates.size());
  rates_.restore(rates);
  // An option that was not set is NaN. NaN is equal to no number, so the bytes are compared.
  if (std::memcmp(options.data(), known_options_.data(), options.size_bytes()) != 0) {
    known_options_.assign(options.begin(), options.end());
    options_.restore(options);
    rule_.follow(options_);
  }
  MessageHead reply;
  absl::Status status = job_.members_->begin_push(rank_, is_gone_);
  if (!status.ok()) return link.refuse(status, job_.limit_);
  {
    const MutexLock lock(group.mutex);
    status = job_.await_turn(group, head.turn, is_gone_);
    group.last.resize(std::max(group.last.size(), static_cast<std::size_t>(rank_) + 1));
    LastPush& last = group.last[static_cast<std::size_t>(rank_)];
    const bool is_repeated = life_ > 0 && last.life == life_ && head.second <= last.step;
    if (is_repeated) reply.first = group.version - 1;  // the push was applied before the connection broke
    if (status.ok() && !is_repeated) {
      const UpdateRates with{numbers.gradient_scale, numbers.clip_value, numbers.lr, numbers.is_first_of_run != 0};
      group.flat->gradient = reinterpret_cast<float*>(gradients);
      // A server that has come back may have a version of the shard that is older than the pulled version.
      const std::int64_t age = std::max<std::int64_t>(0, group.version - head.first);
      try {
        PushedShard pushed{{group.flat, 1}, group.counts.data()};
        if (group.mean_squares) pushed.mean_squares = {&group.mean_squares, 1};
        pushed.pulled = reinterpret_cast<const float*>(pulled);
        pushed.norms = group.norms ? &*group.norms : nullptr;
        pushed.work = {reinterpret_cast<float*>(work_.data()), static_cast<std::size_t>(job_.work_)};
        update_.apply(*group.flat, pushed, rule_, {with, used_}, age);
      } catch (const std::exception& error) {
        status = make_error(ExitCode::kInternal, error.what());
      }
      last = {life_, head.second};
      reply.first = group.version++;
      reply.clock = job_.tick(head.clock);
      job_.end_turn(group, head.turn);
      ++group.changes;
    }
    if (status.ok() && job_.kept_) status = job_.await_kept(group, job_.kept_->lose(), is_gone_);
  }
  job_.members_->end_push();
  return status.ok() ? link.send(reply, {}, job_.limit_) : link.refuse(status, job_.limit_);
}

absl::Status ServedJob::Worker::do_wait(const MessageHead& head, ServerLink& link) {
  if (head.bytes != 0) return broken("a wait");
  const bool is_round = head.kind == MessageKind::kAwaitRound;
  const auto has_come = [&](int q, const JobMembers::Member& member) {
    if (!is_round) return member.pushed >= head.first;
    return member.computed >= head.first && (q > rank_ || member.pushed >= head.first);
  };
  MessageHead reply;
  absl::Status status;
  if (!is_round) {
    const JobMembers::Begun begun = job_.members_->begin_step(rank_);
    reply.second = begun.counted;
    if (begun.has_rested) status = job_.keep_members();
  }
  if (status.ok()) status = job_.members_->await(has_come, rank_, is_gone_);
  return status.ok() ? link.send(reply, {}, job_.limit_) : link.refuse(status, job_.limit_);
}

/// Answers with the version that each shard had when this server came back.
absl::Status ServedJob::Worker::do_versions(const MessageHead& head, ServerLink& link) {
  if (head.bytes != 0) return broken("a question for versions");
  std::vector<std::int64_t> versions;
  for (const auto& group : job_.groups_) {
    const MutexLock lock(group->mutex);
    versions.push_back(group->first_version);
  }
  return link.send({}, std::as_bytes(std::span(versions)), job_.limit_);
}

/// Answers the questions that only workers of an elastic run ask.
absl::Status ServedJob::Worker::do_elastic(const MessageHead& head, ServerLink& link) {
  JobMembers& members = *job_.members_;
  if (head.bytes != 0 || !members.is_elastic()) return broken("what workers that come and go ask");
  MessageHead reply;
  absl::Status status;
  if (head.kind == MessageKind::kTake) {
    const auto dealt = members.deal(rank_, head.first, head.second, head.turn);
    status = dealt.status();
    if (dealt.ok()) {
      using Kind = JobMembers::Deal::Kind;
      if (dealt->kind == Kind::kAskAgain) reply.kind = MessageKind::kBusy;
      reply.first = dealt->kind == Kind::kOver       ? MessageHead::kOver
                    : dealt->kind == Kind::kOwnFirst ? MessageHead::kOwnFirst
                                                     : dealt->step;
      reply.second = dealt->finishes ? 1 : 0;
    }
  } else if (head.kind == MessageKind::kBegin) {
    status = members.begin(rank_);
  } else if (head.kind == MessageKind::kEndResults) {
    status = members.end_results(rank_);
  } else if (head.kind == MessageKind::kHold) {
    status = members.hold(rank_, is_gone_);
  } else {
    members.release(rank_);
  }
  if (status.ok()) status = job_.keep_members();
  return status.ok() ? link.send(reply, {}, job_.limit_) : link.refuse(status, job_.limit_);
}

absl::Status ServedJob::Worker::do_counts(const MessageHead& head, ServerLink& link) {
  if (job_.groups_.empty()) return broken("counts");
  Group& group = *job_.groups_[head.shard];
  std::vector<std::int64_t> counts(group.flat->parameters.size());
  const auto bytes = static_cast<std::int64_t>(counts.size() * sizeof(std::int64_t));
  const bool writes = head.kind == MessageKind::kWriteCounts;
  if (head.bytes != (writes ? bytes : 0)) return broken("counts");
  if (writes) TESSERA_RETURN_IF_ERROR(take(std::as_writable_bytes(std::span(counts)), link));
  absl::Status status;
  {
    const MutexLock lock(group.mutex);
    writes ? group.counts.swap(counts) : counts.assign(group.counts.begin(), group.counts.end());
    if (writes) ++group.changes;
    if (writes) status = job_.await_kept(group, /*lose=*/0, is_gone_);
  }
  if (!status.ok()) return link.refuse(status, job_.limit_);
  return link.send({}, writes ? std::span<const std::byte>() : std::as_bytes(std::span(counts)), job_.limit_);
}

/// Returns the memory of a run of elements: values and states, or states of whole tensors. Values are left out where
/// `has_values` is false.
std::vector<std::span<std::byte>> ServedJob::run_of(const Group& group, Extent run, bool is_of_tensors,
                                                    bool has_values) {
  const FlatGroup& flat = *group.flat;
  const auto length = static_cast<std::size_t>(4 * run.numel);
  if (is_of_tensors) return {{reinterpret_cast<std::byte*>(flat.of_tensors.data + run.offset), length}};
  const std::int64_t there = 4 * (run.offset - group.part.offset);
  std::vector<std::span<std::byte>> spans;
  if (has_values) spans.emplace_back(flat.shard + there, length);
  for (std::size_t i = 0; i < group.formats.size(); ++i) spans.emplace_back(flat.state[i].data + there, length);
  return spans;
}

/// Reads or writes a run of elements. No rank pushes during this call: either all ranks wait for each other before and
/// after it, or this is an elastic run, and the servers hold back the pushes of other workers.
absl::Status ServedJob::Worker::do_range(const MessageHead& head, ServerLink& link) {
  if (job_.groups_.empty()) return broken("a range");
  Group& group = *job_.groups_[head.shard];
  const bool writes = head.kind == MessageKind::kWrite || head.kind == MessageKind::kWriteTensorStates;
  const bool is_of_tensors =
      head.kind == MessageKind::kWriteTensorStates || head.kind == MessageKind::kReadTensorStates;
  const Extent whole = is_of_tensors ? group.flat->of_tensors.part : group.part;
  const bool is_inside = head.first >= whole.offset && head.second >= 0 && head.first <= whole.end() &&
                         head.second <= whole.end() - head.first;
  if (!is_inside) return broken("a range");
  const auto spans = run_of(group, {head.first, head.second}, is_of_tensors, /*has_values=*/writes);
  const std::int64_t bytes = 4 * head.second * static_cast<std::int64_t>(spans.size());
  if (head.bytes != (writes ? bytes : 0)) return broken("a range");
  const MutexLock lock(group.mutex);
  if (writes) {
    for (const auto& span : spans) TESSERA_RETURN_IF_ERROR(take(span, link));
    ++group.changes;
    const absl::Status status = job_.await_kept(group, /*lose=*/0, is_gone_);
    return status.ok() ? link.send(MessageHead{}, {}, job_.limit_) : link.refuse(status, job_.limit_);
  }
  const MessageHead reply{.bytes = bytes};
  TESSERA_RETURN_IF_ERROR(link.send(bytes_of(reply), job_.limit_, /*more=*/reply.bytes > 0));
  for (const auto& span : spans) TESSERA_RETURN_IF_ERROR(link.send(span, job_.limit_));
  return absl::OkStatus();
}

}  // namespace tessera
