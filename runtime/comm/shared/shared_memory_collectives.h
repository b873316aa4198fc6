#pragma once

// See docs/glossary.md: slot.

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/collectives.h"
#include "runtime/comm/shared/mailbox_way.h"
#include "runtime/comm/shared/peer_buffers.h"
#include "runtime/comm/shared/started_reductions.h"

namespace tessera {

/// The collectives of ranks that can read each other's memory: the `thread` and the `host` transport.
///
/// A call that blocks moves data in one of three ways. Every rank chooses the way by the same rule:
///
/// | way     | when                              | how                                     | barriers      |
/// |---------|-----------------------------------|-----------------------------------------|---------------|
/// | mailbox | at most 16 KiB per rank           | through the mailboxes                   | 1             |
/// | direct  | larger, all buffers reachable     | peers' buffers are used where they lie  | 2             |
/// | rounds  | larger, a buffer not reachable    | through the mailboxes, window by window | 2 and more    |
///
/// A call in rounds loads one round's mailboxes from memory while it writes the data of the round before to memory.
/// Mailboxes are written in the way that costs less between the cores on which the ranks run (MailboxWay).
///
/// Invariants:
///  1. The first barrier of every call exchanges its descriptors, and all ranks compare the same signatures. Either all
///     ranks continue or all fail.
///  2. A rank writes its descriptor and mailbox for phase k into slot k & 1. Peers read them between phases k and k+1.
///     The slot is next written after phase k+1, and so never while it is read.
///  3. A peer's buffer is read or written only between two barriers of one call, so a call's buffers are free when it
///     returns. (After a failure, the peers of a process may write to its outputs a while longer.)
///  4. Between two barriers, no rank writes memory that a peer may read or write. Each rank of an all_reduce, for
///     example, reads its own slice of all inputs and writes that slice of all outputs.
///
/// Calls run on the caller's thread and are done when they return: Work::wait costs nothing. Reductions that the caller
/// means to wait for later are separate (StartedReductions). A call that blocks waits for them first.
class SharedMemoryCollectives : public Collectives, private StartedReductions::Fallback {
 public:
  SharedMemoryCollectives(TransportKind kind, Group group, std::unique_ptr<SharedSpace> space);
  ~SharedMemoryCollectives() override;

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  TransportKind kind() const override { return kind_; }
  std::string transport() const override { return kind_ == TransportKind::kHost ? "host" : "thread"; }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override;
  bool shares_memory() const override { return true; }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes) override;
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override;
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override;
  Work barrier(std::string_view label) override;
  void abort(const absl::Status& reason) override;
  void leave() override { peers_.leave(); }
  absl::Status status() const override { return peers_.failure(); }

 protected:
  Work do_all_gather(const GatherCall& call) override;
  Work do_reduce(const ReduceCall& call) override;
  absl::Status reduce_blocking(const CallDescriptor& call, const std::byte* input, float* output,
                               SumVisitor* visitor) override;

 private:
  struct Round;
  struct Part;

  CallDescriptor describe(Operation operation, std::string_view label, DType dtype, std::size_t count, int root = 0);
  CallDescriptor begin(Operation operation, std::string_view label, DType dtype, std::size_t count, int root = 0);
  absl::Status give_up(const absl::Status& why);
  absl::Status refuse(const std::string& why);
  absl::Status meet_about(const CallDescriptor& call);
  absl::Status exchange_calls(const CallDescriptor& call);
  bool small(std::size_t bytes) const;
  // parity of the next phase's mailbox
  int next_parity() const { return static_cast<int>((meeting_.phase() + 1) & 1); }
  int peer(int step) const { return (group_.rank + step) % group_.size(); }
  std::size_t peer_count() const { return std::max(1, size() - 1); }
  /// Returns the index of the piece for `to` in `from`'s mailbox. The mailbox holds one piece for each peer.
  static std::size_t place_for(int to, int from) { return static_cast<std::size_t>(to < from ? to : to - 1); }

  template <typename Access>
  absl::Status access_peers(Access access);
  template <typename Load, typename Use>
  absl::Status in_rounds(std::size_t total, std::size_t window, std::size_t part, Load load, Use use);
  template <typename Load, typename Use>
  absl::Status in_one_round(const CallDescriptor& call, std::size_t total, Load load, Use use);
  template <typename First, typename Second>
  static void in_turn(std::size_t units, std::size_t part, First first, Second second);
  Round round_of(std::size_t number, std::size_t total, std::size_t window) const;
  void fill_mailbox(const Round& round, std::size_t at, const std::byte* from, std::size_t bytes) const;
  absl::Status meet_loaded();
  std::span<const void* const> mailboxes_from(const Round& round, std::size_t offset, const std::byte* own);

  absl::StatusOr<std::unique_ptr<CommBuffer>> open_all(
      CallDescriptor call, absl::StatusOr<std::unique_ptr<SharedSpace::Allocation>> allocation);
  absl::Status meet_about_common(const CallDescriptor& call, Location (Meeting::*place_of)(int, std::uint64_t) const);
  absl::Status gather_common(const CallDescriptor& call, const std::byte* shard, std::byte* full, std::size_t bytes);
  absl::Status gather(const CallDescriptor& call, const std::byte* shard, std::byte* full, std::size_t bytes);
  absl::Status scatter(const CallDescriptor& call, const std::byte* input, float* output, std::size_t numel,
                       SumVisitor* visitor);
  absl::Status reduce(const CallDescriptor& call, const std::byte* input, float* output, std::size_t numel);
  absl::Status reduce_in_rounds(DType dtype, const std::byte* input, float* output, std::size_t numel);
  absl::Status spread(const CallDescriptor& call, std::byte* data, std::size_t bytes, int root);
  absl::Status exchange(const CallDescriptor& call, const std::byte* input, std::byte* output, std::size_t bytes);

  const TransportKind kind_;
  const Group group_;
  const std::unique_ptr<SharedSpace> space_;
  Peers peers_;
  Meeting meeting_;
  PeerBuffers buffers_;  // buffers of the blocking call under way
  MailboxWay way_;
  StartedReductions started_;
  const int exceptions_at_start_;
  std::uint64_t sequence_ = 0;
  std::vector<const void*> sources_;  // scratch of sums over mailboxes
};

}  // namespace tessera
