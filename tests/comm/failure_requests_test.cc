// Tests that a rank asks the store about a failure as often in a large job as in a small one. All ranks ask at the same
// time, and one process serves the store.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/c10d/failure_report.h"
#include "runtime/comm/rank_watch.h"
#include "tests/comm/collectives_properties.h"
#include "tests/comm/forked_world.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// A store in this process that counts the requests. It has c10d's extended interface, as a TCPStore does, unless
/// `is_plain` is true, as a FileStore does not.
class CountedStore final : public c10d::HashStore {
 public:
  using Value = std::vector<std::uint8_t>;
  explicit CountedStore(bool is_plain) : is_plain_(is_plain) {}

  c10::intrusive_ptr<c10d::Store> clone() override { throw std::runtime_error("there is one connection"); }
  void set(const std::string& key, const Value& value) override { counted(), HashStore::set(key, value); }
  Value get(const std::string& key) override { return counted(), HashStore::get(key); }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return counted(), HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override { return counted(), HashStore::check(keys); }
  void append(const std::string& key, const Value& value) override { counted(), HashStore::append(key, value); }
  std::vector<Value> multiGet(const std::vector<std::string>& keys) override {
    return counted(), HashStore::multiGet(keys);
  }
  bool hasExtendedApi() const override { return !is_plain_; }

  int requests() const { return requests_; }

 private:
  void counted() { ++requests_; }

  const bool is_plain_;
  std::atomic<int> requests_ = 0;
};

/// A store that `ranks` ranks share, and its requests.
struct CountedWorld {
  explicit CountedWorld(int ranks, bool is_plain = false)
      : ranks(ranks),
        counted(c10::make_intrusive<CountedStore>(is_plain)),
        store(std::make_shared<C10dStore>(counted)) {}

  FailureReport report(int rank) const { return {world_of(rank, ranks), store}; }
  /// Returns the requests that `action` makes.
  template <class Action>
  int requests_of(const Action& action) const {
    const int before = counted->requests();
    action();
    return counted->requests() - before;
  }

  const int ranks;
  const c10::intrusive_ptr<CountedStore> counted;
  const std::shared_ptr<C10dStore> store;
};

CallSignature third_gather(const char* label) {
  CallSignature call = make_signature(Operation::kAllGather, label, DType::kU8, 400);
  call.sequence = 3;
  return call;
}

/// Returns the error of rank 0 after ranks 1 to `ranks` - 2 have failed in the same call, and the last rank has ended.
/// `requests` gets the number of requests.
std::string explained(const CountedWorld& world, int& requests) {
  for (int rank = 1; rank + 1 < world.ranks; ++rank) world.report(rank).publish_call(third_gather("blocks.3"));
  require_ok(world.store->append(kEndedRanks, std::to_string(world.ranks - 1)));
  FailureReport report = world.report(0);
  absl::Status status;
  requests = world.requests_of([&] { status = report.explain(third_gather("blocks.3"), "the connection ended"); });
  EXPECT_EQ(exit_code_of(status), ExitCode::kPeerLost);
  return message_of(status);
}

TEST(RequestsAboutFailures, ErrorOfACallCostsTheSameInAnyWorld) {
  int of_few = 0, of_many = 0;
  const std::string few = explained(CountedWorld(4), of_few), many = explained(CountedWorld(300), of_many);
  const std::string was_in = " was in all_gather 'blocks.3' of 400 bytes (#3)";
  EXPECT_THAT(few, AllOf(HasSubstr("rank 0/4 blocks.3 all_gather #3: the connection ended; rank 1" + was_in),
                         HasSubstr("rank 2" + was_in + "; the program of rank 3 has ended"), Not(HasSubstr("more"))));
  EXPECT_THAT(many, AllOf(HasSubstr("rank 8" + was_in + "; and 290 more; the program of rank 299 has ended"),
                          Not(HasSubstr("does not answer"))));
  EXPECT_EQ(of_few, of_many);
  EXPECT_LT(of_many, 20);
}

TEST(RequestsAboutFailures, RanksInOtherCallsAndSilentRanksAreNamed) {
  for (const bool is_plain : {false, true}) {
    const CountedWorld world(4, is_plain);
    world.report(1).publish_call(third_gather("blocks.4"));
    require_ok(world.store->append(kEndedRanks, "no rank"));  // a text that no rank of this version writes
    const absl::Status status = world.report(0).explain(third_gather("blocks.3"), "the connection ended");
    EXPECT_EQ(exit_code_of(status), ExitCode::kInternal);
    EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 1 was in all_gather 'blocks.4'"),
                                          HasSubstr("rank 2, 3 do not answer; ranks disagree")));
  }
}

// A rank that waits in a call looks again and again. Here it waits in calls of two groups.
TEST(RequestsAboutFailures, LooksForRanksThatAreGoneCostTheSameInAnyWorld) {
  std::vector<int> requests;
  for (const int ranks : {4, 1000}) {
    const CountedWorld world(ranks);
    OwnConnection connection(world.store);
    RankWatch watch(0, ranks, /*address=*/"", connection);
    const FailureReport all = world.report(0),
                        apart({.name = "apart", .world_ranks = {0, 2}, .world_size = ranks}, world.store);
    const auto is_left_alone = [&](const FailureReport& report) {
      return report.is_left_alone([&](const std::string& key) { return watch.has_key(key); });
    };
    EXPECT_FALSE(is_left_alone(all));
    require_ok(world.store->append(kAnyGoneRank, "1"));
    requests.push_back(world.requests_of([&] { EXPECT_FALSE(is_left_alone(all)) << "it may still return"; }));
    for (Deadline limit(std::chrono::seconds(10)); !is_left_alone(all) && !limit.passed();)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    requests.push_back(world.requests_of([&] { EXPECT_TRUE(is_left_alone(all)); }));
    EXPECT_FALSE(is_left_alone(apart)) << "rank 1 is not in this group";
    require_ok(world.store->set(key_of_ended_rank(1), ""));
    EXPECT_FALSE(is_left_alone(all)) << "its program had ended well";
  }
  EXPECT_EQ(requests[0], requests[2]);
  EXPECT_EQ(requests[1], requests[3]);
  EXPECT_LT(requests[3], 10);
}

}  // namespace
}  // namespace tessera
