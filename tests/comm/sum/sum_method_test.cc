// Tests the layer that passes reductions on to compressors.

#include "runtime/comm/sum/sum_method.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"

namespace tessera {
namespace {

/// Makes sums with the group's all_reduce and adds 100, so that they differ from the group's own sums.
struct PlusHundred : SumMethod {
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    TESSERA_RETURN_IF_ERROR(group.all_reduce(label, data, DType::kF32, data, numel).wait());
    for (std::size_t i = 0; i < numel; ++i) data[i] += 100;
    return absl::OkStatus();
  }
};

/// A PlusHundred that has messages, too. A message is one element, for all elements of the contribution.
struct FromMessages : PlusHundred, SumOfMessages {
  SumOfMessages* of_messages() override { return this; }
  std::optional<SignMessages> next_messages(std::size_t numel) override {
    return SignMessages{.numel = numel, .part_numel = numel, .part_words = 1};
  }
  absl::Status sum_messages(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    std::fill_n(data, numel, data[0]);
    return sum(group, label, data, numel);
  }
};

struct FailingMethod : SumMethod {
  absl::Status sum(Collectives&, std::string_view, float*, std::size_t) override {
    return make_error(ExitCode::kUsage, "no codes are left");
  }
};

/// Counts the elements that it sees.
struct SeenElements : SumVisitor {
  void visit(std::size_t, const float*, std::size_t count) override { numel += count; }
  std::size_t numel = 0;
};

ReduceOptions with_method(SumMethod& method, SumVisitor* visitor = nullptr) {
  ReduceOptions options(visitor);
  options.method = &method;
  return options;
}

TEST(SumsByMethods, ReductionsOfFp32AreMadeByTheMethod) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, mesh.world_size());
    require_ok(axes.status());
    const auto group = summing_by_methods(axes->reduce);
    PlusHundred method;
    SeenElements seen;
    constexpr std::size_t kNumel = 600;
    std::vector<float> input(2 * kNumel, static_cast<float>(mesh.rank() + 1)), output(2 * kNumel);
    require_ok(group->all_reduce("a", input.data(), DType::kF32, output.data(), 2 * kNumel, with_method(method, &seen))
                   .wait());
    require(output == std::vector<float>(2 * kNumel, 103), "all_reduce");
    require(seen.numel == 2 * kNumel, "all sums are shown");
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(i);
    require_ok(
        group->reduce_scatter("b", input.data(), DType::kF32, output.data(), kNumel, with_method(method)).wait());
    const auto first = static_cast<float>(kNumel) * static_cast<float>(mesh.rank());
    require(output[0] == 2 * first + 100 && output[1] == 2 * (first + 1) + 100, "reduce_scatter");
  });
}

TEST(SumsByMethods, ContributionsOfMessagesAreSummedFromThem) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, mesh.world_size());
    require_ok(axes.status());
    const auto group = summing_by_methods(axes->reduce);
    FromMessages method;
    std::vector<float> values = {static_cast<float>(mesh.rank() + 1), -7, -7};
    ReduceOptions options = with_method(method);
    options.encoded = reinterpret_cast<const std::byte*>(values.data());
    require_ok(group->all_reduce("a", values.data(), DType::kF32, values.data(), values.size(), options).wait());
    require(values == std::vector<float>(3, 103), "all_reduce");
  });
}

TEST(SumsByMethods, OtherCallsAreThoseOfTheGroup) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, mesh.world_size());
    require_ok(axes.status());
    check_all_operations(*summing_by_methods(axes->reduce), false, 2001);
  });
}

TEST(SumsByMethods, FailureOfTheMethodEndsTheGroup) {
  const auto inner = std::make_shared<LocalCollectives>();
  const auto group = summing_by_methods(inner);
  FailingMethod method;
  float value = 1;
  const absl::Status failed = group->all_reduce("a", &value, DType::kF32, &value, 1, with_method(method)).wait();
  EXPECT_EQ(message_of(failed), "no codes are left");
  EXPECT_EQ(exit_code_of(inner->barrier("b").wait()), ExitCode::kUsage);
}

}  // namespace
}  // namespace tessera
