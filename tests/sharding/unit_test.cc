// Tests units: their states, and parameters that are views of the unit's buffer.

#include "sharding/unit.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "hand_made_units.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"

namespace tessera::testing {
namespace {

TEST(Unit, OnlyListedStateChangesAreAllowed) {
  using enum Unit::State;
  const auto in_state = [](Unit::State state) {
    auto unit = std::make_unique<Unit>(0, "unit");
    if (state != kReleased) unit->become(state);
    return unit;
  };
  const std::pair<Unit::State, Unit::State> allowed[] = {{kReleased, kGathering},
                                                         {kReleased, kGathered},
                                                         {kGathering, kGathered},
                                                         {kGathering, kReleased},
                                                         {kGathered, kReleased}};
  for (const Unit::State from : {kReleased, kGathering, kGathered}) {
    for (const Unit::State to : {kReleased, kGathering, kGathered}) {
      const auto unit = in_state(from);
      const bool is_allowed =
          std::find(std::begin(allowed), std::end(allowed), std::pair(from, to)) != std::end(allowed);
      if (is_allowed) {
        unit->become(to);
        EXPECT_EQ(unit->state(), to);
      } else {
        EXPECT_THROW(unit->become(to), c10::Error) << static_cast<int>(from) << " to " << static_cast<int>(to);
        EXPECT_EQ(unit->state(), from);
      }
    }
  }
}

// One rank does not shard anything, so its parameters are always in memory.
TEST(Unit, ParametersAreViewsOfTheBufferInTheUsersTensors) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(3));
    for (std::size_t u = 0; u < made.size(); ++u) {
      const FlatGroup& group = made.group(u);
      for (std::size_t i = 0; i < group.parameters.size(); ++i) {
        const FlatParameter& parameter = group.parameters[i];
        const at::Tensor wanted = HandMadeUnits::values_of(u, i, parameter.sizes);
        EXPECT_TRUE(at::equal(parameter.tensor, wanted));
        EXPECT_TRUE(parameter.tensor.requires_grad() && parameter.tensor.is_leaf());
        auto* const flat = reinterpret_cast<float*>(group.full) + group.layout.extent(i).offset;
        EXPECT_EQ(parameter.tensor.const_data_ptr<float>(), flat);
      }
    }
  });
}

TEST(Unit, RebasingKeepsTheTensorAndItsStrides) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(1));
    FlatGroup& group = made.group(0);
    FlatParameter turned{at::ones({5, 7}).t().detach().requires_grad_(), "turned", {}, {7, 5}, {1, 7}, 35};
    const c10::TensorImpl* const impl = turned.tensor.unsafeGetTensorImpl();
    rebase(turned, group, 32);
    EXPECT_EQ(turned.tensor.unsafeGetTensorImpl(), impl);
    EXPECT_EQ(turned.tensor.sizes(), at::IntArrayRef({7, 5}));
    EXPECT_EQ(turned.tensor.strides(), at::IntArrayRef({1, 7}));
    EXPECT_EQ(turned.tensor.storage_offset(), 32);
    EXPECT_TRUE(turned.tensor.requires_grad());
  });
}

TEST(Unit, ViewsFollowTheParametersToOtherMemory) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(2));
    FlatGroup& group = made.group(1);
    const at::Tensor view = made.parameter(1, 0).detach().select(0, 3);  // autograd saves such a view
    Arena other = Arena::plain("slot", group.gathered_bytes());
    std::copy_n(group.full, group.gathered_bytes(), other.data());
    reinterpret_cast<float*>(other.data())[3 * 33] = -5.0f;
    group.attach(other.data());
    EXPECT_EQ(view.const_data_ptr<float>(), reinterpret_cast<float*>(other.data()) + 3 * 33);
    EXPECT_EQ(view[0].item<float>(), -5.0f);
  });
}

TEST(Unit, ReadingAPoisonedUnitThrowsItsMessage) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(2));
    made.unit(1).poison("unit 1 is lost");
    try {
      made.parameter(1, 0).detach().add(1.0);
      ADD_FAILURE() << "it can be read";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("unit 1 is lost"), std::string::npos) << error.what();
    }
    EXPECT_NO_THROW(made.parameter(0, 0).detach().add(1.0));
  });
}

// There are several ranks, so units are released.
TEST(Unit, ReadingAReleasedUnitNamesItAndTheRemedy) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(3));
    try {
      (void)made.parameter(2, 1).const_data_ptr<float>();
      ADD_FAILURE() << "it can be read";
    } catch (const c10::Error& error) {
      for (const char* text : {"unit 2", "parameter 0", "sharded", "tessera::Gathered"}) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
      }
    }
  });
}

TEST(Unit, ParametersAreInPlaceWhetherGatheredOrReleased) {
  for (const int ranks : {1, 2}) {
    run_ranks({.ranks = ranks}, [](const Mesh& mesh) {
      HandMadeUnits made(mesh, some_units(3));
      for (std::size_t u = 0; u < made.size(); ++u) {
        for (const std::size_t i : {0u, 1u}) {
          EXPECT_TRUE(is_in_place(made.group(u), i)) << u << " " << i;
          EXPECT_NO_THROW(expect_in_place(made.group(u), i));
        }
      }
    });
  }
}

/// Checks that the unit notices when `leave` gives other memory to parameter 1 of unit 1. The other parameters keep
/// their memory.
void expect_noticed(const std::function<void(HandMadeUnits&, at::Tensor&)>& leave) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(3));
    FlatGroup& group = made.group(1);
    {
      const at::NoGradGuard no_grad;
      leave(made, made.parameter(1, 1));
    }
    EXPECT_TRUE(is_in_place(group, 0));
    EXPECT_FALSE(is_in_place(group, 1));
    try {
      expect_in_place(group, 1);
      ADD_FAILURE() << "it was not noticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kUsage);
      for (const char* text : {"unit 1.parameter 1", "was given other memory", "Gathered::kWrite"}) {
        EXPECT_THAT(error.message(), ::testing::HasSubstr(text));
      }
    }
  });
}

TEST(Unit, ParameterGivenOtherMemoryIsNamed) {
  expect_noticed([](HandMadeUnits&, at::Tensor& parameter) { parameter.set_data(parameter.detach().clone()); });
  expect_noticed([](HandMadeUnits&, at::Tensor& parameter) { parameter.set_(at::ones(parameter.sizes())); });
  expect_noticed([](HandMadeUnits&, at::Tensor& parameter) { parameter.set_data(parameter.to(at::kDouble)); });
  const auto as_far_into_it = [](HandMadeUnits&, at::Tensor& parameter) {
    const std::int64_t offset = parameter.storage_offset(), numel = parameter.numel();
    parameter.set_data(at::ones({offset + numel}).narrow(0, offset, numel));
  };
  expect_noticed(as_far_into_it);
}

TEST(Unit, ParameterMovedWithinTheBuffersIsNamed) {
  const auto beside = [](HandMadeUnits& made, at::Tensor& parameter) {
    const at::Tensor place = made.parameter(1, 0).detach();
    parameter.set_data(place.flatten().narrow(0, 64, parameter.numel()));
  };
  expect_noticed(beside);
  const auto in_another_unit = [](HandMadeUnits& made, at::Tensor& parameter) {
    parameter.set_data(made.parameter(2, 1).detach().narrow(0, 0, parameter.numel()));
  };
  expect_noticed(in_another_unit);
  // Other views that begin at the parameter's own offset.
  expect_noticed([](HandMadeUnits&, at::Tensor& parameter) { parameter.set_data(parameter.detach().unsqueeze(0)); });
  expect_noticed([](HandMadeUnits&, at::Tensor& parameter) { parameter.set_data(parameter.detach().narrow(0, 0, 1)); });
  expect_noticed([](HandMadeUnits&, at::Tensor& parameter) {
    parameter.set_data(parameter.detach().as_strided(parameter.sizes(), {0}));
  });
}

TEST(Unit, BytesAreTheSumOfItsGroups) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(3));
    for (std::size_t u = 0; u < made.size(); ++u) {
      const UnitShape shape = made.unit(u).shape();
      EXPECT_EQ(shape.gathered_bytes(), made.unit(u).gathered_bytes());
      EXPECT_EQ(shape.trainable_numel(), made.group(u).layout.numel());
      EXPECT_EQ(shape.gathered_bytes(), 4 * shape.trainable_numel());
    }
  });
}

}  // namespace
}  // namespace tessera::testing
