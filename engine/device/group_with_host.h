#pragma once

#include <absl/status/status.h>

#include <memory>
#include <utility>

#include "runtime/comm/forwarding_collectives.h"

namespace tessera {

/// A GPU's group, and a group of the same ranks over their hosts beside it. All calls go to the GPU's group; the end of
/// one is the end of both. SumsOnHost and GathersOnHost derive from it, and give some calls to the hosts.
class GroupWithHost : public ForwardingCollectives {
 public:
  GroupWithHost(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host)
      : ForwardingCollectives(std::move(group)), host_(std::move(host)) {}

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
  bool end_if_left_alone(HasKey has_key) override {
    const bool ended_group = group_->end_if_left_alone(has_key);
    return host_->end_if_left_alone(has_key) || ended_group;
  }

 protected:
  const std::shared_ptr<Collectives> host_;
};

}  // namespace tessera
