#include "emulated_gpu.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/device/accelerator.h"
#include "runtime/comm/cuda_host/cuda_host_collectives.h"
#include "runtime/comm/device/queued_collectives.h"
#include "runtime/comm/shared/run_ranks.h"
#include "sharding/host_view.h"
#include "tests/support/stand_ins/emulated_peer_device.h"
#include "tests/support/stand_ins/late_backend.h"

namespace tessera::testing {
namespace {

/// Collectives that start a call only when it is waited for. All ranks wait in the same order, so all ranks start calls
/// in the same order.
class LateCollectives : public Collectives {
 public:
  explicit LateCollectives(std::shared_ptr<Collectives> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  std::string transport() const override { return group_->transport(); }
  TransportKind kind() const override { return group_->kind(); }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override { return group_->allocate(bytes); }
  void abort(const absl::Status& reason) override { group_->abort(reason); }
  absl::Status status() const override { return group_->status(); }

  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return later(
        [this, name = std::string(label), data, bytes, root] { return group_->broadcast(name, data, bytes, root); });
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    return later([this, name = std::string(label), input, output, bytes] {
      return group_->all_to_all(name, input, output, bytes);
    });
  }
  Work barrier(std::string_view label) override {
    return later([this, name = std::string(label)] { return group_->barrier(name); });
  }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    return later([this, name = std::string(call.label), call] {
      return group_->all_gather(name, call.shard, call.full, call.bytes_per_rank, call.options);
    });
  }
  Work do_reduce(const ReduceCall& call) override {
    EXPECT_EQ(call.options.visitor, nullptr) << "what is queued cannot be seen";
    return later([this, name = std::string(call.label), call] {
      ReduceCall plain = call;
      plain.label = name;
      plain.options = {};
      return group_->reduce(plain);
    });
  }

 private:
  struct Late : Work::State {
    explicit Late(std::function<Work()> start) : start_(std::move(start)) {}
    absl::Status wait() override { return start_().wait(); }
    const std::function<Work()> start_;
  };
  static Work later(std::function<Work()> start) { return Work(std::make_unique<Late>(std::move(start))); }

  const std::shared_ptr<Collectives> group_;
};

/// Wraps each group of more than one rank with `wrap`, except for groups that use the hosts' memory.
class WrappedGroups : public GroupFactory {
 public:
  using Made = absl::StatusOr<std::shared_ptr<Collectives>>;
  using Wrap =
      std::function<Made(const std::string& name, const std::vector<int>& ranks, std::shared_ptr<Collectives>)>;

  WrappedGroups(std::shared_ptr<GroupFactory> groups, Wrap wrap) : groups_(std::move(groups)), wrap_(std::move(wrap)) {}
  Made make(const std::string& name, const std::vector<int>& ranks, GroupUse use) override {
    Made group = groups_->make(name, ranks, use);
    if (!group.ok() || ranks.size() == 1) return group;
    if (use == GroupUse::kOnHost || use == GroupUse::kCommonMemory) return group;
    return wrap_(name, ranks, *std::move(group));
  }

 private:
  const std::shared_ptr<GroupFactory> groups_;
  const Wrap wrap_;
};

ThreadRanks wrapped(ThreadRanks ranks, const WrappedGroups::Wrap& wrap) {
  ranks.wrap_groups = [wrap, before = ranks.wrap_groups](std::shared_ptr<GroupFactory> groups) {
    return std::make_shared<WrappedGroups>(before ? before(std::move(groups)) : std::move(groups), wrap);
  };
  return ranks;
}

Group group_of(const std::string& name, int rank, const std::vector<int>& world_ranks, int world_size,
               double timeout_s) {
  return {.name = name, .rank = rank, .world_ranks = world_ranks, .world_size = world_size, .timeout_s = timeout_s};
}

}  // namespace

EmulatedGpus::EmulatedGpus(CopiesRead read) {
  set_accelerator_of_host([read] {
    Accelerator accelerator = queued_accelerator(c10::Device(c10::kCPU), emulated_kernels(read));
    accelerator.allocated = [] { return AllocatedBytes{100 << 20, 130 << 20}; };
    accelerator.forget_peak = [] {};
    return accelerator;
  });
  let_host_memory_be_a_devices(&is_pinned_memory);
}

EmulatedGpus::~EmulatedGpus() {
  set_accelerator_of_host(nullptr);
  let_host_memory_be_a_devices(nullptr);
}

ThreadRanks late(ThreadRanks ranks) {
  return wrapped(std::move(ranks), [](const std::string&, const std::vector<int>&, std::shared_ptr<Collectives> group) {
    return std::shared_ptr<Collectives>(std::make_shared<LateCollectives>(std::move(group)));
  });
}

ThreadRanks over_backend(ThreadRanks ranks, SeesBackend made) {
  const int world_size = ranks.ranks;
  const double timeout_s = ranks.timeout_s;
  const std::shared_ptr<KeyValueStore> store = memory_store();
  std::vector<std::shared_ptr<QueuedGroups>> groups(static_cast<std::size_t>(world_size));
  for (auto& of_rank : groups) of_rank = std::make_shared<QueuedGroups>();
  return wrapped(std::move(ranks), [=](const std::string& name, const std::vector<int>& world_ranks,
                                       std::shared_ptr<Collectives> moves) {
    const int rank = moves->rank();
    auto backend = c10::make_intrusive<LateBackend>(std::move(moves));
    if (made) made(name, *backend);
    QueuedBackend queued{
        .backend = std::move(backend),
        .device = c10::Device(c10::kCPU),
        .groups = groups[static_cast<std::size_t>(world_ranks[static_cast<std::size_t>(rank)])],
        .allocate = [](std::size_t bytes) { return DeviceBuffer::allocate(bytes, c10::Device(c10::kCPU)); }};
    return queued_collectives(group_of(name, rank, world_ranks, world_size, timeout_s), std::move(queued), store);
  });
}

ThreadRanks on_one_gpu(ThreadRanks ranks) {
  const int world_size = ranks.ranks;
  return wrapped(std::move(ranks), [world_size](const std::string& name, const std::vector<int>& world_ranks,
                                                std::shared_ptr<Collectives> host) {
    const Group group = group_of(name, host->rank(), world_ranks, world_size, 60);
    return cuda_host_collectives(group, std::move(host), std::make_unique<EmulatedPeerDevice>());
  });
}

}  // namespace tessera::testing
