#include "tessera/module_view.h"

#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/border/expect.h"

namespace tessera {
namespace {

/// Returns {"layers", "0", "weight"} for "layers.0.weight".
std::vector<std::string> words_of_path(std::string_view path) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    words.emplace_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

void expect_dense(const std::string& what, const at::Tensor& tensor) {
  expect(tensor.defined(), what, ": the tensor is undefined. [T0241] hint: give it a value first, or leave it out");
  expect(tensor.layout() == at::kStrided, what, ": the tensor has the layout ", tensor.layout(),
         ". [T0242] hint: Tessera shards dense tensors only: add tensor.to_dense()");
}

std::string class_of_script(const torch::jit::Module& script) {
  const auto name = script.type()->name();
  return name ? name->name() : "Module";
}

void add_script(ModuleView& view, const std::string& prefix, const torch::jit::Module& script) {
  for (const auto& item : script.named_parameters(/*recurse=*/false))
    view.add_parameter(prefix + item.name, item.value);
  for (const auto& item : script.named_buffers(/*recurse=*/false)) view.add_buffer(prefix + item.name, item.value);
  for (const auto& child : script.named_children()) {
    view.add_module(prefix + child.name, class_of_script(child.value));
    add_script(view, prefix + child.name + ".", child.value);
  }
}

}  // namespace

ModuleView::ModuleView(std::string class_name) : torch::nn::Module(std::move(class_name)) {}

const ModuleView::Held* ModuleView::find(const std::string& name) const {
  const auto found = held_.find(name);
  return found == held_.end() ? nullptr : &found->second;
}

ModuleView::Spot ModuleView::make_way(const std::string& what, const std::string& path) {
  static constexpr const char* kKinds[] = {"a parameter", "a buffer", "a module"};
  const std::vector<std::string> words = words_of_path(path);
  const auto refuse_if_held = [&](const Held* held, const std::string& name) {
    expect(!held, what, ": ", name, " is ", held ? kKinds[static_cast<int>(held->kind)] : "",
           " already. [T0243] hint: take another name; each is given once");
  };
  for (const std::string& word : words) {
    expect(
        !word.empty(), what,
        ": the name has an empty part. [T0244] hint: a name is words with dots between them, such as layers.0.weight");
  }
  // All names are checked before anything is made.
  ModuleView* owner = this;
  std::size_t known = 0;
  for (; known + 1 < words.size(); ++known) {
    const Held* held = owner->find(words[known]);
    if (!held) break;
    if (held->kind != Kind::kModule) refuse_if_held(held, words[known]);
    owner = held->module;
  }
  if (known + 1 == words.size()) refuse_if_held(owner->find(words.back()), words.back());
  for (; known + 1 < words.size(); ++known) {
    const auto made = owner->register_module(words[known], std::make_shared<ModuleView>());
    owner->held_.emplace(words[known], Held{Kind::kModule, made.get()});
    owner = made.get();
  }
  return {owner, words.back()};
}

void ModuleView::expect_new_memory(const std::string& what, const at::Tensor& tensor) const {
  if (!tensor.has_storage() || tensor.numel() == 0) return;
  const auto found = tensors_.find({tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()});
  if (found == tensors_.end()) return;
  const auto& [name, known] = found->second;
  expect(known.is_same(tensor), what, ": the tensor has the memory of ", name,
         ", but is another one, and they would train apart. [T0245] hint: add one tensor under both names");
}

void ModuleView::add_module(const std::string& path, const std::string& class_name) {
  add_module(path, std::make_shared<ModuleView>(class_name));
}

void ModuleView::add_module(const std::string& path, const std::shared_ptr<ModuleView>& module) {
  const std::string what = "ModuleView::add_module(\"" + path + "\")";
  expect(module != nullptr, what, ": the module is null. [T0246] hint: make it first");
  const Spot spot = make_way(what, path);
  spot.owner->register_module(spot.name, module);
  spot.owner->held_.emplace(spot.name, Held{Kind::kModule, module.get()});
}

void ModuleView::add_parameter(const std::string& path, const at::Tensor& tensor) {
  const std::string what = "ModuleView::add_parameter(\"" + path + "\")";
  expect_dense(what, tensor);
  expect(tensor.is_leaf(), what,
         ": the tensor is the result of an operator, and gradients do not end in it. [T0247] hint: add the tensor that "
         "it was made of, or a copy by detach().clone().requires_grad_()");
  expect_new_memory(what, tensor);
  const Spot spot = make_way(what, path);
  spot.owner->register_parameter(spot.name, tensor, tensor.requires_grad());
  spot.owner->held_.emplace(spot.name, Held{Kind::kParameter});
  if (tensor.has_storage()) {
    const Place place{tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()};
    tensors_.try_emplace(place, path, tensor);
  }
}

void ModuleView::add_buffer(const std::string& path, const at::Tensor& tensor) {
  const std::string what = "ModuleView::add_buffer(\"" + path + "\")";
  expect_dense(what, tensor);
  const Spot spot = make_way(what, path);
  spot.owner->register_buffer(spot.name, tensor);
  spot.owner->held_.emplace(spot.name, Held{Kind::kBuffer});
}

std::shared_ptr<ModuleView> ModuleView::of(const torch::jit::Module& script) {
  auto view = std::make_shared<ModuleView>(class_of_script(script));
  add_script(*view, "", script);
  expect(!view->parameters().empty(), "ModuleView::of: the script module ", class_of_script(script),
         " has no parameters. [T0248] hint: torch.jit.freeze and torch.jit.optimize_for_inference make constants of "
         "them; save the module before those");
  return view;
}

}  // namespace tessera
