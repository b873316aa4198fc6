// Tests that operators gather the units of their inputs, and that no code gets a pointer into a unit that is not
// pinned.

#include "sharding/gather/op_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "hand_made_units.h"
#include "runtime/comm/shared/run_ranks.h"
#include "sharding/gather/residency.h"

namespace tessera::testing {
namespace {

struct Watched {
  explicit Watched(const Mesh& mesh, std::size_t count = 5)
      : units(mesh, some_units(count)),
        residency(units.plan(), units.pointers(), *units.axes().gather, {std::move(units.slots), {}}, log,
                  [](const Error& error) { ADD_FAILURE() << error.message(); }),
        watch(std::in_place) {}

  at::Tensor wanted(std::size_t u, std::size_t i) {
    return HandMadeUnits::values_of(u, i, units.group(u).parameters[i].sizes);
  }
  void expect_no_pins() {
    for (const Unit* unit : units.pointers()) EXPECT_EQ(unit->pins(), 0) << unit->name;
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

TEST(OpWatch, OperatorGathersTheUnitsOfItsInputs) {
  on_two_ranks([](Watched& w) {
    EXPECT_TRUE(at::equal(w.units.parameter(2, 0).detach() + 1, w.wanted(2, 0) + 1));
    EXPECT_EQ(w.residency.counts().gathers, 1);
    EXPECT_EQ(w.units.unit(2).state(), Unit::State::kGathered);
    EXPECT_EQ(w.units.unit(1).state(), Unit::State::kReleased);
  });
}

TEST(OpWatch, ViewsListsAndOptionalInputsAreGatheredToo) {
  on_two_ranks([](Watched& w) {
    const at::Tensor row = w.units.parameter(1, 0).select(0, 2);  // a view reads no values
    EXPECT_TRUE(at::equal((row + 0).detach(), w.wanted(1, 0).select(0, 2)));
    // The operator uses three units at once, and the plan has fewer slots.
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

// Forward saved a view of a parameter's storage. Backward also runs operators, so they gather the unit again.
TEST(OpWatch, BackwardGathersUnitsOfSavedViews) {
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

/// Returns a value for an argument of an operator that makes views of a matrix, or nothing if this test has no such
/// value.
std::optional<c10::IValue> argument(const c10::Argument& wanted, const at::Tensor& matrix) {
  const std::string& name = wanted.name();
  const c10::TypePtr& type = wanted.type();
  const auto integers = [](at::IntArrayRef values) { return c10::IValue(values.vec()); };
  if (type->isSubtypeOf(*c10::TensorType::get())) return c10::IValue(matrix);
  if (wanted.default_value()) return *wanted.default_value();
  if (type->kind() == c10::TypeKind::OptionalType) return c10::IValue();
  if (type->kind() == c10::TypeKind::BoolType) return c10::IValue(false);
  if (type->kind() == c10::TypeKind::ListType) {
    if (name.find("dim") != std::string::npos) return integers({0, 1});
    if (name.find("stride") != std::string::npos) return integers(matrix.strides());
    if (name.find("split") != std::string::npos) return integers({1, matrix.size(0) - 1});
    return integers(matrix.sizes());
  }
  if (type->kind() != c10::TypeKind::IntType && type->kind() != c10::TypeKind::SymIntType) return std::nullopt;
  if (name == "dtype") return c10::IValue(static_cast<std::int64_t>(matrix.scalar_type()));
  return c10::IValue(static_cast<std::int64_t>(name == "dim1" || name == "axis1" || name.find("size") == 0 ? 1 : 0));
}

/// Returns the results of the operator if its tensors are `matrix` and its other arguments come from `argument`.
/// Returns nothing if the operator cannot be called in this way.
std::optional<torch::jit::Stack> results_of(const c10::OperatorHandle& op, const at::Tensor& matrix) {
  torch::jit::Stack stack;
  for (const c10::Argument& wanted : op.schema().arguments()) {
    std::optional<c10::IValue> value = argument(wanted, matrix);
    if (!value) return std::nullopt;
    stack.push_back(std::move(*value));
  }
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {
    return std::nullopt;  // the operator needs arguments of other kinds
  }
  return stack;
}

// The list comes from LibTorch, so the test also covers the operators of the next version.
TEST(OpWatch, ViewOperatorsNeitherGatherNorGiveOutPointers) {
  on_two_ranks([](Watched& w) {
    std::set<std::string> tried;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (name.name.rfind("aten::", 0) != 0 || !op || op->schema().returns().empty()) continue;
      const auto is_view = [](const c10::Argument& result) {
        return result.alias_info() && !result.alias_info()->isWrite();
      };
      if (!std::ranges::all_of(op->schema().returns(), is_view)) continue;
      const at::Tensor matrix = w.units.parameter(1, 0).detach();
      const std::int64_t before = w.residency.counts().gathers;
      const auto results = results_of(*op, matrix);
      w.residency.release_all();
      if (!results) continue;
      for (const c10::IValue& result : *results) {
        std::vector<at::Tensor> views;
        if (result.isTensor()) views.push_back(result.toTensor());
        if (result.isTensorList()) views = result.toTensorVector();
        for (const at::Tensor& view : views) {
          if (!view.has_storage() || !view.is_alias_of(matrix)) continue;
          tried.insert(name.name);
          EXPECT_ANY_THROW(view.data_ptr()) << name.name << "." << name.overload_name;
          EXPECT_ANY_THROW(view.const_data_ptr()) << name.name << "." << name.overload_name;
        }
      }
      // An operator that takes a number as a tensor (narrow.Tensor) reads this tensor, and nothing else.
      const auto is_tensor = [](const c10::Argument& wanted) {
        return wanted.type()->isSubtypeOf(*c10::TensorType::get());
      };
      if (std::ranges::count_if(op->schema().arguments(), is_tensor) > 1) continue;
      EXPECT_EQ(w.residency.counts().gathers, before) << name.name << "." << name.overload_name;
    }
    for (const char* known :
         {"aten::detach", "aten::alias", "aten::t", "aten::transpose", "aten::select", "aten::slice", "aten::view",
          "aten::as_strided", "aten::expand", "aten::unbind", "aten::split", "aten::resolve_conj", "aten::resolve_neg",
          "aten::contiguous", "aten::reshape"}) {
      EXPECT_TRUE(tried.contains(known)) << known;
    }
    EXPECT_GT(tried.size(), 40u);
  });
}

// A pointer that is taken while an operator runs belongs to the operator. Afterwards another unit may get the slot.
TEST(OpWatch, GatheredUnitGivesOutPointersOnlyWhilePinned) {
  on_two_ranks([](Watched& w) {
    const at::Tensor view = w.units.parameter(1, 0).detach().t();
    EXPECT_TRUE(at::equal(view + 0, w.wanted(1, 0).t()));
    EXPECT_EQ(w.units.unit(1).state(), Unit::State::kGathered);
    EXPECT_ANY_THROW(view.data_ptr());
    w.residency.hold(w.units.unit(1));
    EXPECT_EQ(view.const_data_ptr<float>()[1], w.wanted(1, 0).t().const_data_ptr<float>()[1]);
    w.residency.unpin(w.units.unit(1));
    EXPECT_ANY_THROW(view.data_ptr());
  });
}

// Code of the program that runs inside an operator, such as a hook of saved tensors, may keep a pointer for longer.
TEST(OpWatch, HiddenPinsOfAnOperatorGiveOutNoPointers) {
  on_two_ranks([](Watched& w) {
    Unit& unit = w.units.unit(1);
    const at::Tensor values = w.units.parameter(1, 0).detach();
    w.residency.use(unit);
    EXPECT_NO_THROW(values.const_data_ptr());
    {
      const Unit::HiddenPins hidden(unit);
      EXPECT_ANY_THROW(values.const_data_ptr());
      EXPECT_TRUE(at::equal(values + 0, w.wanted(1, 0)));
      EXPECT_ANY_THROW(values.const_data_ptr()) << "the operator has ended";
      w.residency.hold(unit);
      EXPECT_NO_THROW(values.const_data_ptr());
      w.residency.unpin(unit);
    }
    EXPECT_NO_THROW(values.const_data_ptr());
    w.residency.unpin(unit);
    EXPECT_ANY_THROW(values.const_data_ptr());
  });
}

TEST(OpWatch, FailedOperatorUnpinsItsInputs) {
  on_two_ranks([](Watched& w) {
    EXPECT_ANY_THROW(w.units.parameter(1, 0) + at::ones({7, 7, 7}));
    w.expect_no_pins();
  });
}

TEST(OpWatch, OperatorsOnOtherTensorsGatherNothing) {
  on_two_ranks([](Watched& w) {
    at::ones({3, 3}).mm(at::ones({3, 3}));
    EXPECT_EQ(w.residency.counts().gathers, 0);
  });
}

TEST(OpWatch, NothingIsGatheredWithoutAWatch) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Watched w(mesh);
    // The watches of both ranks share one callback. It is removed together with the last watch.
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
