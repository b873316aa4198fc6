#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "runtime/comm/collectives.h"

namespace tessera {

/// One rank of a group of any size, alone in its process. Each call does this rank's own part, and counts the bytes
/// that the other ranks would have moved. A group of size 1 ("solo") is exact, and its calls cost nothing if output is
/// input. Any larger group is "fake": a gathered buffer holds only this rank's shard, and a sum holds only this rank's
/// addend. `one_host` is true if the group that this object represents could share memory. `compressed_part` is the
/// result of that group's compressed_part().
class LocalCollectives : public Collectives {
 public:
  explicit LocalCollectives(int rank = 0, int size = 1, bool one_host = true, int compressed_part = 0)
      : rank_(rank), size_(size), one_host_(one_host), compressed_part_(compressed_part) {}

  /// Returns the bytes that this rank would have received from peers so far if each collective used the least traffic.
  /// A gather, a scatter or an exchange counts as (size - 1) parts. An all_reduce counts as a scatter and a gather.
  std::uint64_t bytes_received() const { return bytes_received_; }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  TransportKind kind() const override { return size_ == 1 ? TransportKind::kSolo : TransportKind::kFake; }
  std::string transport() const override { return size_ == 1 ? "solo" : "fake"; }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override;
  bool shares_memory() const override { return one_host_; }
  int compressed_part() const override { return compressed_part_; }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes) override;
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override;
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override;
  Work barrier(std::string_view label) override;
  void abort(const absl::Status& reason) override;

 protected:
  Work do_all_gather(const GatherCall& call) override;
  Work do_reduce(const ReduceCall& call) override;

 private:
  absl::Status status() const;

  const int rank_, size_;
  const bool one_host_;
  const int compressed_part_;
  std::atomic<std::uint64_t> bytes_received_ = 0;
  std::atomic<bool> aborted_ = false;  ///< true after reason_ is final: reason_ is written before this, never after
  std::atomic<bool> aborting_ = false;
  absl::Status reason_;
};

}  // namespace tessera
