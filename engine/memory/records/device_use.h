#pragma once

// See docs/glossary.md: carrier.

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "engine/memory/records/tier_carrier.h"
#include "runtime/base/log.h"

namespace tessera {

/// Waits until a device no longer uses the records of a TierCarrier. It does so before the host visits a record
/// (TierCarrier::visit), and when this object is destroyed. A carrier to a device has a DeviceUse as its last member.
class DeviceUse {
 public:
  /// `settle` waits for the device. `what`: the beginning of the line that is logged if `settle` fails in the
  /// destructor. `visits`: whether the host also waits before it visits a record (TierCarrier::before_visits).
  DeviceUse(std::shared_ptr<TierCarrier> records, std::string what, std::function<void()> settle, bool visits = true)
      : records_(std::move(records)), what_(std::move(what)), settle_(std::move(settle)) {
    if (visits) records_->before_visits(this, settle_);
  }
  ~DeviceUse() {
    records_->before_visits(this, nullptr);
    try {
      settle_();
    } catch (const std::exception& error) {
      log_error(what_ + ": " + error.what());
    }
  }
  DeviceUse(const DeviceUse&) = delete;
  DeviceUse& operator=(const DeviceUse&) = delete;

 private:
  const std::shared_ptr<TierCarrier> records_;
  const std::string what_;
  const std::function<void()> settle_;
};

}  // namespace tessera
