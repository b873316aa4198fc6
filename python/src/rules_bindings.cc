#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/held.h"
#include "python/src/lent.h"
#include "tessera/error.h"
#include "tessera/own_rules.h"

namespace tessera::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

/// Runs `body`, which calls Python, on any thread. A tessera.Error of Python becomes an Error. Any other exception is
/// an interrupt or the program's exit (python/tessera/_rules.py), and passes unchanged. CommHookMethod converts it to
/// an Error.
template <class Body>
auto in_python(const Body& body) {
  const py::gil_scoped_acquire gil;
  try {
    return body();
  } catch (py::error_already_set& failure) {
    if (!failure.matches(py::module_::import("tessera._error").attr("Error"))) throw;
    throw Error(static_cast<ExitCode>(failure.value().attr("exit_code").cast<int>()),
                py::str(failure.value()).cast<std::string>());
  }
}

// Each of the classes below lets C++ call a rule that the program has written in Python. They call the objects of
// python/tessera/_rules.py, which check the results of the program's functions, and report which function failed.

class PythonElements final : public ElementwiseOptimizer {
 public:
  explicit PythonElements(py::object rule) : rule_(hold(std::move(rule))) {}

  std::vector<std::string> states() const override {
    return in_python([&] { return rule_->attr("states")().cast<std::vector<std::string>>(); });
  }
  void update(Elements& e) const override {
    in_python([&] {
      Lent lent("ElementwiseOptimizer.update");
      std::vector<at::Tensor> states;
      for (const at::Tensor& state : e.states) states.push_back(lent.over(state));
      const auto [parameters, left] =
          rule_->attr("update")(e.parameters, e.gradient, states, e.lr, e.weight_decay, e.step)
              .cast<std::pair<at::Tensor, std::vector<at::Tensor>>>();
      e.parameters = lent.back(parameters);
      e.states = lent.back(left);
    });
  }

 private:
  const Held rule_;
};

class PythonMatrices final : public MatrixOptimizer {
 public:
  explicit PythonMatrices(py::object rule) : rule_(hold(std::move(rule))) {}

  std::vector<State> states(std::int64_t rows, std::int64_t columns) const override {
    return in_python([&] {
      std::vector<State> states;
      for (auto& [name, sizes] :
           rule_->attr("states")(rows, columns).cast<std::vector<std::pair<std::string, std::vector<std::int64_t>>>>())
        states.push_back({std::move(name), std::move(sizes)});
      return states;
    });
  }
  void update(Matrix& m) const override {
    in_python([&] {
      Lent lent("MatrixOptimizer.update");
      const at::Tensor parameter = lent.over(m.parameter), gradient = lent.over(m.gradient);
      std::vector<at::Tensor> states;
      for (const at::Tensor& state : m.states) states.push_back(lent.over(state));
      const auto [result, left] = rule_->attr("update")(parameter, gradient, states, m.lr, m.weight_decay, m.step)
                                      .cast<std::pair<at::Tensor, std::vector<at::Tensor>>>();
      m.parameter = lent.back(result);
      m.states = lent.back(left);
    });
  }

 private:
  const Held rule_;
};

/// Python's view of CommHook::Ranks. Python may keep the view longer than the Ranks exist.
class LentRanks {
 public:
  explicit LentRanks(CommHook::Ranks& ranks) : ranks_(&ranks) {}
  void end() { ranks_ = nullptr; }
  CommHook::Ranks& live() const {
    if (ranks_) return *ranks_;
    throw Error(
        ExitCode::kUsage,
        "Ranks were used after the call of CommHook.sum that had them. [T0867] hint: make all exchanges inside sum");
  }

 private:
  CommHook::Ranks* ranks_;
};

class PythonHook final : public CommHook {
 public:
  explicit PythonHook(py::object hook) : hook_(hold(std::move(hook))) {}

  void sum(Bucket& bucket, Ranks& ranks) override {
    in_python([&] {
      const auto theirs = std::make_shared<LentRanks>(ranks);
      const std::unique_ptr<LentRanks, void (*)(LentRanks*)> end(theirs.get(), [](LentRanks* each) { each->end(); });
      Lent lent("CommHook.sum");
      const at::Tensor gradients = lent.over(bucket.gradients);
      std::map<std::string, at::Tensor> parts;
      for (const Bucket::Part& part : bucket.parts) {
        parts[part.parameter] =
            gradients.as_strided(part.gradient.sizes(), part.gradient.strides(), part.gradient.storage_offset());
      }
      const auto result =
          hook_->attr("sum")(bucket.unit, bucket.index, bucket.step, gradients, std::move(parts), theirs);
      bucket.gradients = lent.back(result.cast<at::Tensor>());
    });
  }

 private:
  const Held hook_;
};

OwnRules rules_of(const py::object& elements, const py::object& matrices, const py::object& comm_hook) {
  OwnRules rules;
  if (!elements.is_none()) rules.elements = std::make_shared<PythonElements>(elements);
  if (!matrices.is_none()) rules.matrices = std::make_shared<PythonMatrices>(matrices);
  if (!comm_hook.is_none()) rules.comm_hook = std::make_shared<PythonHook>(comm_hook);
  return rules;
}

}  // namespace

void bind_rules(py::module_& module) {
  py::class_<OwnRules>(module, "OwnRules", py::module_local()).def(py::init(&rules_of));
  py::class_<LentRanks, std::shared_ptr<LentRanks>>(module, "Ranks", py::module_local())
      .def("rank", [](const LentRanks& ranks) { return ranks.live().rank(); })
      .def("size", [](const LentRanks& ranks) { return ranks.live().size(); })
      .def(
          "all_reduce",
          [](const LentRanks& ranks, const at::Tensor& tensor) {
            ranks.live().all_reduce(tensor);
            return tensor;
          },
          Released())
      .def(
          "all_gather",
          [](const LentRanks& ranks, const at::Tensor& tensor) { return ranks.live().all_gather(tensor); }, Released())
      .def(
          "all_to_all",
          [](const LentRanks& ranks, const at::Tensor& tensor) { return ranks.live().all_to_all(tensor); }, Released());
}

}  // namespace tessera::python
