#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/loop/recorded_norms.h"
#include "python/src/bindings.h"
#include "python/src/held.h"
#include "python/src/job.h"
#include "tessera/deferred_init.h"
#include "tessera/engine.h"
#include "tessera/error.h"
#include "tessera/module_view.h"
#include "tessera/scaling.h"
#include "tessera/uneven.h"

namespace tessera::python {

// This file binds the Engine to Python.
//
// `bind_mirror` binds the C++ side of a Python module, `bind_results` the results of steps, and `bind_guard` the scopes
// in which parameters are whole. `bind_engine` calls them and binds the Engine's functions. A function that may wait
// for other ranks, or compute for long, releases the GIL, and functions that call Python take it again. An object that
// a forked process inherited is never destroyed there.

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Replaces the buffers of `view`. A LibTorch module can get new buffers, but none can be removed from it. A new module
/// with the same parameters and children therefore replaces the old one.
void set_buffers(ModuleView& view, const NamedTensors& buffers) {
  torch::nn::Module changed(view.name());
  changed.train(view.is_training());
  for (const auto& item : view.named_parameters(/*recurse=*/false)) {
    changed.register_parameter(item.key(), item.value(), item.value().requires_grad());
  }
  for (const auto& [name, buffer] : buffers) changed.register_buffer(name, buffer);
  for (const auto& item : view.named_children()) changed.register_module(item.key(), item.value());
  static_cast<torch::nn::Module&>(view) = std::move(changed);
}

/// Returns whether the values of these dicts, one after the other, are the objects of this list. The function runs no
/// code of Python, since each backward calls it for all modules.
bool dicts_hold(const py::list& dicts, const py::list& objects) {
  std::size_t known = 0;
  PyObject *key = nullptr, *value = nullptr;
  for (const py::handle dict : dicts) {
    for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &key, &value) != 0; ++known)
      if (known == objects.size() || PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(known)) != value)
        return false;
  }
  return known == objects.size();
}

/// Binds the C++ side of a Python module: its class name, its parameters and buffers, its children. The C++ side shares
/// the TensorImpls of the Python parameters. So a change that an Engine makes to a parameter is visible in the Python
/// module, and a change that the module makes is visible in the Engine.
void bind_mirror(py::module_& module) {
  py::class_<ModuleView, std::shared_ptr<ModuleView>>(module, "Mirror", py::module_local())
      .def(py::init<std::string>())
      .def("add_parameter", &ModuleView::add_parameter)
      .def("add_buffer", &ModuleView::add_buffer)
      .def("set_buffers", &set_buffers)
      .def("add_child",
           py::overload_cast<const std::string&, const std::shared_ptr<ModuleView>&>(&ModuleView::add_module));
  py::class_<NormView, ModuleView, std::shared_ptr<NormView>>(module, "MirroredNorm", py::module_local())
      .def(py::init<std::string, bool>());
}

py::dict dict_of(const MemoryUse& use) {
  py::dict result;
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    result[py::str(name_of(category))] = use[category];
  }
  return result;
}

/// Returns the number of gradients in each bucket of ages, by the bucket's name. Empty buckets are left out.
py::dict dict_of(const AgeHistogram& ages) {
  py::dict counts;
  for (std::size_t bucket = 0; bucket < AgeHistogram::kBuckets; ++bucket) {
    if (ages.counts[bucket] > 0) counts[py::str(AgeHistogram::name_of(bucket))] = ages.counts[bucket];
  }
  return counts;
}

py::object data_seconds_of(const StepResult& result) {
  return std::isnan(result.data_seconds) ? py::object(py::none()) : py::object(py::float_(result.data_seconds));
}

py::object waited_for_rank_of(const StepResult& result) {
  return result.waited_for_rank < 0 ? py::object(py::none()) : py::object(py::int_(result.waited_for_rank));
}

py::object mfu_of(const StepResult& result) {
  return result.peak_tflops > 0 ? py::object(py::float_(result.mfu())) : py::object(py::none());
}

/// A field of a StepResult, by its name in Python: a member, or a function of the result.
template <class Get>
struct Field {
  const char* name;
  Get get;
};
template <class Get>
Field(const char*, Get) -> Field<Get>;

/// All fields, in the order in which asdict returns them.
constexpr std::tuple kStepFields{
    Field{"step", &StepResult::step},
    Field{"loss", &StepResult::loss},
    Field{"grad_norm", &StepResult::grad_norm},
    Field{"lr", &StepResult::lr},
    Field{"overflow", &StepResult::overflow},
    Field{"spike", &StepResult::spike},
    Field{"loss_scale", &StepResult::loss_scale},
    Field{"staleness_mean", &StepResult::staleness_mean},
    Field{"staleness_max", &StepResult::staleness_max},
    Field{"ages", [](const StepResult& result) { return dict_of(result.ages); }},
    Field{"missed", &StepResult::missed},
    Field{"dropped", &StepResult::dropped},
    Field{"made_again", &StepResult::made_again},
    Field{"noise_scale", &StepResult::noise_scale},
    Field{"noise_batch", &StepResult::noise_batch},
    Field{"noise_square", &StepResult::noise_square},
    Field{"noise_variance", &StepResult::noise_variance},
    Field{"tokens", &StepResult::tokens},
    Field{"seconds", &StepResult::seconds},
    Field{"communication_seconds", &StepResult::communication_seconds},
    Field{"communication_share", &StepResult::communication_share},
    Field{"tokens_per_second", &StepResult::tokens_per_second},
    Field{"waited_for_rank", &waited_for_rank_of},
    Field{"waited_for_seconds", &StepResult::waited_for_seconds},
    Field{"data_seconds", &data_seconds_of},
    Field{"batch_seconds", &StepResult::batch_seconds},
    Field{"upload_seconds", &StepResult::upload_seconds},
    Field{"flop", &StepResult::flop},
    Field{"tflops", &StepResult::tflops},
    Field{"mfu", &mfu_of},
    Field{"planned", [](const StepResult& result) { return dict_of(result.planned); }},
    Field{"allocated", [](const StepResult& result) { return dict_of(result.allocated); }}};

/// Returns the fields by name, for logs.
py::dict dict_of(const StepResult& result) {
  py::dict fields;
  std::apply([&](const auto&... field) { ((fields[field.name] = std::invoke(field.get, result)), ...); }, kStepFields);
  return fields;
}

std::string text_of(const StepResult& result) {
  std::string text;
  for (const auto& [name, value] : dict_of(result)) {
    text += (text.empty() ? "" : ", ") + py::str(name).cast<std::string>() + "=" + py::repr(value).cast<std::string>();
  }
  return "StepResult(" + text + ")";
}

void bind_results(py::module_& module) {
  py::class_<StepResult> results(module, "StepResult", py::module_local());
  const auto bind = [&](const auto& field) {
    results.def_property_readonly(field.name,
                                  [get = field.get](const StepResult& result) { return std::invoke(get, result); });
  };
  std::apply([&](const auto&... field) { (bind(field), ...); }, kStepFields);
  results.def("asdict", [](const StepResult& result) { return dict_of(result); })
      .def("__repr__", &text_of)
      .def("is_known", &StepResult::is_known)
      .def("wait", &StepResult::wait, Released());
  py::class_<PlannedMemory>(module, "PlannedMemory", py::module_local())
      .def_property_readonly("use", [](const PlannedMemory& plan) { return dict_of(plan.use); })
      .def_property_readonly("total", [](const PlannedMemory& plan) { return plan.use.total(); })
      .def_property_readonly("limited", [](const PlannedMemory& plan) { return plan.use.limited(); })
      .def_readonly("streamed_bytes", &PlannedMemory::streamed_bytes)
      .def_readonly("uploaded_bytes", &PlannedMemory::uploaded_bytes)
      .def_property_readonly("gradient_bytes_to_host", [](const PlannedMemory& plan) { return plan.gradients.to_host; })
      .def_property_readonly("gradient_bytes_to_gpu", [](const PlannedMemory& plan) { return plan.gradients.to_gpu; })
      .def_property_readonly("bytes_to_host", [](const PlannedMemory& plan) { return plan.host_step.to_host; })
      .def_property_readonly("bytes_to_gpu", [](const PlannedMemory& plan) { return plan.host_step.to_gpu; })
      .def_property_readonly("disk_bytes", [](const PlannedMemory& plan) { return plan.disk.bytes; })
      .def_readonly("table", &PlannedMemory::table)
      .def("__str__", [](const PlannedMemory& plan) { return plan.table; });
}

/// Destroys an Engine, but only in the process that made it: a forked process has a copy, and the rank still uses the
/// Engine.
void destroy(Engine* engine, pid_t owner) {
  if (owner != getpid()) return;
  const py::gil_scoped_release released;
  delete engine;
}

EnginePointer make_engine(const std::shared_ptr<ModuleView>& mirror, const Strategy& strategy, const OwnRules& own) {
  const pid_t owner = getpid();
  Engine* engine = nullptr;
  {
    const py::gil_scoped_release released;
    engine = new Engine(mirror, strategy, Job::join(strategy), own);
  }
  return {engine, [owner](Engine* pointer) { destroy(pointer, owner); }};
}

void expect_own_process() {
  if (!Job::is_forked()) return;
  throw Error(ExitCode::kUsage,
              "an Engine was used in a process that was forked from its rank. [T0389] hint: train in the process that "
              "made it; workers of a DataLoader only load data");
}

/// Drops a guard as if an exception left its block: nothing is written back, and this rank does not wait for the other
/// ranks.
template <class Guard>
void abandon(std::unique_ptr<Guard> guard) {
  struct Leaving {};
  try {
    const std::unique_ptr<Guard> passed = std::move(guard);
    throw Leaving{};
  } catch (const Leaving&) {
  }
}

/// Holds a Gathered or an EmaWeights for a `with` statement. It keeps the Engine alive.
template <class Guard>
class Guarding {
 public:
  template <class... Arguments>
  explicit Guarding(EnginePointer engine, const Arguments&... arguments)
      : engine_(std::move(engine)), guard_(std::make_unique<Guard>(*engine_, arguments...)) {}
  ~Guarding() {
    if (guard_ && !Job::is_forked()) abandon(std::move(guard_));
    [[maybe_unused]] const auto* leaked = guard_.release();
  }
  Guarding(const Guarding&) = delete;
  Guarding& operator=(const Guarding&) = delete;

  void close() {
    if (const std::unique_ptr<Guard> guard = std::move(guard_)) guard->close();
  }
  void drop() {
    if (guard_) abandon(std::move(guard_));
  }

 private:
  EnginePointer engine_;
  std::unique_ptr<Guard> guard_;
};

template <class Guard>
void bind_guard(py::module_& module, const char* name) {
  py::class_<Guarding<Guard>>(module, name, py::module_local())
      .def("close", &Guarding<Guard>::close, Released())
      .def("drop", &Guarding<Guard>::drop, Released());
}

/// Gives the batches of a Python iterator to Engine::evaluate as a C++ range. A batch is held so that it can be copied
/// and dropped without the GIL.
class Batches {
 public:
  using Batch = Held;
  struct End {};
  class Iterator {
   public:
    explicit Iterator(py::iterator* source) : source_(source) { fetch(); }
    const Batch& operator*() const { return batch_; }
    Iterator& operator++() {
      fetch();
      return *this;
    }
    bool operator!=(End) const { return batch_ != nullptr; }

   private:
    void fetch() {
      const py::gil_scoped_acquire gil;
      PyObject* const next = PyIter_Next(source_->ptr());
      if (!next && PyErr_Occurred()) throw py::error_already_set();
      batch_ = next ? hold(py::reinterpret_steal<py::object>(next)) : nullptr;
    }
    py::iterator* source_;
    Batch batch_;
  };

  explicit Batches(py::iterator source) : source_(std::move(source)) {}
  Iterator begin() { return Iterator(&source_); }
  static End end() { return {}; }

 private:
  py::iterator source_;
};

std::tuple<double, std::int64_t, double> evaluate(Engine& engine, const py::iterable& loader,
                                                  const py::function& loss_of) {
  expect_own_process();
  Batches batches(py::iter(loader));
  const py::gil_scoped_release released;
  const Engine::Evaluation found = engine.evaluate(batches, [&](const Batches::Batch& batch) {
    const py::gil_scoped_acquire gil;
    auto [loss, weight] = loss_of(*batch).cast<std::pair<at::Tensor, double>>();
    return WeightedLoss{std::move(loss), weight};
  });
  return {found.loss, found.batches, found.weight};
}

void backward_of(const at::Tensor& loss, const std::vector<EnginePointer>& engines, std::int64_t tokens,
                 std::int64_t samples, bool retain_graph, double weight) {
  expect_own_process();
  std::vector<Engine*> pointers;
  for (const EnginePointer& engine : engines) pointers.push_back(engine.get());
  const py::gil_scoped_release released;
  backward(loss, pointers, {tokens, samples, retain_graph, weight});
}

Gathered::Mode mode_of(const std::string& name) {
  if (name == "write") return Gathered::kWrite;
  return name == "ema" ? Gathered::kEma : Gathered::kRead;
}

py::list list_of(const std::vector<CallLatency>& latencies) {
  py::list all;
  for (const CallLatency& each : latencies) {
    py::dict fields;
    fields["call"] = each.call;
    fields["unit"] = each.unit;
    fields["count"] = each.count;
    fields["p50"] = each.p50;
    fields["p95"] = each.p95;
    fields["p99"] = each.p99;
    fields["max"] = each.max;
    all.append(fields);
  }
  return all;
}

py::dict dict_of(const TrafficCounts& counts) {
  py::dict result;
  result["gathers"] = counts.gathers;
  result["gathered_bytes"] = counts.gathered_bytes;
  result["prefetched_gathers"] = counts.prefetched_gathers;
  result["reductions"] = counts.reductions;
  result["reduced_bytes"] = counts.reduced_bytes;
  result["overflow_slots"] = counts.overflow_slots;
  result["overflow_buckets"] = counts.overflow_buckets;
  result["gather_seconds"] = counts.gather_seconds;
  result["reduction_seconds"] = counts.reduction_seconds;
  result["disk_bytes_read"] = counts.disk_bytes_read;
  result["disk_bytes_written"] = counts.disk_bytes_written;
  result["disk_wait_seconds"] = counts.disk_wait_seconds;
  result["streamed_bytes"] = counts.streamed_bytes;
  result["uploaded_bytes"] = counts.uploaded_bytes;
  result["gradient_bytes_to_host"] = counts.gradients.to_host;
  result["gradient_bytes_to_gpu"] = counts.gradients.to_gpu;
  result["bytes_to_host"] = counts.host_step.to_host;
  result["bytes_to_gpu"] = counts.host_step.to_gpu;
  return result;
}

/// An UnevenLoop that keeps the Engine alive. `on_step`: a function, or None.
class UnevenLooping {
 public:
  UnevenLooping(EnginePointer engine, py::object on_step)
      : engine_(std::move(engine)), on_step_(std::move(on_step)), loop_(*engine_, [this](const StepResult& result) {
          const py::gil_scoped_acquire gil;
          if (!on_step_.is_none()) on_step_(result);
        }) {}
  bool next(bool has_batch) {
    expect_own_process();
    return loop_.next(has_batch);
  }

 private:
  EnginePointer engine_;
  py::object on_step_;
  UnevenLoop loop_;
};

/// The scope of `with tessera.deferred_init():`. It ends on the thread that began it.
class Deferring {
 public:
  Deferring() { scope_.emplace(); }
  void end() { scope_.reset(); }

 private:
  std::optional<DeferredInitScope> scope_;
};

/// Reads one entry of "optimizer.groups" from JSON. Throws tessera::Error (78) if the entry is wrong.
ParameterGroup group_from(const std::string& json, OptimizerType type) {
  const std::string text = R"({"optimizer": {"type": ")" + name_of(type) + R"(", "groups": [)" + json + "]}}";
  return Strategy::from_json(text, "add_group").optimizer.groups.at(0);
}

PlannedMemory plan_of(const std::shared_ptr<ModuleView>& mirror, const Strategy& strategy, const OwnRules& own,
                      int world_size, int hosts) {
  if (world_size < 1 || hosts < 1 || world_size % hosts != 0) {
    throw Error(ExitCode::kUsage, "plan: " + std::to_string(world_size) + " ranks do not fill " +
                                      std::to_string(hosts) + " hosts evenly. [T0390] hint: give a multiple of hosts");
  }
  Topology topology;
  topology.world_size = world_size;
  topology.local_world_size = world_size / hosts;
  topology.launcher = "plan";
  return plan_memory(*mirror, strategy, topology, own);
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_mirror(module);
  bind_results(module);
  bind_guard<Gathered>(module, "Gathered");
  bind_guard<EmaWeights>(module, "EmaWeights");

  py::class_<Engine, EnginePointer>(module, "Engine", py::module_local())
      .def(py::init(&make_engine))
      .def("step",
           [](Engine& engine, bool partial) {
             expect_own_process();
             const py::gil_scoped_release released;
             return engine.step(partial);
           })
      .def("backward_nothing",
           [](Engine& engine) {
             expect_own_process();
             const py::gil_scoped_release released;
             engine.backward_nothing();
           })
      .def("evaluate", &evaluate)
      .def("zero_grad", &Engine::zero_grad, Released())
      .def("set_trainable",
           [](Engine& engine, const std::vector<std::string>& patterns, bool trainable) {
             const py::gil_scoped_release released;
             engine.set_trainable(patterns, trainable);
           })
      .def("add_group",
           [](Engine& engine, const std::string& group) {
             const py::gil_scoped_release released;
             engine.add_group(group_from(group, engine.strategy().optimizer.type));
           })
      .def("set_lr", py::overload_cast<double>(&Engine::set_lr))
      .def("set_lr", [](Engine& engine, double lr, const std::string& group) { engine.set_lr(group, lr); })
      .def("set_option", py::overload_cast<const std::string&, double>(&Engine::set_option))
      .def("set_option", py::overload_cast<const std::string&, std::pair<double, double>>(&Engine::set_option))
      .def("set_option", py::overload_cast<const std::string&, const std::string&, double>(&Engine::set_option))
      .def("set_option",
           py::overload_cast<const std::string&, const std::string&, std::pair<double, double>>(&Engine::set_option))
      .def("options", py::overload_cast<>(&Engine::options, py::const_))
      .def("options", py::overload_cast<const std::string&>(&Engine::options, py::const_))
      .def("lr", py::overload_cast<>(&Engine::lr, py::const_), Released())
      .def("lr", py::overload_cast<const std::string&>(&Engine::lr, py::const_), Released())
      .def("step_is_due", &Engine::step_is_due)
      .def("take_step", &Engine::take_step, Released())
      .def("steps_are_over", &Engine::steps_are_over)
      .def("writes_results", &Engine::writes_results)
      .def("note_results_written", &Engine::note_results_written, Released())
      .def("microbatch", &Engine::microbatch)
      .def("microbatches",
           [](const Engine& engine) {
             const MicrobatchRun run = engine.microbatches();
             return std::pair(run.begin, run.end);
           })
      .def("device", &Engine::device)
      .def("strategy", [](const Engine& engine) { return engine.strategy().to_json(); })
      .def("plan", &Engine::plan)
      .def("allocated", [](const Engine& engine) { return dict_of(engine.allocated()); })
      .def("traffic", [](const Engine& engine) { return dict_of(engine.traffic()); })
      .def("steps_applied", &Engine::steps_applied, Released())
      .def("samples_seen", &Engine::samples_seen, Released())
      .def("set_epoch_samples", &Engine::set_epoch_samples, Released())
      .def("loss_scale", &Engine::loss_scale, Released())
      .def("unit_names", &Engine::unit_names)
      .def("time_data", &Engine::time_data)
      .def("set_peak_tflops", &Engine::set_peak_tflops)
      .def("time_calls", &Engine::time_calls)
      .def("staleness", [](const Engine& engine) { return dict_of(engine.staleness()); })
      .def("latencies", [](const Engine& engine) { return list_of(engine.latencies()); })
      .def("enter_forked_process", &Engine::enter_forked_process)
      .def("gathered",
           [](const EnginePointer& engine, const std::string& mode) {
             expect_own_process();
             const py::gil_scoped_release released;
             return std::make_unique<Guarding<Gathered>>(engine, mode_of(mode));
           })
      .def("gathered",
           [](const EnginePointer& engine, const std::string& mode, const std::vector<at::Tensor>& parameters) {
             expect_own_process();
             const py::gil_scoped_release released;
             return std::make_unique<Guarding<Gathered>>(engine, parameters, mode_of(mode));
           })
      .def("ema_weights", [](const EnginePointer& engine) {
        expect_own_process();
        const py::gil_scoped_release released;
        return std::make_unique<Guarding<EmaWeights>>(engine);
      });
  module.def("backward", &backward_of);
  module.def("dicts_hold", &dicts_hold);
  module.def("scaled_speedup", &scaled_speedup);
  module.def("scaling_efficiency", &scaling_efficiency);
  py::class_<UnevenLooping>(module, "UnevenLoop", py::module_local())
      .def(py::init<EnginePointer, py::object>())
      .def("next", &UnevenLooping::next, Released());
  module.def("plan", &plan_of);
  module.def("is_deferred", &is_deferred);
  py::class_<Deferring>(module, "Deferring", py::module_local()).def(py::init<>()).def("end", &Deferring::end);
}

}  // namespace tessera::python
