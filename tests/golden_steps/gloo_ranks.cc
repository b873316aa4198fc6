#include "tests/golden_steps/gloo_ranks.h"

#include <ATen/Functions.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "runtime/border/throw.h"
#include "runtime/comm/c10d/c10d_collectives.h"
#include "runtime/comm/compose/composed_groups.h"
#include "tests/support/stand_ins/mailbox_backend.h"

namespace tessera::testing {
namespace {

/// The messages that a collective has under way.
class Arrivals : public c10d::Work {
 public:
  explicit Arrivals(std::vector<c10::intrusive_ptr<c10d::Work>> messages) : messages_(std::move(messages)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& message : messages_) message->wait(timeout == kNoTimeout ? std::chrono::minutes(1) : timeout);
    return true;
  }
  void abort() override {}

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> messages_;
};

/// Replaces Gloo: it has Gloo's messages, and the two of Gloo's collectives that the transport uses.
class MailboxGloo final : public MailboxBackend {
 public:
  using MailboxBackend::MailboxBackend;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    if (getRank() != root) return c10::make_intrusive<Arrivals>(std::vector{recv(tensors, root, kBroadcast)});
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank != root) send(tensors, rank, kBroadcast);
    }
    return c10::make_intrusive<Arrivals>(std::vector<c10::intrusive_ptr<c10d::Work>>());
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> others;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank == getRank()) continue;
      std::vector<at::Tensor> sent = {at::zeros({1}, at::kByte)}, received = {at::zeros({1}, at::kByte)};
      send(sent, rank, kBarrier);
      others.push_back(recv(received, rank, kBarrier));
    }
    return c10::make_intrusive<Arrivals>(std::move(others));
  }

 private:
  static constexpr int kBroadcast = -1, kBarrier = -2;  // no call has these tags
};

/// The mailboxes that all ranks of a run share.
class Network {
 public:
  absl::StatusOr<std::shared_ptr<Collectives>> join(const Group& group) {
    auto backend = c10::make_intrusive<MailboxGloo>(group.rank, group.size(), mailboxes_of(group.key()));
    return c10d_collectives(group, TransportKind::kGloo, std::move(backend), store_);
  }

 private:
  std::shared_ptr<Mailboxes> mailboxes_of(const std::string& group) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Mailboxes>& mailboxes = mailboxes_[group];
    if (!mailboxes) mailboxes = std::make_shared<Mailboxes>();
    return mailboxes;
  }

  const std::shared_ptr<KeyValueStore> store_ = memory_store();
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Mailboxes>> mailboxes_;
};

/// Returns the rank to which this factory belongs. The call is collective.
int rank_of(GroupFactory& threads, int ranks) {
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return value_or_throw(threads.make("ranks", all, GroupUse::kOther))->rank();
}

}  // namespace

ThreadRanks over_gloo(ThreadRanks ranks) {
  const auto network = std::make_shared<Network>();
  GroupDefaults defaults;
  defaults.topology.world_size = ranks.ranks;
  defaults.topology.local_world_size = ranks.ranks / ranks.hosts;
  defaults.timeout_s = ranks.timeout_s;
  const bool has_hosts = ranks.hosts > 1;
  ranks.wrap_groups = [=](const std::shared_ptr<GroupFactory>& threads) {
    GroupDefaults own = defaults;
    own.topology.rank = rank_of(*threads, own.topology.world_size);
    const JoinGroup gloo = [network](const Group& group) { return network->join(group); };
    const JoinGroup inside = [threads](const Group& group) {
      return threads->make(group.name, group.world_ranks, group.use);
    };
    return has_hosts ? composed_group_factory(own, inside, gloo) : flat_group_factory(own, gloo);
  };
  return ranks;
}

}  // namespace tessera::testing
