#include "sharding/unit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "hand_made_units.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {
namespace {

TEST(Unit, StatesChangeAsTheTableSays) {
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

// On one rank nothing is sharded, so the parameters are there for good.
TEST(Unit, ParametersAreViewsOfTheBufferAndStayTheUsersTensors) {
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
    const at::Tensor view = made.parameter(1, 0).detach().select(0, 3);  // as autograd saves it
    Arena other = Arena::plain("slot", group.gathered_bytes());
    std::copy_n(group.full, group.gathered_bytes(), other.data());
    reinterpret_cast<float*>(other.data())[3 * 33] = -5.0f;
    group.attach(other.data());
    EXPECT_EQ(view.const_data_ptr<float>(), reinterpret_cast<float*>(other.data()) + 3 * 33);
    EXPECT_EQ(view[0].item<float>(), -5.0f);
  });
}

TEST(Unit, APoisonedUnitThrowsItsMessageAtWhoReadsIt) {
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

TEST(Unit, BytesAreThoseOfItsGroups) {
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
