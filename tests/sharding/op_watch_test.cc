#include "sharding/op_watch.h"

#include <gtest/gtest.h>

#include <optional>

#include "hand_made_units.h"
#include "runtime/comm/shared/run_ranks.h"
#include "sharding/residency.h"

namespace tessera::testing {
namespace {

struct Watched {
  explicit Watched(const Mesh& mesh, std::size_t count = 5)
      : units(mesh, some_units(count)),
        residency(units.plan(), units.pointers(), *units.axes().gather, std::move(units.slots), {}, log,
                  [](const Error& error) { ADD_FAILURE() << error.message(); }),
        watch(std::in_place) {}

  at::Tensor wanted(std::size_t u, std::size_t i) {
    return HandMadeUnits::values_of(u, i, units.group(u).parameters[i].sizes);
  }
  void expect_no_pins() {
    for (const Unit* unit : units.pointers()) EXPECT_EQ(unit->pins, 0) << unit->name;
  }

  HandMadeUnits units;
  GatherLog log{1};
  Residency residency;
  std::optional<OpWatch> watch;
};

template <class Body>
void on_two_ranks(const Body& body) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Watched watched(mesh);
    body(watched);
    watched.expect_no_pins();
  });
}

TEST(OpWatch, AnOperatorFindsItsInputsGathered) {
  on_two_ranks([](Watched& w) {
    EXPECT_TRUE(at::equal(w.units.parameter(2, 0).detach() + 1, w.wanted(2, 0) + 1));
    EXPECT_EQ(w.residency.counts().gathers, 1);
    EXPECT_EQ(w.units.unit(2).state(), Unit::State::kGathered);
    EXPECT_EQ(w.units.unit(1).state(), Unit::State::kReleased);
  });
}

TEST(OpWatch, ViewsListsAndOptionalsLeadToTheirUnitsToo) {
  on_two_ranks([](Watched& w) {
    const at::Tensor row = w.units.parameter(1, 0).select(0, 2);  // a view reads nothing
    EXPECT_TRUE(at::equal((row + 0).detach(), w.wanted(1, 0).select(0, 2)));
    // Three units at once, more than the plan has slots for.
    const at::Tensor all =
        at::cat({w.units.parameter(1, 1), w.units.parameter(2, 1), w.units.parameter(3, 1)}).detach();
    EXPECT_TRUE(at::equal(all, at::cat({w.wanted(1, 1), w.wanted(2, 1), w.wanted(3, 1)})));
    const std::int64_t width = w.units.parameter(4, 1).size(0);
    const at::Tensor x = at::ones({2, 33});
    EXPECT_TRUE(at::equal(at::linear(x, w.units.parameter(4, 0), w.units.parameter(4, 1)).detach(),
                          at::linear(x, w.wanted(4, 0), w.wanted(4, 1))));
    EXPECT_EQ(width, 24);
  });
}

// What forward saved of a parameter is a view of its storage: backward, an operator too, gathers it again.
TEST(OpWatch, BackwardGathersWhatForwardSaved) {
  on_two_ranks([](Watched& w) {
    at::Tensor x = at::ones({3, 33}).requires_grad_();
    at::Tensor wanted = at::zeros({3, 33});
    std::vector<at::Tensor> losses;
    for (const std::size_t u : {1u, 2u, 3u, 4u}) {
      losses.push_back(at::linear(x, w.units.parameter(u, 0)).sum());
      wanted += w.wanted(u, 0).sum(0);
    }
    EXPECT_LE(w.residency.counts().overflow_slots, 0);
    const std::int64_t before = w.residency.counts().gathers;
    at::stack(losses).sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), wanted));
    EXPECT_GT(w.residency.counts().gathers, before);
  });
}

TEST(OpWatch, AnErrorInAnOperatorUnpins) {
  on_two_ranks([](Watched& w) {
    EXPECT_ANY_THROW(w.units.parameter(1, 0) + at::ones({7, 7, 7}));
    w.expect_no_pins();
  });
}

TEST(OpWatch, OtherOperatorsGatherNothing) {
  on_two_ranks([](Watched& w) {
    at::ones({3, 3}).mm(at::ones({3, 3}));
    EXPECT_EQ(w.residency.counts().gathers, 0);
  });
}

TEST(OpWatch, WithoutOneNothingIsGathered) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Watched w(mesh);
    // Both ranks' watches are one callback: it goes with the last of them.
    throw_if_error(w.units.axes().control->barrier("both watch").wait());
    w.watch.reset();
    throw_if_error(w.units.axes().control->barrier("neither watches").wait());
    EXPECT_ANY_THROW(w.units.parameter(1, 0).detach().add(1.0));
    EXPECT_EQ(w.residency.counts().gathers, 0);
    throw_if_error(w.units.axes().control->barrier("seen").wait());
    w.watch.emplace();
    EXPECT_TRUE(at::equal(w.units.parameter(1, 0).detach() + 0, w.wanted(1, 0)));
  });
}

}  // namespace
}  // namespace tessera::testing
