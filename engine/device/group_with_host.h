#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/comm/collectives.h"

namespace tessera {

/// A GPU's group, and a group of the same ranks over their hosts beside it. All calls go to the GPU's group; the end of
/// one is the end of both. SumsOnHost and GathersOnHost derive from it, and give some calls to the hosts.
class GroupWithHost : public Collectives {
 public:
  GroupWithHost(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host)
      : group_(std::move(group)), host_(std::move(host)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  TransportKind kind() const override { return group_->kind(); }
  std::string transport() const override { return group_->transport(); }
  int gpu() const override { return group_->gpu(); }
  bool reduces_in_background() const override { return group_->reduces_in_background(); }
  bool gathers_in_background() const override { return group_->gathers_in_background(); }
  int compressed_part() const override { return group_->compressed_part(); }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override { return group_->allocate(bytes); }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return group_->broadcast(label, data, bytes, root);
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override {
    return group_->all_to_all(label, input, output, bytes_per_rank);
  }
  Work barrier(std::string_view label) override { return group_->barrier(label); }
  void abort(const absl::Status& reason) override {
    group_->abort(reason);
    host_->abort(reason);
  }
  void leave() override {
    group_->leave();
    host_->leave();
  }
  absl::Status status() const override {
    const absl::Status of_group = group_->status();
    return of_group.ok() ? host_->status() : of_group;
  }
  std::uint64_t stands_in() const override { return group_->stands_in(); }
  bool end_if_left_alone(HasKey has_key) override {
    const bool ended_group = group_->end_if_left_alone(has_key);
    return host_->end_if_left_alone(has_key) || ended_group;
  }

 protected:
  Work do_all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank,
                     const GatherOptions& options) override {
    return group_->all_gather(label, shard, full, bytes_per_rank, options);
  }
  Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel_per_rank,
                         const ReduceOptions& options) override {
    return group_->reduce_scatter(label, input, dtype, output, numel_per_rank, options);
  }
  Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                     const ReduceOptions& options) override {
    return group_->all_reduce(label, input, dtype, output, numel, options);
  }

  const std::shared_ptr<Collectives> group_, host_;
};

}  // namespace tessera
