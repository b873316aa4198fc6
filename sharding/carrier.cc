#include "sharding/carrier.h"

#include <exception>
#include <string>
#include <utility>

#include "runtime/base/log.h"

namespace tessera {

Lease::Lease(Carrier& carrier, std::int64_t record, bool changes, std::span<std::byte> bytes)
    : carrier_(&carrier),
      record_(record),
      changes_(changes),
      exceptions_at_start_(std::uncaught_exceptions()),
      bytes_(bytes) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  end();
  carrier_ = std::exchange(other.carrier_, nullptr);
  record_ = other.record_;
  changes_ = other.changes_;
  exceptions_at_start_ = other.exceptions_at_start_;
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

void Lease::give_back() {
  bytes_ = {};
  if (Carrier* const carrier = std::exchange(carrier_, nullptr)) carrier->give_back(record_, changes_);
}

void Lease::drop() noexcept {
  bytes_ = {};
  if (Carrier* const carrier = std::exchange(carrier_, nullptr)) carrier->drop(record_);
}

void Lease::end() noexcept {
  if (std::uncaught_exceptions() > exceptions_at_start_) return drop();
  try {
    give_back();
  } catch (const std::exception& error) {
    log_error("record " + std::to_string(record_) + " could not be given back: " + error.what());
  }
}

Lease Carrier::acquire(std::int64_t record, LeaseUse use) {
  return Lease(*this, record, use != LeaseUse::kRead, take(record, use));
}

}  // namespace tessera
