#include "tessera/deferred_init.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <map>
#include <unordered_set>

#include "engine/init/init_tape.h"

namespace tessera {
namespace {

thread_local std::shared_ptr<InitTape> current_tape;

void record_on_tape(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::DeferredInit);
  current_tape->record(op, stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&record_on_tape>());
}

void set_recording(bool on) { c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::DeferredInit, on); }

}  // namespace

DeferredInitScope::DeferredInitScope(Content content) : previous_(current_tape) {
  if (!current_tape) {
    current_tape = std::make_shared<InitTape>(content == Content::kValues ? InitTape::Content::kValues
                                                                          : InitTape::Content::kShapesOnly);
    set_recording(true);
  }
}

DeferredInitScope::~DeferredInitScope() {
  if (previous_) return;  // an outer scope continues to defer
  set_recording(false);
  current_tape.reset();
}

bool is_deferred(const at::Tensor& tensor) { return tape_of(tensor) != nullptr; }

std::vector<at::Tensor> materialize(const std::vector<at::Tensor>& tensors) {
  std::map<std::shared_ptr<InitTape>, std::unordered_set<InitTape::StorageId>> wanted;
  for (const at::Tensor& tensor : tensors) {
    if (auto tape = tape_of(tensor)) wanted[std::move(tape)].insert(place_of(tensor).storage);
  }
  std::map<std::shared_ptr<InitTape>, InitTape::Storages> storages;
  for (const auto& [tape, ids] : wanted) storages[tape] = tape->replay(ids);
  std::vector<at::Tensor> real;
  real.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const auto tape = tape_of(tensor);
    if (!tape) {
      real.push_back(tensor);
      continue;
    }
    const InitTape::Place place = place_of(tensor);
    real.push_back(view_on(storages.at(tape).at(place.storage), place));
  }
  return real;
}

void materialize_module(torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  const std::vector<at::Tensor> real = materialize(tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (is_deferred(tensors[i])) tensors[i].unsafeGetTensorImpl()->shallow_copy_from(real[i].getIntrusivePtr());
  }
}

}  // namespace tessera
