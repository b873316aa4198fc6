#include "runtime/comm/thread_transport.h"

#include <algorithm>
#include <utility>

#include "runtime/comm/composed_groups.h"
#include "runtime/comm/meeting.h"
#include "runtime/comm/plain_buffer.h"
#include "runtime/comm/shared_memory_collectives.h"

namespace tessera {

/// Value-initialised, so all zero: the state before the first call.
class ThreadGroupMemory {
 public:
  static constexpr std::size_t kMailboxBytes = 16 << 10;

  explicit ThreadGroupMemory(const Group& group)
      : world_ranks(group.world_ranks),
        blocks(std::make_unique<RankBlock[]>(group.size())),
        mailboxes(group.size()) {}

  struct alignas(128) Mailboxes {
    std::byte bytes[2][kMailboxBytes];
  };
  const std::vector<int> world_ranks;
  GroupBlock group{};
  const std::unique_ptr<RankBlock[]> blocks;
  std::vector<Mailboxes> mailboxes;
};

namespace {

/// One address space: every pointer is its own location.
class ThreadSpace : public SharedSpace {
 public:
  explicit ThreadSpace(std::shared_ptr<ThreadGroupMemory> memory) : memory_(std::move(memory)) {}

  GroupBlock& group_block() override { return memory_->group; }
  RankBlock& rank_block(int rank) override { return memory_->blocks[rank]; }
  std::byte* mailbox(int rank, int parity) override { return memory_->mailboxes[rank].bytes[parity]; }
  std::size_t mailbox_bytes() const override { return ThreadGroupMemory::kMailboxBytes; }

  Location locate(const void* data, std::size_t) const override {
    return {1, reinterpret_cast<std::uintptr_t>(data)};
  }
  const std::byte* view(int, const Location& location) const override {
    return reinterpret_cast<const std::byte*>(location.offset);
  }

  // A thread does not vanish: run_ranks marks those that end.
  bool alive(int) const override { return true; }
  bool between_processes() const override { return false; }

  class PlainAllocation : public Allocation {
   public:
    explicit PlainAllocation(std::size_t bytes) : bytes_(bytes) {}
    Location publish() override { return {}; }
    absl::StatusOr<std::unique_ptr<CommBuffer>> open(std::span<const Location>) override {
      return std::unique_ptr<CommBuffer>(std::make_unique<PlainBuffer>(bytes_));
    }

   private:
    const std::size_t bytes_;
  };
  absl::StatusOr<std::unique_ptr<Allocation>> allocate(std::size_t bytes) override {
    return std::unique_ptr<Allocation>(std::make_unique<PlainAllocation>(bytes));
  }

 private:
  const std::shared_ptr<ThreadGroupMemory> memory_;
};

void end_member(ThreadGroupMemory& memory, int member, const absl::Status& reason) {
  if (reason.ok()) return mark_left(memory.group, memory.blocks[member], false);
  mark_failed(memory.group, memory.blocks[member], reason, false);
}

}  // namespace

ThreadRun::ThreadRun(const ThreadRanks& options) : options_(options) {}
ThreadRun::~ThreadRun() = default;

std::shared_ptr<ThreadGroupMemory> ThreadRun::memory_of(const Group& group) {
  std::lock_guard lock(mutex_);
  auto& memory = groups_[group.key()];
  if (memory) return memory;
  memory = std::make_shared<ThreadGroupMemory>(group);
  for (int member = 0; member < group.size(); ++member)
    if (auto it = ended_.find(group.world_rank(member)); it != ended_.end())
      end_member(*memory, member, it->second);
  return memory;
}

absl::StatusOr<std::shared_ptr<Collectives>> ThreadRun::join(const Group& group) {
  auto space = std::make_unique<ThreadSpace>(memory_of(group));
  return std::shared_ptr<Collectives>(
      std::make_shared<SharedMemoryCollectives>("thread", group, std::move(space)));
}

void ThreadRun::end(int world_rank, const absl::Status& reason) {
  std::lock_guard lock(mutex_);
  ended_[world_rank] = reason;
  for (auto& [key, memory] : groups_) {
    const auto& ranks = memory->world_ranks;
    const auto it = std::find(ranks.begin(), ranks.end(), world_rank);
    if (it != ranks.end()) end_member(*memory, static_cast<int>(it - ranks.begin()), reason);
  }
}

std::shared_ptr<GroupFactory> thread_group_factory(std::shared_ptr<ThreadRun> run, const Topology& topology) {
  GroupDefaults defaults;
  defaults.rank = topology.rank;
  defaults.world_size = topology.world_size;
  defaults.ranks_per_host = topology.local_world_size;
  defaults.timeout_s = run->options().timeout_s;
  const auto join = [run](const Group& group) { return run->join(group); };
  return composed_group_factory(defaults, join, join);
}

}  // namespace tessera
