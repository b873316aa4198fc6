#include "runtime/comm/shared/host_transport.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/meet_in_store.h"
#include "runtime/comm/process_handle.h"
#include "runtime/comm/shared/memory_segment.h"
#include "runtime/comm/shared/segment_table.h"
#include "runtime/comm/shared/shared_memory_collectives.h"

// The `host` transport. The first rank makes the control segment and writes an Invitation (its pid and descriptor) to
// the store. The other ranks map the segment. Every rank then writes its own pid to the store, as a sign that it has
// mapped the segment (Rendezvous). The ranks do not need the store after that: later segments are announced in the
// control segment. HostSpace finds control blocks, mailboxes and buffers in these segments; SharedMemoryCollectives
// does the rest.

namespace tessera {
namespace {

constexpr std::size_t kPage = 4096;

// Returns `bytes`, rounded up to whole pages. The result is at least one page, since a mapping cannot be empty.
std::size_t in_pages(std::size_t bytes) { return (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage; }

/// Offsets in the control segment: group block, rank blocks, mailboxes. A mailbox has 512 KiB, or more if there are
/// more than 512 ranks. It is small enough to be still in cache when peers read it (MailboxWay), and large enough that
/// its barrier costs little. It always has room for one piece of a SumVisitor for each rank.
struct ControlLayout {
  explicit ControlLayout(int ranks)
      : rank_blocks(in_pages(sizeof(GroupBlock))),
        mailboxes(rank_blocks + in_pages(ranks * sizeof(RankBlock))),
        mailbox_bytes(std::max<std::size_t>(512 << 10, in_pages(ranks * SumVisitor::kAlignment * sizeof(float)))),
        bytes(mailboxes + 2 * ranks * mailbox_bytes) {}
  std::size_t rank_blocks, mailboxes, mailbox_bytes, bytes;
};

class HostBuffer : public CommBuffer {
 public:
  HostBuffer(std::shared_ptr<SegmentTable> table, std::uint64_t id, std::size_t bytes)
      : table_(std::move(table)), id_(id), bytes_(bytes), data_(table_->own_part(id)) {}
  ~HostBuffer() override { table_->remove(id_); }
  std::byte* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  const std::shared_ptr<SegmentTable> table_;
  const std::uint64_t id_;
  const std::size_t bytes_;
  std::byte* const data_;
};

class HostSpace : public SharedSpace {
 public:
  HostSpace(const Group& group, MemorySegment control)
      : rank_(group.rank),
        layout_(group.size()),
        control_(std::move(control)),
        table_(std::make_shared<SegmentTable>(group.rank)),
        peers_(group.size()) {}

  GroupBlock& group_block() override { return *reinterpret_cast<GroupBlock*>(control_.data()); }
  RankBlock& rank_block(int rank) override {
    return reinterpret_cast<RankBlock*>(control_.data() + layout_.rank_blocks)[rank];
  }
  std::byte* mailbox(int rank, int parity) override {
    return control_.data() + layout_.mailboxes + (2 * rank + parity) * layout_.mailbox_bytes;
  }
  std::size_t mailbox_bytes() const override { return layout_.mailbox_bytes; }

  Location locate(const void* data, std::size_t bytes) const override { return table_->locate(data, bytes); }
  std::byte* view(int peer, const Location& location) const override { return table_->view(peer, location); }
  bool alive(int peer) const override { return peer == rank_ || peers_[peer].alive(); }
  bool between_processes() const override { return true; }
  absl::StatusOr<std::unique_ptr<Allocation>> allocate(std::size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Allocation>> allocate_common(std::size_t bytes) override;

  MemorySegment& control() { return control_; }
  void watch(int peer, pid_t pid) { peers_[peer] = ProcessHandle(pid); }

 private:
  class SegmentAllocation;
  class HostAllocation;
  class CommonAllocation;

  absl::StatusOr<MemorySegment> open(int peer, const Location& offer, std::size_t bytes) {
    const auto pid = static_cast<pid_t>(rank_block(peer).process.load());
    return MemorySegment::open(pid, static_cast<int>(offer.offset), bytes, true);
  }

  const int rank_;
  const ControlLayout layout_;
  MemorySegment control_;
  const std::shared_ptr<SegmentTable> table_;
  std::vector<ProcessHandle> peers_;
  std::uint64_t allocations_ = 0;
};

// An offer is the number of a segment's file descriptor, which stays open as long as the offer is valid. The peer's
// RankBlock says which process owns the descriptor. A rank without a segment offers -1.
class HostSpace::SegmentAllocation : public Allocation {
 public:
  SegmentAllocation(HostSpace& space, std::uint64_t id, MemorySegment own, std::size_t bytes)
      : space_(space), id_(id), own_(std::move(own)), fd_(own_.release_fd()), bytes_(bytes) {}
  ~SegmentAllocation() override {
    if (fd_ >= 0) close(fd_);
  }

  Location publish() override { return {id_, static_cast<std::uint64_t>(fd_)}; }

 protected:
  std::unique_ptr<CommBuffer> keep(std::vector<MemorySegment> parts) {
    space_.table_->add(id_, std::move(parts));
    return std::make_unique<HostBuffer>(space_.table_, id_, bytes_);
  }

  HostSpace& space_;
  const std::uint64_t id_;
  MemorySegment own_;
  const int fd_;
  const std::size_t bytes_;
};

// Memory for which each rank has a segment of its own.
class HostSpace::HostAllocation : public SegmentAllocation {
 public:
  using SegmentAllocation::SegmentAllocation;

  absl::StatusOr<std::unique_ptr<CommBuffer>> open(std::span<const Location> offers) override {
    std::vector<MemorySegment> parts(offers.size());
    for (std::size_t q = 0; q < offers.size(); ++q) {
      if (static_cast<int>(q) == space_.rank_) continue;
      TESSERA_ASSIGN_OR_RETURN(parts[q], space_.open(static_cast<int>(q), offers[q], own_.bytes()));
    }
    parts[space_.rank_] = std::move(own_);
    return keep(std::move(parts));
  }
};

absl::StatusOr<std::unique_ptr<SharedSpace::Allocation>> HostSpace::allocate(std::size_t bytes) {
  const std::uint64_t id = ++allocations_;
  TESSERA_ASSIGN_OR_RETURN(auto own, MemorySegment::create("tessera.buffer", in_pages(bytes), true));
  return std::unique_ptr<Allocation>(std::make_unique<HostAllocation>(*this, id, std::move(own), bytes));
}

// The first rank's segment, which all ranks map.
class HostSpace::CommonAllocation : public SegmentAllocation {
 public:
  using SegmentAllocation::SegmentAllocation;

  absl::StatusOr<std::unique_ptr<CommBuffer>> open(std::span<const Location> offers) override {
    if (space_.rank_ != 0) {
      TESSERA_ASSIGN_OR_RETURN(own_, space_.open(0, offers[0], in_pages(bytes_)));
    }
    std::vector<MemorySegment> parts;
    parts.push_back(std::move(own_));
    return keep(std::move(parts));
  }
};

absl::StatusOr<std::unique_ptr<SharedSpace::Allocation>> HostSpace::allocate_common(std::size_t bytes) {
  const std::uint64_t id = ++allocations_ | Location::kCommon;
  MemorySegment own;
  if (rank_ == 0) {
    TESSERA_ASSIGN_OR_RETURN(own, MemorySegment::create("tessera.common", in_pages(bytes), true));
  }
  return std::unique_ptr<Allocation>(std::make_unique<CommonAllocation>(*this, id, std::move(own), bytes));
}

// --- Rendezvous ---

/// The first rank's message to the other ranks about the control segment.
struct Invitation {
  pid_t pid = 0;
  int fd = -1;
  std::uint64_t token = 0;

  std::string to_text() const { return std::to_string(pid) + " " + std::to_string(fd) + " " + std::to_string(token); }
  static Invitation from_text(const std::string& text) {
    Invitation invitation;
    std::istringstream(text) >> invitation.pid >> invitation.fd >> invitation.token;
    return invitation;
  }
};

class Rendezvous {
 public:
  Rendezvous(const Group& group, KeyValueStore& store)
      : group_(group),
        store_(store),
        key_("host/" + group.key() + "/"),
        deadline_(Clock::now() +
                  std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(group.init_timeout_s))) {}

  absl::StatusOr<MemorySegment> control_segment() {
    const std::size_t bytes = ControlLayout(group_.size()).bytes;
    if (group_.rank == 0) return invite(bytes);
    auto text = get_from_others(store_, key_ + "control", time_left(), member(0));
    if (!text.ok()) return is_over() ? missing_error({0}) : store_error(text.status());
    return accept(Invitation::from_text(*text), bytes);
  }

  /// Tells the peers that this rank has mapped the control segment, and learns their process ids.
  absl::StatusOr<std::vector<pid_t>> process_ids() {
    TESSERA_RETURN_IF_ERROR(store_.set(key_ + std::to_string(group_.rank), std::to_string(getpid())));
    std::vector<pid_t> pids(group_.size());
    std::vector<int> missing;
    for (int q = 0; q < group_.size(); ++q) {
      auto pid = get_from_others(store_, key_ + std::to_string(q), time_left(), member(q));
      if (!pid.ok() && !is_over()) return store_error(pid.status());
      if (!pid.ok())
        missing.push_back(q);
      else
        pids[q] = static_cast<pid_t>(std::stol(*pid));
    }
    if (!missing.empty()) return missing_error(missing);
    return pids;
  }

 private:
  using Clock = std::chrono::steady_clock;

  absl::StatusOr<MemorySegment> invite(std::size_t bytes) {
    TESSERA_ASSIGN_OR_RETURN(auto control, MemorySegment::create("tessera.control", bytes, false));
    std::random_device random;
    Invitation invitation{getpid(), control.fd(), (std::uint64_t{random()} << 32) | random()};
    reinterpret_cast<GroupBlock*>(control.data())->token = invitation.token;
    TESSERA_RETURN_IF_ERROR(store_.set(key_ + "control", invitation.to_text()));
    return control;
  }

  absl::StatusOr<MemorySegment> accept(const Invitation& invitation, std::size_t bytes) const {
    TESSERA_ASSIGN_OR_RETURN(auto control, MemorySegment::open(invitation.pid, invitation.fd, bytes, false));
    if (reinterpret_cast<GroupBlock*>(control.data())->token == invitation.token) return control;
    return make_error(
        ExitCode::kUnavailable,
        group_.self() + ": descriptor " + std::to_string(invitation.fd) + " of process " +
            std::to_string(invitation.pid) + " is not the control segment of " + group_.key() +
            ". [T0484] hint: start the ranks of a host in one PID namespace, or take comm.transport \"gloo\"");
  }

  /// Returns the world rank of a member of the group.
  std::span<const int> member(int q) const {
    return std::span(group_.world_ranks).subspan(static_cast<std::size_t>(q), 1);
  }

  std::chrono::milliseconds time_left() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  }

  /// Returns whether the time limit has passed. The exit code of an error does not show this: a store that has ended
  /// fails at once with the same code.
  bool is_over() const { return Clock::now() >= deadline_; }

  absl::Status store_error(const absl::Status& status) const {
    return make_error(exit_code_of(status), group_.self() + ": group " + group_.key() + ": " + message_of(status));
  }

  absl::Status missing_error(const std::vector<int>& missing) const {
    std::string text = group_.self() + ": group " + group_.key() + " still misses";
    for (std::size_t i = 0; i < missing.size(); ++i) text += (i ? ", " : " ") + group_.who(missing[i]);
    std::ostringstream seconds;
    seconds << group_.init_timeout_s;
    return make_error(ExitCode::kPeerLost,
                      text + " after " + seconds.str() +
                          " s (comm.init_timeout_s). [T0485] hint: those ranks have started and are elsewhere: all "
                          "ranks must make the same groups, so the same Engines, in the same order");
  }

  const Group& group_;
  KeyValueStore& store_;
  const std::string key_;
  const Clock::time_point deadline_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Collectives>> host_collectives(const Group& group, KeyValueStore& store) {
  Rendezvous rendezvous(group, store);
  TESSERA_ASSIGN_OR_RETURN(auto control, rendezvous.control_segment());
  auto space = std::make_unique<HostSpace>(group, std::move(control));
  space->rank_block(group.rank).process = getpid();
  TESSERA_ASSIGN_OR_RETURN(const auto pids, rendezvous.process_ids());
  space->control().close_fd();  // all ranks have mapped the segment
  for (int q = 0; q < group.size(); ++q)
    if (q != group.rank) space->watch(q, pids[q]);
  return std::shared_ptr<Collectives>(
      std::make_shared<SharedMemoryCollectives>(TransportKind::kHost, group, std::move(space)));
}

}  // namespace tessera
