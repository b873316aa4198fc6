#include "engine/replay/find_nonfinite.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/isfinite.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"
#include "sharding/unit.h"
#include "sharding/unrecorded.h"

namespace tessera {

// This file looks at the results of operators through LibTorch's callbacks.
//
// `begin_operator` keeps the inputs that an operator only reads, and looks at those that it changes. `end_operator`
// looks at the results, and notes the first bad one with its unit. `begin_node` and `end_node` record which node of
// backward runs. A node belongs to the unit of the operator in forward with the same sequence number. `end_backward`
// returns the noted result, if the loss or a gradient is bad.

/// The results that were seen so far in this microbatch.
struct FindNonfinite::Seen {
  std::optional<NonfiniteResult> first;           ///< the first result with NaN or +infinity
  std::optional<NonfiniteResult> first_negative;  ///< the first result with -infinity
  bool has_bad_gradient = false;
  std::string last_unit;
  std::vector<std::string> nodes;                                  ///< the nodes of the graph that run now, nested
  std::unordered_map<std::int64_t, std::string> unit_of_sequence;  ///< by autograd's sequence number: the unit of the
                                                                   ///< operator

  /// All FindNonfinite objects of the process, and the callbacks that write to them.
  struct All {
    Mutex mutex;
    std::vector<Seen*> seen ABSL_GUARDED_BY(mutex);
    at::CallbackHandle operators ABSL_GUARDED_BY(mutex) = at::INVALID_CALLBACK_HANDLE;
    at::CallbackHandle nodes ABSL_GUARDED_BY(mutex) = at::INVALID_CALLBACK_HANDLE;
  };
  static All& all() {
    static All& each = *new All;
    return each;
  }
  template <class Body>
  static void for_each(const Body& body) {
    All& watched = all();
    const MutexLock lock(watched.mutex);
    for (Seen* seen : watched.seen) body(*seen);
  }
};

namespace {

enum class Finding : std::uint8_t { kFinite, kNegativeInfinity, kBad };

Finding finding_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta() || tensor.numel() == 0 ||
      !at::isFloatingType(tensor.scalar_type()) || !tensor.has_storage() || unit_of(tensor) != nullptr)
    return Finding::kFinite;
  const at::Tensor values = tensor.detach();
  const at::Tensor finite = at::isfinite(values);
  if (finite.all().item<bool>()) return Finding::kFinite;
  const at::Tensor negative = at::eq(values, -std::numeric_limits<double>::infinity());
  return finite.logical_or_(negative).all().item<bool>() ? Finding::kNegativeInfinity : Finding::kBad;
}

Finding finding_of(const c10::IValue& value) {
  Finding worst = Finding::kFinite;
  if (value.isTensor()) return finding_of(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) worst = std::max(worst, finding_of(each));
  }
  return worst;
}

/// Returns whether a value, such as data or a parameter, is not finite. Values that were gathered for only one operator
/// may be released already; then the answer is false.
bool is_bad(const c10::IValue& value) {
  if (value.isTensorList()) {
    const std::vector<at::Tensor> tensors = value.toTensorVector();
    return std::ranges::any_of(tensors, [](const at::Tensor& each) { return is_bad(each); });
  }
  if (!value.isTensor()) return false;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || tensor.layout() != at::kStrided || !at::isFloatingType(tensor.scalar_type())) return false;
  try {
    return !at::isfinite(tensor.detach()).all().item<bool>();
  } catch (const c10::Error&) {
    return false;
  }
}

const Unit* unit_among(at::ArrayRef<const c10::IValue> inputs) {
  for (const c10::IValue& input : inputs) {
    if (input.isTensor() && input.toTensor().defined()) {
      if (const Unit* const unit = unit_of(input.toTensor())) return unit;
    }
  }
  return nullptr;
}

/// Returns whether the results of an operator have no values yet, or are views of results that were looked at before.
bool has_no_result(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  for (const std::string_view unwritten : {"aten::empty", "aten::new_empty", "aten::resize_", "aten::set_"})
    if (name.starts_with(unwritten)) return true;
  const std::optional<c10::FunctionSchema> schema = function.operator_schema();
  if (!schema || schema->returns().empty()) return true;
  return std::ranges::all_of(schema->returns(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

/// The use of an input by an operator.
enum class InputUse : std::uint8_t {
  kRead,     ///< the operator only reads the input
  kUpdated,  ///< overwritten with a result that is computed from the input (div_): its old values are read before the
             ///< call
  kWritten,  ///< overwritten without being read, so its old values do not matter
};

const c10::StorageImpl* storage_of(const c10::IValue& input) {
  if (!input.isTensor() || !input.toTensor().defined() || !input.toTensor().has_storage()) return nullptr;
  return input.toTensor().storage().unsafeGetStorageImpl();
}

/// Returns the operator's use of each input, as [input]. An input also counts as updated if it is passed a second time
/// as the output: mul_ calls mul.out in this way.
std::vector<InputUse> uses_of(const at::RecordFunction& function) {
  const at::ArrayRef<const c10::IValue> inputs = function.inputs();
  const std::optional<c10::FunctionSchema> schema = function.operator_schema();
  const std::string_view name = function.name();
  std::vector<InputUse> uses(inputs.size(), InputUse::kRead);
  std::vector<const c10::StorageImpl*> written;
  for (std::size_t i = 0; schema && i < std::min(inputs.size(), schema->arguments().size()); ++i) {
    const c10::Argument& argument = schema->arguments()[i];
    if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) continue;
    const bool forgets = argument.is_out() || name == "aten::copy_" || name == "aten::fill_";
    uses[i] = forgets ? InputUse::kWritten : InputUse::kUpdated;
    if (storage_of(inputs[i])) written.push_back(storage_of(inputs[i]));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool is_same = std::ranges::find(written, storage_of(inputs[i])) != written.end();
    if (is_same && uses[i] == InputUse::kRead) uses[i] = InputUse::kUpdated;
  }
  return uses;
}

/// The inputs of an operator. LibTorch reports inputs only before the operator runs, and then drops its references to
/// them.
struct OperatorContext final : at::ObserverContext {
  const Unit* unit = nullptr;
  std::vector<c10::IValue> read;       ///< inputs with InputUse::kRead
  bool had_bad_updated_input = false;  ///< whether an input with InputUse::kUpdated was not finite
};

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  const Unrecorded unrecorded;
  const at::ArrayRef<const c10::IValue> inputs = function.inputs();
  const std::vector<InputUse> uses = uses_of(function);
  auto context = std::make_unique<OperatorContext>();
  context->unit = unit_among(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (uses[i] == InputUse::kRead) context->read.push_back(inputs[i]);
    // Parameters are not looked at here, since their unit may be gathered only after this function has returned.
    if (uses[i] == InputUse::kUpdated && unit_among(inputs.slice(i, 1)) == nullptr && is_bad(inputs[i]))
      context->had_bad_updated_input = true;
  }
  return context;
}

void end_operator(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto* const before = static_cast<OperatorContext*>(context);
  const Unit* const unit = before ? before->unit : nullptr;
  const Unrecorded unrecorded;
  Finding worst = Finding::kFinite;
  if (!has_no_result(function)) {
    for (const c10::IValue& output : function.outputs()) worst = std::max(worst, finding_of(output));
  }
  const auto note = [&](FindNonfinite::Seen& seen) {
    if (unit) seen.last_unit = unit->name;
    if (function.seqNr() >= 0 && seen.nodes.empty()) seen.unit_of_sequence[function.seqNr()] = seen.last_unit;
    if (worst == Finding::kFinite) return;
    auto& place = worst == Finding::kBad ? seen.first : seen.first_negative;
    if (place) return;
    NonfiniteResult result{.op = function.name(),
                           .where = seen.nodes.empty() ? "forward" : seen.nodes.back() + ", in backward",
                           .unit = seen.last_unit,
                           .reads_parameters = unit != nullptr};
    result.had_bad_input = before && (before->had_bad_updated_input || std::ranges::any_of(before->read, is_bad));
    place = std::move(result);
  };
  FindNonfinite::Seen::for_each(note);
}

std::unique_ptr<at::ObserverContext> begin_node(const at::RecordFunction& function) {
  const Unrecorded unrecorded;
  const std::string_view name = function.name();
  const bool accumulates = name.find("AccumulateGrad") != std::string_view::npos;
  bool bad = false;
  if (accumulates) {
    const auto inputs = function.inputs();
    bad = std::any_of(inputs.begin(), inputs.end(), is_bad);
  }
  FindNonfinite::Seen::for_each([&](FindNonfinite::Seen& seen) {
    seen.nodes.emplace_back(name);
    seen.has_bad_gradient = seen.has_bad_gradient || bad;
    const auto forward = seen.unit_of_sequence.find(function.seqNr());
    if (forward != seen.unit_of_sequence.end()) seen.last_unit = forward->second;
  });
  return nullptr;
}

void end_node(const at::RecordFunction&, at::ObserverContext*) {
  FindNonfinite::Seen::for_each([](FindNonfinite::Seen& seen) {
    if (!seen.nodes.empty()) seen.nodes.pop_back();
  });
}

}  // namespace

FindNonfinite::FindNonfinite() : seen_(std::make_unique<Seen>()) {
  Seen::All& all = Seen::all();
  const MutexLock lock(all.mutex);
  all.seen.push_back(seen_.get());
  if (all.seen.size() > 1) return;
  all.operators = at::addGlobalCallback(at::RecordFunctionCallback(&begin_operator, &end_operator)
                                            .needsInputs(true)
                                            .needsOutputs(true)
                                            .scopes({at::RecordScope::FUNCTION}));
  all.nodes = at::addGlobalCallback(at::RecordFunctionCallback(&begin_node, &end_node)
                                        .needsInputs(true)
                                        .scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

FindNonfinite::~FindNonfinite() {
  Seen::All& all = Seen::all();
  const MutexLock lock(all.mutex);
  std::erase(all.seen, seen_.get());
  if (!all.seen.empty()) return;
  at::removeCallback(all.operators);
  at::removeCallback(all.nodes);
}

std::optional<NonfiniteResult> FindNonfinite::end_backward(const at::Tensor& loss) {
  const Unrecorded unrecorded;  // so that the callbacks do not see the reading of the loss
  const bool is_bad_loss = !std::isfinite(loss.item<double>());
  Seen::All& all = Seen::all();
  const MutexLock lock(all.mutex);
  const bool is_wrong = seen_->has_bad_gradient || is_bad_loss;
  std::optional<NonfiniteResult> result;
  if (is_wrong) result = seen_->first ? seen_->first : seen_->first_negative;
  if (is_wrong && !result) result.emplace();  // no operator that LibTorch reports has computed the bad value
  *seen_ = Seen();
  return result;
}

void FindNonfinite::pass_over_backward() {
  Seen::All& all = Seen::all();
  const MutexLock lock(all.mutex);
  *seen_ = Seen();
}

}  // namespace tessera
