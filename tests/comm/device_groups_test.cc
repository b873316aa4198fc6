// Tests groups for a device's memory. The CPU is the device.

#include <gmock/gmock.h>

#include <numeric>
#include <vector>

#include "runtime/comm/compose/composed_groups.h"
#include "runtime/comm/device/device_solo.h"
#include "runtime/comm/device/staged_collectives.h"
#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

const c10::Device kCpu(c10::kCPU);

TEST(DeviceSolo, EveryCallDoesItsOwnPart) {
  const auto solo = solo_on_device(kCpu);
  std::vector<std::uint16_t> halves = {0x3f80, 0x4000, 0xc040};  // bf16: 1, 2, -3
  std::vector<float> sums(3);
  require_ok(solo->reduce_scatter("", halves.data(), DType::kBF16, sums.data(), 3).wait());
  EXPECT_EQ(sums, (std::vector<float>{1, 2, -3}));
  require_ok(solo->all_reduce("", sums.data(), DType::kF32, sums.data(), 3).wait());
  EXPECT_EQ(sums, (std::vector<float>{1, 2, -3}));
  std::vector<float> gathered(3), exchanged(3);
  require_ok(solo->all_gather("", sums.data(), gathered.data(), 12).wait());
  require_ok(solo->all_to_all("", sums.data(), exchanged.data(), 12).wait());
  require_ok(solo->all_gather("", gathered.data(), gathered.data(), 12).wait());
  require_ok(solo->broadcast("", gathered.data(), 12, 0).wait());
  require_ok(solo->barrier("").wait());
  EXPECT_EQ(gathered, sums);
  EXPECT_EQ(exchanged, sums);
  const auto buffer = solo->allocate(100);
  require_ok(buffer.status());
  EXPECT_TRUE(std::all_of((*buffer)->data(), (*buffer)->data() + 100, [](std::byte b) { return b == std::byte{}; }));
}

TEST(DeviceSolo, VisitorsAndCallsAfterAnAbortAreRefused) {
  const auto solo = solo_on_device(kCpu);
  struct : SumVisitor {
    void visit(std::size_t, const float*, std::size_t) override {}
  } visitor;
  float value = 1;
  EXPECT_THAT(std::string(solo->all_reduce("unit", &value, DType::kF32, &value, 1, &visitor).wait().message()),
              HasSubstr("no SumVisitor can see"));
  EXPECT_THAT(std::string(solo->all_reduce("unit", &value, DType::kI64, &value, 1).wait().message()),
              HasSubstr("fp32, bf16 or fp16"));
  solo->abort(make_error(ExitCode::kIo, "no disk"));
  EXPECT_EQ(solo->barrier("").wait().message(), "no disk");
  EXPECT_EQ(solo->all_gather("", &value, &value, 4).wait().message(), "no disk");
}

TEST(StagedCollectives, CarryHostMemoryOverADeviceGroup) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, 3);
    require_ok(axes.status());
    const auto staged = staged_collectives(axes->world, kCpu);
    std::vector<int> gathered(3), exchanged(3), data = {10 * mesh.rank(), 7};
    std::vector<int> send(3);
    std::iota(send.begin(), send.end(), 3 * mesh.rank());
    require_ok(staged->all_gather("", send.data(), gathered.data(), sizeof(int)).wait());
    require(gathered == std::vector<int>({0, 3, 6}), "all_gather");
    require_ok(staged->all_to_all("", send.data(), exchanged.data(), sizeof(int)).wait());
    require(exchanged == std::vector<int>({mesh.rank(), 3 + mesh.rank(), 6 + mesh.rank()}), "all_to_all");
    require_ok(staged->broadcast("", data.data(), data.size() * sizeof(int), 2).wait());
    require(data == std::vector<int>({20, 7}), "broadcast");
    require_ok(staged->barrier("").wait());
    float sum = 0;
    require(!staged->all_reduce("", &sum, DType::kF32, &sum, 1).wait().ok(), "a sum is not refused");
  });
}

TEST(DeviceGroups, GivenGroupsServeRanksOfAnyHosts) {
  int joined = 0, joined_on_hosts = 0;
  DeviceGroups groups;
  groups.join = [&](const Group& group) -> absl::StatusOr<std::shared_ptr<Collectives>> {
    ++joined;
    EXPECT_EQ(group.size(), 2);
    return solo_on_device(kCpu);
  };
  groups.join_on_host = [&](const Group& group) -> absl::StatusOr<std::shared_ptr<Collectives>> {
    ++joined_on_hosts;
    EXPECT_NE(group.use, GroupUse::kOther);
    return std::make_shared<LocalCollectives>();
  };
  groups.alone = [] { return solo_on_device(kCpu); };
  groups.control = [](std::shared_ptr<Collectives> group) { return staged_collectives(std::move(group), kCpu); };
  GroupDefaults defaults;
  defaults.topology.rank = 1;
  defaults.topology.world_size = 4;
  const auto factory = device_group_factory(defaults, groups);
  require_ok(factory->make("alone", {1}, GroupUse::kOther).status());
  EXPECT_EQ(joined, 0);
  const auto pair = factory->make("pair", {1, 3}, GroupUse::kOther);
  require_ok(pair.status());
  EXPECT_EQ(joined, 1);
  EXPECT_EQ(joined_on_hosts, 0);
  EXPECT_NE(factory->control_of(*pair), *pair);
  require_ok(factory->make("sums of the pair", {1, 3}, GroupUse::kOnHost).status());
  EXPECT_EQ(joined, 1);
  EXPECT_EQ(joined_on_hosts, 1);
  require_ok(factory->make("memory of the pair", {1, 3}, GroupUse::kCommonMemory).status());
  EXPECT_EQ(joined, 1);
  EXPECT_EQ(joined_on_hosts, 2);
  EXPECT_TRUE((*factory->make("memory of one", {1}, GroupUse::kCommonMemory))->shares_memory());
  EXPECT_FALSE((*factory->make("one", {1}, GroupUse::kOther))->shares_memory());
}

}  // namespace
}  // namespace tessera
