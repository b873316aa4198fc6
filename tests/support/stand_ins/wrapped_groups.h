#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {

/// A group that passes all calls on to another one. A test overrides the calls that it wants to see or change.
class ForwardingCollectives : public Collectives {
 public:
  explicit ForwardingCollectives(std::shared_ptr<Collectives> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  TransportKind kind() const override { return group_->kind(); }
  std::string transport() const override { return group_->transport(); }
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
  bool end_if_left_alone(HasKey has_key) override { return group_->end_if_left_alone(has_key); }

 protected:
  Work do_all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes,
                     const GatherOptions& options) override {
    return group_->all_gather(label, shard, full, bytes, options);
  }
  Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                         const ReduceOptions& options) override {
    return group_->reduce_scatter(label, input, dtype, output, numel, options);
  }
  Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                     const ReduceOptions& options) override {
    return group_->all_reduce(label, input, dtype, output, numel, options);
  }

 private:
  const std::shared_ptr<Collectives> group_;
};

/// Wraps a group. `use`: the last word of its name: "gather", "reduce", "replicate", "world", "replica".
using WrapGroup = std::function<std::shared_ptr<Collectives>(const std::string& use, std::shared_ptr<Collectives>)>;

/// Wraps the ranks' factory so that `wrap` wraps each of its groups. ThreadRanks::wrap_groups takes it.
inline std::shared_ptr<GroupFactory> wrapped_groups(std::shared_ptr<GroupFactory> factory, WrapGroup wrap) {
  class Wrapped final : public GroupFactory {
   public:
    Wrapped(std::shared_ptr<GroupFactory> factory, WrapGroup wrap)
        : factory_(std::move(factory)), wrap_(std::move(wrap)) {}
    absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string& name, const std::vector<int>& world_ranks,
                                                      GroupUse use) override {
      auto made = factory_->make(name, world_ranks, use);
      if (!made.ok()) return made;
      return wrap_(name.substr(name.rfind('.') + 1), *std::move(made));
    }

   private:
    const std::shared_ptr<GroupFactory> factory_;
    const WrapGroup wrap_;
  };
  return std::make_shared<Wrapped>(std::move(factory), std::move(wrap));
}

}  // namespace tessera::testing
