#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/comm/collectives.h"

namespace tessera {

/// A group that passes all calls on to another group. Groups over groups derive from this class, and override the calls
/// that they observe or change. Memory of the other group is memory of this object.
class ForwardingCollectives : public Collectives {
 public:
  explicit ForwardingCollectives(std::shared_ptr<Collectives> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  TransportKind kind() const override { return group_->kind(); }
  std::string transport() const override { return group_->transport(); }
  int gpu() const override { return group_->gpu(); }
  bool reduces_in_background() const override { return group_->reduces_in_background(); }
  bool gathers_in_background() const override { return group_->gathers_in_background(); }
  int compressed_part() const override { return group_->compressed_part(); }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override { return group_->allocate(bytes); }
  bool shares_memory() const override { return group_->shares_memory(); }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes) override {
    return group_->allocate_common(bytes);
  }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return group_->broadcast(label, data, bytes, root);
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    return group_->all_to_all(label, input, output, bytes);
  }
  Work barrier(std::string_view label) override { return group_->barrier(label); }
  void abort(const absl::Status& reason) override { group_->abort(reason); }
  void leave() override { group_->leave(); }
  absl::Status status() const override { return group_->status(); }
  std::uint64_t stands_in() const override { return group_->stands_in(); }
  bool end_if_left_alone(HasKey has_key) override { return group_->end_if_left_alone(has_key); }

 protected:
  Work do_all_gather(const GatherCall& call) override { return group_->all_gather(call); }
  Work do_reduce(const ReduceCall& call) override { return group_->reduce(call); }

  const std::shared_ptr<Collectives> group_;
};

}  // namespace tessera
