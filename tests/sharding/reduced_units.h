#pragma once

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "hand_made_units.h"
#include "sharding/reduce/reducer.h"

namespace tessera::testing {

/// Returns a gradient of a rank. It contains integers, so sums are not rounded in any order or dtype that is used here.
inline at::Tensor gradient_of(int rank, std::int64_t round, std::size_t u, std::size_t i, at::IntArrayRef sizes) {
  at::Tensor gradient = at::arange(at::empty(sizes).numel(), at::kFloat).remainder(13).reshape(sizes);
  return gradient + static_cast<float>(rank + 2 * round + static_cast<std::int64_t>(u + i));
}

/// Records the values of each group that the Reducer passes to this visitor.
class Recorder final : public GradientVisitor {
 public:
  void begin(const FlatGroup& group) override { seen_of(group).clear(); }
  void visit(const FlatGroup& group, std::span<const float> values) override {
    std::vector<float>& seen = seen_of(group);
    EXPECT_EQ(seen.size() % SumVisitor::kAlignment, 0u) << "only the last piece is short";
    seen.insert(seen.end(), values.begin(), values.end());
  }
  std::vector<float>& seen_of(const FlatGroup& group) {
    const auto u = static_cast<std::size_t>(group.unit->index);
    if (seen_.size() <= u) seen_.resize(u + 1);
    return seen_[u];
  }

 private:
  std::vector<std::vector<float>> seen_;
};

/// Hand-made units, and a Reducer that gets the gradients of these units.
struct Reduced {
  Reduced(const Mesh& mesh_given, const HandMadeUnits::Options& options)
      : mesh(mesh_given),
        units(mesh, options),
        reducer(units.plan(), units.pointers(), units.axes(),
                {std::move(units.buckets), std::move(units.scratch), std::move(units.sums)}, {}, &recorder) {}

  void take(std::size_t u, std::size_t i, const at::Tensor& gradient) {
    units.parameter(u, i).mutable_grad() = gradient;
    reducer.take(units.group(u), i);
    EXPECT_FALSE(units.parameter(u, i).grad().defined()) << "it is taken";
  }
  void take(std::size_t u, std::size_t i, std::int64_t round = 0) {
    take(u, i, gradient_of(mesh.rank(), round, u, i, units.group(u).parameters[i].sizes));
  }
  /// Makes a backward. The last unit comes first, unless `order` shuffles the units.
  void round(std::int64_t number, std::mt19937* order = nullptr) {
    std::vector<std::pair<std::size_t, std::size_t>> all;
    for (std::size_t u = units.size(); u-- > 0;) {
      for (std::size_t i = units.group(u).parameters.size(); i-- > 0;) all.emplace_back(u, i);
    }
    if (order) std::shuffle(all.begin(), all.end(), *order);
    for (const auto& [u, i] : all) take(u, i, number);
  }
  /// Checks the sums over ranks. `wanted(rank, u, i)` returns the sum of the gradients that `rank` gave for this
  /// parameter.
  template <class Wanted>
  void expect_sums(const Wanted& wanted) {
    for (std::size_t u = 0; u < units.size(); ++u) expect_sum(u, wanted);
  }
  template <class Wanted>
  void expect_sum(std::size_t u, const Wanted& wanted) {
    const FlatGroup& group = units.group(u);
    at::Tensor flat = at::zeros({group.layout.numel()});
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const FlatParameter& parameter = group.parameters[i];
      at::Tensor place = flat.as_strided(parameter.sizes, parameter.strides, group.layout.extent(i).offset);
      for (int rank = 0; rank < mesh.world_size(); ++rank) place.add_(wanted(rank, u, i));
    }
    const Extent part = group.gradient_part;
    const at::Tensor got = at::from_blob(group.gradient, {part.numel}, at::kFloat);
    EXPECT_TRUE(at::equal(got, flat.narrow(0, part.offset, part.numel))) << "unit " << u;
  }
  void expect_sums_of_rounds(std::int64_t rounds) {
    expect_sums([&](int rank, std::size_t u, std::size_t i) {
      const auto& sizes = units.group(u).parameters[i].sizes;
      at::Tensor sum = at::zeros(sizes);
      for (std::int64_t round = 0; round < rounds; ++round) sum += gradient_of(rank, round, u, i, sizes);
      return sum;
    });
  }

  const Mesh& mesh;
  HandMadeUnits units;
  Recorder recorder;
  Reducer reducer;
};

}  // namespace tessera::testing
