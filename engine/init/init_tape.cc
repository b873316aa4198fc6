#include "engine/init/init_tape.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <queue>

#include "engine/init/known_draws.h"
#include "runtime/base/process/on_threads.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// This file works as follows. While a DeferredInitScope lives, the dispatcher gives every operator of its thread to
// `record`. `describe` copies the arguments and takes deferred tensors out of them (each becomes a Patch).
// `run_for_shapes` runs the operator on the device "meta", so the module gets tensors with shapes and no memory. Each
// of their storages has a pointer to this tape, and a number. `draw` advances the generator as if the operator had run.
// `replay` goes backwards through the tape for the nodes that are needed (`needed_for`), splits them into independent
// parts, and plays each part on real memory.

/// The context of a deferred storage's data pointer, which has no data.
struct DeferredContext {
  std::shared_ptr<InitTape> tape;
  InitTape::StorageId storage;
};

void delete_context(void* context) { delete static_cast<DeferredContext*>(context); }

const DeferredContext* context_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &delete_context ? static_cast<DeferredContext*>(data.get_context()) : nullptr;
}

std::ptrdiff_t index_of_argument(const c10::FunctionSchema& schema, const char* name) {
  const auto& arguments = schema.arguments();
  const auto found = std::find_if(arguments.begin(), arguments.end(), [&](const auto& a) { return a.name() == name; });
  return found == arguments.end() ? -1 : found - arguments.begin();
}

bool writes_argument(const c10::FunctionSchema& schema, std::size_t argument) {
  const auto* alias = schema.arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool is_seeded(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool gives_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->kind() == c10::TypeKind::ListType;
  });
}

/// Returns whether the operator works in place and overwrites all of `self` without reading it.
bool fills(const c10::OperatorHandle& op) {
  static const std::array<std::string, 8> kFills = {"aten::normal_", "aten::uniform_",     "aten::zero_",
                                                    "aten::fill_",   "aten::exponential_", "aten::random_",
                                                    "aten::cauchy_", "aten::log_normal_"};
  return std::find(kFills.begin(), kFills.end(), op.schema().name()) != kFills.end();
}

}  // namespace

void for_each_tensor(c10::ArrayRef<c10::IValue> arguments,
                     const std::function<void(std::size_t, std::ptrdiff_t, const at::Tensor&)>& visit) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(i, -1, value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toTensorList();
      for (std::size_t k = 0; k < list.size(); ++k) {
        if (const at::Tensor tensor = list.get(k); tensor.defined()) visit(i, k, tensor);
      }
    } else if (value.isOptionalTensorList()) {
      const auto list = value.toOptionalTensorList();
      for (std::size_t k = 0; k < list.size(); ++k) {
        if (const auto tensor = list.get(k); tensor && tensor->defined()) visit(i, k, *tensor);
      }
    }
  }
}

void put(std::vector<c10::IValue>& arguments, std::size_t argument, std::ptrdiff_t element, at::Tensor tensor) {
  if (element < 0) {
    arguments[argument] = std::move(tensor);
  } else if (arguments[argument].isTensorList()) {
    arguments[argument].toTensorList().set(element, std::move(tensor));
  } else {
    arguments[argument].toOptionalTensorList().set(element, std::move(tensor));
  }
}

std::vector<c10::IValue> copy_with_own_lists(const std::vector<c10::IValue>& arguments) {
  std::vector<c10::IValue> copy = arguments;
  for (c10::IValue& value : copy) {
    if (value.isTensorList())
      value = value.toTensorList().copy();
    else if (value.isOptionalTensorList())
      value = value.toOptionalTensorList().copy();
  }
  return copy;
}

const c10::IValue* InitTape::Node::argument(const char* name) const {
  const auto i = index_of_argument(op.schema(), name);
  return i < 0 ? nullptr : &arguments[static_cast<std::size_t>(i)];
}

bool InitTape::Place::whole() const {
  std::size_t numel = 1;
  for (std::int64_t size : sizes) numel *= size;
  return offset == 0 && numel * c10::elementSize(dtype) == storage_bytes;
}

bool InitTape::Place::contiguous() const {
  if (!whole()) return false;
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != stride) return false;
    stride *= sizes[i];
  }
  return true;
}

std::shared_ptr<InitTape> tape_of(const at::Tensor& tensor) {
  const DeferredContext* context = context_of(tensor);
  return context ? context->tape : nullptr;
}

InitTape::Place place_of(const at::Tensor& tensor) {
  const DeferredContext* context = context_of(tensor);
  TORCH_INTERNAL_ASSERT(context, "not a deferred tensor");
  return {context->storage,     tensor.storage().nbytes(), tensor.scalar_type(),
          tensor.sizes().vec(), tensor.strides().vec(),    tensor.storage_offset()};
}

at::Tensor view_on(const c10::Storage& storage, const InitTape::Place& place) {
  const at::NoGradGuard no_grad;
  return at::empty({0}, at::TensorOptions(place.dtype).device(storage.device()))
      .set_(storage, place.offset, place.sizes, place.strides);
}

void InitTape::record(const c10::OperatorHandle& op, Stack* stack) {
  Node node = describe(op, *stack);
  const c10::FunctionSchema& schema = op.schema();
  bool any_tensor = false;
  for_each_tensor(node.arguments, [&](std::size_t, std::ptrdiff_t, const at::Tensor&) { any_tensor = true; });
  const bool factory = node.patches.empty() && !any_tensor && index_of_argument(schema, "device") >= 0;
  if (node.patches.empty() && !factory) return op.callBoxed(stack);
  if (!gives_tensors(schema) && node.writes.empty()) return run_with_values(node, stack);
  if (!run_for_shapes(node, stack)) return run_with_values(node, stack);
  note_outputs(node, *stack);
  if (node.creates.empty() && node.writes.empty()) return;  // the result is a view
  if (content_ == Content::kShapesOnly) return;
  if (is_seeded(op)) draw(node);
  append(std::move(node));
}

InitTape::Node InitTape::describe(const c10::OperatorHandle& op, const Stack& stack) const {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  Node node{
      op, copy_with_own_lists({stack.end() - static_cast<std::ptrdiff_t>(count), stack.end()}), {}, {}, {}, false, {},
      {}};
  // The device of deferred tensors is "meta". A program that asks for a tensor on "meta" then wants it on the device of
  // the real tensors.
  if (const auto i = index_of_argument(schema, "device"); i >= 0) {
    c10::IValue& device = node.arguments[static_cast<std::size_t>(i)];
    if (device.isDevice() && device.toDevice().is_meta()) device = at::Device(at::kCPU);
  }
  for_each_tensor(std::vector<c10::IValue>(node.arguments),
                  [&](std::size_t argument, std::ptrdiff_t element, const at::Tensor& tensor) {
                    const auto tape = tape_of(tensor);
                    if (!tape) return;
                    TORCH_CHECK(tape.get() == this, "deferred_init: ", schema.name(),
                                " meets a tensor of another deferred_init. [T0174] hint: make both modules "
                                "under one deferred_init, or give the other one its values first");
                    node.patches.push_back({argument, element, place_of(tensor)});
                    if (writes_argument(schema, argument)) node.writes.push_back(node.patches.back().place.storage);
                  });
  for (const Patch& patch : node.patches) put(node.arguments, patch.argument, patch.element, at::Tensor());
  for_each_tensor(node.arguments, [&](std::size_t argument, std::ptrdiff_t, const at::Tensor&) {
    TORCH_CHECK(node.patches.empty() || !writes_argument(schema, argument), "deferred_init: ", schema.name(),
                " writes the values of a deferred tensor into a real one. [T0175] hint: make both under deferred_init, "
                "or neither.");
  });
  node.overwrites = fills(op) && node.patches.size() == 1 && node.patches[0].place.whole();
  return node;
}

/// Runs the operator on the device "meta" and replaces its arguments on `stack` by its outputs. Returns false if the
/// operator has no kernel for shapes alone; `stack` is unchanged then.
bool InitTape::run_for_shapes(const Node& node, Stack* stack) const {
  const std::size_t count = node.arguments.size();
  std::vector<c10::IValue> given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  std::vector<c10::IValue> meta = copy_with_own_lists(given);
  const c10::FunctionSchema& schema = node.op.schema();
  if (const auto i = index_of_argument(schema, "device"); i >= 0) {
    // If the argument `device` is left out, an operator with a tensor argument uses that tensor's device, and a factory
    // uses the default device.
    if (node.patches.empty() || !meta[i].isNone()) meta[i] = at::Device(at::kMeta);
  }
  if (const auto i = index_of_argument(schema, "pin_memory"); i >= 0) meta[i] = c10::IValue();
  for_each_tensor(node.arguments, [&](std::size_t argument, std::ptrdiff_t element, const at::Tensor& real) {
    put(meta, argument, element,
        at::empty_strided(real.sizes(), real.strides(), real.options().device(at::kMeta).pinned_memory(false)));
  });
  Stack local(std::move(meta));
  try {
    node.op.callBoxed(&local);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  stack->resize(stack->size() - count);
  for (c10::IValue& output : local) stack->push_back(std::move(output));
  return true;
}

void InitTape::run_with_values(const Node& node, Stack* stack) const {
  check_has_values();
  TORCH_CHECK(
      node.writes.empty(), "deferred_init: ", node.op.schema().name(),
      " changes a deferred tensor and cannot be run for its shapes alone. [T0176] hint: construct this module eagerly");
  std::unordered_set<StorageId> wanted;
  for (const Patch& patch : node.patches) wanted.insert(patch.place.storage);
  const Storages storages = replay(wanted);
  std::vector<c10::IValue> arguments = copy_with_own_lists(node.arguments);
  for (const Patch& patch : node.patches) {
    put(arguments, patch.argument, patch.element, view_on(storages.at(patch.place.storage), patch.place));
  }
  stack->resize(stack->size() - arguments.size());
  for (c10::IValue& argument : arguments) stack->push_back(std::move(argument));
  node.op.callBoxed(stack);
}

/// Gives a number and this tape to every storage that the operator made.
void InitTape::note_outputs(Node& node, const Stack& stack) {
  const std::size_t count = node.op.schema().returns().size();
  const std::vector<c10::IValue> outputs(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  std::size_t index = 0;
  for_each_tensor(outputs, [&](std::size_t, std::ptrdiff_t, const at::Tensor& tensor) {
    const std::size_t output = index++;
    if (context_of(tensor)) return;
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    storage->_mutable_data_ptr_no_checks() = at::DataPtr(
        nullptr, new DeferredContext{shared_from_this(), next_storage_++}, &delete_context, at::Device(at::kMeta));
    storage->set_throw_on_mutable_data_ptr();  // an error instead of a null pointer, for code that bypasses operators
    node.creates.emplace_back(output, place_of(tensor));
  });
}

/// Advances the generator as the operator would have done, and stores in `node` the state that the generator had
/// before.
void InitTape::draw(Node& node) const {
  const c10::IValue* const given = node.argument("generator");
  const bool is_given = given && !given->isNone();
  node.generator = is_given ? given->toGenerator() : at::globalContext().defaultGenerator(at::kCPU);
  node.generator_state = node.generator.get_state();
  constexpr std::int64_t kWorthIt = 4096;
  if (const auto fill = known_draw(node); fill && fill->numel >= kWorthIt && skip_draw(*fill, node.generator)) return;
  Storages scratch;
  std::unordered_set<StorageId> read;
  for (const Patch& patch : node.patches) {
    if (node.overwrites) {
      const auto bytes = static_cast<std::int64_t>(patch.place.storage_bytes);
      scratch[patch.place.storage] = at::empty({bytes}, at::kByte).storage();
    } else {
      read.insert(patch.place.storage);
    }
  }
  if (!read.empty()) scratch = replay(read);
  play(node, scratch, at::Generator());
}

void InitTape::append(Node node) {
  std::vector<StorageId> touched = node.writes;
  for (const auto& [output, place] : node.creates) touched.push_back(place.storage);
  for (const StorageId id : touched) {
    std::vector<std::size_t>& nodes = touching_[id];
    if (nodes.empty() || nodes.back() != nodes_.size()) nodes.push_back(nodes_.size());
  }
  nodes_.push_back(std::move(node));
}

void InitTape::check_has_values() const {
  TORCH_CHECK(content_ == Content::kValues,
              "this module was made by shapes_only, which keeps shapes and no values (it is for plans). [T0177] hint: "
              "make it with deferred_init to train it, or to read a value");
}

/// Goes from the last node back and follows the storages in `wanted`, and the storages on which they depend. It looks
/// only at nodes that touch these storages.
InitTape::Needs InitTape::needed_for(std::unordered_set<StorageId> wanted) const {
  check_has_values();
  Needs needs;
  std::priority_queue<std::size_t> ahead;  // nodes that touch wanted storages, the last one first
  const auto look_at = [&](StorageId id, std::size_t before) {
    const auto found = touching_.find(id);
    if (found == touching_.end()) return;
    for (const std::size_t i : found->second) {
      if (i < before) ahead.push(i);
    }
  };
  for (const StorageId id : wanted) look_at(id, nodes_.size());
  std::unordered_set<StorageId> overwritten;  // storages that a later node overwrites: earlier nodes need only make
                                              // their memory
  for (std::size_t i = nodes_.size(); !ahead.empty();) {
    if (ahead.top() == i) {
      ahead.pop();
      continue;
    }
    i = ahead.top();
    ahead.pop();
    const Node& node = nodes_[i];
    const bool writes = std::any_of(node.writes.begin(), node.writes.end(),
                                    [&](StorageId id) { return wanted.count(id) && !overwritten.count(id); });
    std::optional<Need> need = writes ? std::optional(Need::kYes) : std::nullopt;
    for (const auto& [output, place] : node.creates) {
      if (!wanted.count(place.storage)) continue;
      need = std::max(need, std::optional(overwritten.count(place.storage) ? Need::kStorageOnly : Need::kYes));
    }
    if (!need) continue;
    needs.emplace(i, *need);
    if (*need != Need::kYes) continue;
    for (const Patch& patch : node.patches) {
      if (wanted.insert(patch.place.storage).second) look_at(patch.place.storage, i);
      // This node reads the storage, so earlier values are needed although a later node overwrites them.
      if (!node.overwrites) overwritten.erase(patch.place.storage);
    }
    if (node.overwrites) overwritten.insert(node.writes[0]);
  }
  return needs;
}

/// Returns whether the node must replay on the generator that it drew from, because the operator takes no generator as
/// an argument (randn, dropout). All other nodes replay on a clone of the generator.
bool InitTape::shares_generator(const Node& node) {
  return node.generator.defined() && index_of_argument(node.op.schema(), "generator") < 0;
}

/// Splits the needed nodes into parts that are independent of each other, each in the order of the tape. The part that
/// makes the most bytes comes first.
std::vector<InitTape::Part> InitTape::parts_of(const Needs& needs) const {
  static constexpr StorageId kSharedGenerators = 0;  // no real storage has this number
  std::unordered_map<StorageId, StorageId> parent;
  const auto root = [&](StorageId id) {
    parent.try_emplace(id, id);
    while (parent[id] != id) id = parent[id] = parent[parent[id]];
    return id;
  };
  const auto touched = [](const Node& node) {
    std::vector<StorageId> all;
    if (shares_generator(node)) all.push_back(kSharedGenerators);
    for (const Patch& patch : node.patches) all.push_back(patch.place.storage);
    for (const auto& [output, place] : node.creates) all.push_back(place.storage);
    return all;
  };
  for (const auto& [i, need] : needs) {
    const std::vector<StorageId> all = touched(nodes_[i]);
    for (StorageId id : all) parent[root(id)] = root(all[0]);
  }
  std::vector<Part> parts;
  std::unordered_map<StorageId, std::size_t> part_of;
  for (const auto& [i, need] : needs) {
    const auto [found, is_new] = part_of.try_emplace(root(touched(nodes_[i])[0]), parts.size());
    if (is_new) parts.emplace_back();
    Part& part = parts[found->second];
    part.nodes.push_back(i);
    for (const auto& [output, place] : nodes_[i].creates) part.bytes += place.storage_bytes;
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.bytes > b.bytes; });
  return parts;
}

/// Operators that create or fill tensors give the same bits on any thread. Other operators may add in an order that
/// depends on the number of threads that they can use, so parts with such operators run alone.
bool InitTape::may_run_beside_others(const Part& part, const Needs& needs) const {
  return std::all_of(part.nodes.begin(), part.nodes.end(), [&](std::size_t i) {
    const Node& node = nodes_[i];
    const bool is_plain = node.overwrites || node.patches.empty();
    return needs.at(i) == Need::kStorageOnly || (is_plain && !shares_generator(node));
  });
}

InitTape::Storages InitTape::replay(const std::unordered_set<StorageId>& wanted) const {
  const Needs needs = needed_for(wanted);
  std::vector<Part> parts = parts_of(needs);
  const auto alone =
      std::stable_partition(parts.begin(), parts.end(), [&](const Part& p) { return may_run_beside_others(p, needs); });
  const auto beside = static_cast<std::size_t>(alone - parts.begin());
  std::vector<Storages> made(parts.size());
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < beside; ++i) bytes += parts[i].bytes;
  constexpr std::size_t kWorthThreads = 1 << 20;
  on_threads(beside, bytes < kWorthThreads ? 1 : static_cast<std::size_t>(at::get_num_threads()),
             [&](std::size_t i) { made[i] = replay(parts[i], needs); });
  for (std::size_t i = beside; i < parts.size(); ++i) made[i] = replay(parts[i], needs);
  Storages storages;
  for (Storages& some : made) storages.merge(some);
  return storages;
}

InitTape::Storages InitTape::replay(const Part& part, const Needs& needs) const {
  Storages storages;
  std::vector<std::pair<at::Generator, at::Tensor>> restore;  // generators that several nodes share, and the states
                                                              // that they get back at the end
  for (const std::size_t i : part.nodes) {
    const Node& node = nodes_[i];
    if (needs.at(i) == Need::kStorageOnly) {
      for (const auto& [output, place] : node.creates) {
        const auto bytes = static_cast<std::int64_t>(place.storage_bytes);
        storages[place.storage] = at::empty({bytes}, at::kByte).storage();
      }
      continue;
    }
    at::Generator own;
    if (shares_generator(node)) {
      at::Generator generator = node.generator;
      const auto known = [&](const auto& entry) { return entry.first == generator; };
      if (std::none_of(restore.begin(), restore.end(), known)) restore.emplace_back(generator, generator.get_state());
      generator.set_state(node.generator_state);
    } else if (node.generator.defined()) {
      at::Generator shared = node.generator;
      const std::lock_guard lock(shared.mutex());
      own = shared.clone();
      own.set_state(node.generator_state);
    }
    play(node, storages, own);
  }
  for (auto& [generator, state] : restore) generator.set_state(state);
  return storages;
}

void InitTape::play(const Node& node, Storages& storages, const at::Generator& generator) const {
  const at::NoGradGuard no_grad;
  std::vector<c10::IValue> arguments = copy_with_own_lists(node.arguments);
  for (const Patch& patch : node.patches) {
    put(arguments, patch.argument, patch.element, view_on(storages.at(patch.place.storage), patch.place));
  }
  if (generator.defined()) arguments[index_of_argument(node.op.schema(), "generator")] = generator;
  Stack stack(std::move(arguments));
  node.op.callBoxed(&stack);
  std::vector<at::Tensor> outputs;
  for_each_tensor(stack, [&](std::size_t, std::ptrdiff_t, const at::Tensor& tensor) { outputs.push_back(tensor); });
  for (const auto& [output, place] : node.creates) storages[place.storage] = outputs.at(output).storage();
}

}  // namespace tessera
