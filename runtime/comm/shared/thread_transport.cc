#include "runtime/comm/shared/thread_transport.h"

#include <algorithm>
#include <utility>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/compose/background.h"
#include "runtime/comm/compose/composed_groups.h"
#include "runtime/comm/local/plain_buffer.h"
#include "runtime/comm/shared/meeting.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/comm/shared/shared_memory_collectives.h"

namespace tessera {

/// The memory of a group of threads. It is value-initialised, so all its bytes are zero, which is the state before the
/// first call.
class ThreadGroupMemory {
 public:
  static constexpr std::size_t kMailboxBytes = 16 << 10;

  explicit ThreadGroupMemory(const Group& group)
      : world_ranks(group.world_ranks), blocks(std::make_unique<RankBlock[]>(group.size())), mailboxes(group.size()) {}

  struct alignas(128) Mailboxes {
    std::byte bytes[2][kMailboxBytes];
  };
  const std::vector<int> world_ranks;
  GroupBlock group{};
  const std::unique_ptr<RankBlock[]> blocks;
  std::vector<Mailboxes> mailboxes;
};

namespace {

/// The addresses of one rank's common memory. It is thread-safe, because a CommBuffer may be freed on any thread.
class CommonRanges {
 public:
  void add(const PlainBuffer& buffer) {
    const MutexLock lock(mutex_);
    ends_[buffer.data()] = buffer.data() + buffer.bytes();
  }
  void remove(const PlainBuffer& buffer) {
    const MutexLock lock(mutex_);
    ends_.erase(buffer.data());
  }
  bool contain(const std::byte* data, std::size_t bytes) const {
    const MutexLock lock(mutex_);
    auto it = ends_.upper_bound(data);
    return it != ends_.begin() && data < (--it)->second && data + bytes <= it->second;
  }

 private:
  mutable Mutex mutex_;
  std::map<const std::byte*, const std::byte*> ends_ ABSL_GUARDED_BY(mutex_);  // key: begin
};

/// One rank's share in a buffer that all ranks have together.
class SharedPlainBuffer : public CommBuffer {
 public:
  SharedPlainBuffer(std::shared_ptr<PlainBuffer> buffer, std::shared_ptr<CommonRanges> ranges)
      : buffer_(std::move(buffer)), ranges_(std::move(ranges)) {
    ranges_->add(*buffer_);
  }
  ~SharedPlainBuffer() override { ranges_->remove(*buffer_); }
  std::byte* data() const override { return buffer_->data(); }
  std::size_t bytes() const override { return buffer_->bytes(); }

 private:
  const std::shared_ptr<PlainBuffer> buffer_;
  const std::shared_ptr<CommonRanges> ranges_;
};

/// The SharedSpace of threads, which have one address space: every pointer is its own location.
class ThreadSpace : public SharedSpace {
 public:
  ThreadSpace(std::shared_ptr<ThreadGroupMemory> memory, int rank) : memory_(std::move(memory)), rank_(rank) {}

  GroupBlock& group_block() override { return memory_->group; }
  RankBlock& rank_block(int rank) override { return memory_->blocks[rank]; }
  std::byte* mailbox(int rank, int parity) override { return memory_->mailboxes[rank].bytes[parity]; }
  std::size_t mailbox_bytes() const override { return ThreadGroupMemory::kMailboxBytes; }

  Location locate(const void* data, std::size_t bytes) const override {
    const bool common = common_->contain(static_cast<const std::byte*>(data), bytes);
    return {1 | (common ? Location::kCommon : 0), reinterpret_cast<std::uintptr_t>(data)};
  }
  std::byte* view(int, const Location& location) const override {
    return reinterpret_cast<std::byte*>(location.offset);
  }

  // A thread does not vanish: run_ranks marks threads that end.
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

  /// The first rank offers the address of its shared_ptr to the buffer. The other ranks copy this pointer.
  class CommonAllocation : public Allocation {
   public:
    CommonAllocation(std::shared_ptr<PlainBuffer> own, std::shared_ptr<CommonRanges> ranges)
        : own_(std::move(own)), ranges_(std::move(ranges)) {}
    Location publish() override { return {1, reinterpret_cast<std::uintptr_t>(&own_)}; }
    absl::StatusOr<std::unique_ptr<CommBuffer>> open(std::span<const Location> offers) override {
      const auto* first = reinterpret_cast<const std::shared_ptr<PlainBuffer>*>(offers[0].offset);
      return std::unique_ptr<CommBuffer>(std::make_unique<SharedPlainBuffer>(*first, ranges_));
    }

   private:
    const std::shared_ptr<PlainBuffer> own_;
    const std::shared_ptr<CommonRanges> ranges_;
  };
  absl::StatusOr<std::unique_ptr<Allocation>> allocate_common(std::size_t bytes) override {
    auto own = rank_ == 0 ? std::make_shared<PlainBuffer>(bytes) : nullptr;
    return std::unique_ptr<Allocation>(std::make_unique<CommonAllocation>(std::move(own), common_));
  }

 private:
  const std::shared_ptr<ThreadGroupMemory> memory_;
  const int rank_;
  const std::shared_ptr<CommonRanges> common_ = std::make_shared<CommonRanges>();
};

void end_member(ThreadGroupMemory& memory, int member, const absl::Status& reason) {
  if (reason.ok()) return mark_left(memory.group, memory.blocks[member], false);
  mark_failed(memory.group, memory.blocks[member], reason, false);
}

}  // namespace

ThreadRun::ThreadRun(const ThreadRanks& options) : options_(options) {}
ThreadRun::~ThreadRun() = default;

std::shared_ptr<ThreadGroupMemory> ThreadRun::memory_of(const Group& group) {
  const MutexLock lock(mutex_);
  auto& memory = groups_[group.key()];
  if (memory) return memory;
  memory = std::make_shared<ThreadGroupMemory>(group);
  for (int member = 0; member < group.size(); ++member)
    if (auto it = ended_.find(group.world_rank(member)); it != ended_.end()) end_member(*memory, member, it->second);
  return memory;
}

absl::StatusOr<std::shared_ptr<Collectives>> ThreadRun::join(const Group& group) {
  auto space = std::make_unique<ThreadSpace>(memory_of(group), group.rank);
  return std::shared_ptr<Collectives>(
      std::make_shared<SharedMemoryCollectives>(TransportKind::kThread, group, std::move(space)));
}

void ThreadRun::end(int world_rank, const absl::Status& reason) {
  const MutexLock lock(mutex_);
  ended_[world_rank] = reason;
  for (auto& [key, memory] : groups_) {
    const auto& ranks = memory->world_ranks;
    const auto it = std::find(ranks.begin(), ranks.end(), world_rank);
    if (it != ranks.end()) end_member(*memory, static_cast<int>(it - ranks.begin()), reason);
  }
}

std::shared_ptr<GroupFactory> thread_group_factory(std::shared_ptr<ThreadRun> run, const Topology& topology) {
  GroupDefaults defaults;
  defaults.topology = topology;
  defaults.timeout_s = run->options().timeout_s;
  const auto join = [run = std::move(run)](const Group& group) { return run->join(group); };
  // The Engine sees a network between pretended hosts.
  const JoinGroup across = [join](const Group& group) -> absl::StatusOr<std::shared_ptr<Collectives>> {
    TESSERA_ASSIGN_OR_RETURN(auto joined, join(group));
    return working_in_background(std::move(joined));
  };
  return composed_group_factory(defaults, join, across);
}

}  // namespace tessera
