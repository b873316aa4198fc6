// Tests the lease of a record. It gives the record back once, and drops the record if an exception leaves the lease's
// scope.

#include "sharding/carrier.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {
namespace carrier_test {

/// A carrier that records the requests that it gets.
class Told final : public Carrier {
 public:
  void announce(std::span<const std::int64_t>) override {}
  void flush() override {}

  std::vector<std::string> calls;
  bool fails = false;

 private:
  std::span<std::byte> take(std::int64_t record, LeaseUse use) override {
    calls.push_back("take " + std::to_string(record) + (use == LeaseUse::kOverwrite ? " anew" : ""));
    return memory_;
  }
  void give_back(std::int64_t record, bool changed) override {
    calls.push_back("give back " + std::to_string(record) + (changed ? " changed" : ""));
    if (fails) throw std::runtime_error("the disk is full");
  }
  void drop(std::int64_t record) noexcept override { calls.push_back("drop " + std::to_string(record)); }

  std::array<std::byte, 8> memory_{};
};

using Calls = std::vector<std::string>;

TEST(Lease, EndOfScopeGivesTheRecordBackAsItWasUsed) {
  Told carrier;
  {
    const Lease read = carrier.acquire(1, LeaseUse::kRead);
    EXPECT_EQ(read.bytes().size(), 8u);
    EXPECT_EQ(read.record(), 1);
  }
  { const Lease change = carrier.acquire(2, LeaseUse::kChange); }
  { const Lease overwrite = carrier.acquire(3, LeaseUse::kOverwrite); }
  EXPECT_EQ(carrier.calls,
            (Calls{"take 1", "give back 1", "take 2", "give back 2 changed", "take 3 anew", "give back 3 changed"}));
}

TEST(Lease, MovedLeaseGivesTheRecordBackOnce) {
  Told carrier;
  Lease first = carrier.acquire(1, LeaseUse::kRead);
  Lease second = std::move(first);
  EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): an empty lease
  EXPECT_TRUE(second);
  Lease third = carrier.acquire(2, LeaseUse::kChange);
  third = std::move(second);
  EXPECT_EQ(carrier.calls, (Calls{"take 1", "take 2", "give back 2 changed"}));
  third.give_back();
  third.give_back();
  EXPECT_FALSE(third);
  EXPECT_TRUE(third.bytes().empty());
  EXPECT_EQ(carrier.calls.size(), 4u);
  EXPECT_EQ(carrier.calls.back(), "give back 1");
}

TEST(Lease, PassingFailureDropsTheRecord) {
  Told carrier;
  try {
    const Lease lease = carrier.acquire(1, LeaseUse::kChange);
    throw std::runtime_error("a rule failed");
  } catch (const std::runtime_error&) {
    const Lease later = carrier.acquire(2, LeaseUse::kChange);  // the failure is caught, so this lease is ordinary
  }
  EXPECT_EQ(carrier.calls, (Calls{"take 1", "drop 1", "take 2", "give back 2 changed"}));
}

TEST(Lease, RecordThatCannotBeGivenBackThrowsButInADestructor) {
  Told carrier;
  carrier.fails = true;
  Lease lease = carrier.acquire(1, LeaseUse::kChange);
  EXPECT_THROW(lease.give_back(), std::runtime_error);
  EXPECT_FALSE(lease) << "the lease is over";
  { const Lease quiet = carrier.acquire(2, LeaseUse::kChange); }
  EXPECT_EQ(carrier.calls, (Calls{"take 1", "give back 1 changed", "take 2", "give back 2 changed"}));
}

}  // namespace carrier_test
}  // namespace tessera::testing
