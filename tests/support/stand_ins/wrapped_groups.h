#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/forwarding_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {

/// Wraps a group. `use` is the last word of the group's name: "gather", "reduce", "replicate", "world", "replica".
using WrapGroup = std::function<std::shared_ptr<Collectives>(const std::string& use, std::shared_ptr<Collectives>)>;

/// Wraps a rank's factory so that `wrap` wraps each of its groups. Functions for ThreadRanks::wrap_groups call this
/// function.
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
