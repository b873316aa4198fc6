#include "sharding/whole_tensors.h"

#include <fnmatch.h>

#include <set>
#include <vector>

#include "runtime/base/text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void throw_fits_nothing(const std::string& pattern, const NamedTensors& parameters) {
  std::vector<std::string> names;
  for (const auto& item : parameters) names.push_back(item.key());
  throw Error(ExitCode::kConfig,
              "/units/ignored: \"" + pattern + "\" fits no parameter" + hint_of_names(pattern, names));
}

}  // namespace

NamedTensors ignored_parameters(const torch::nn::Module& module, const UnitsConfig& units) {
  NamedTensors ignored("Parameter");
  if (units.ignored.empty()) return ignored;
  const NamedTensors parameters = module.named_parameters();
  std::set<const c10::TensorImpl*> chosen;
  for (const std::string& pattern : units.ignored) {
    bool fits_some = false;
    for (const auto& item : parameters) {
      if (!item.value().defined() || ::fnmatch(pattern.c_str(), item.key().c_str(), 0) != 0) continue;
      chosen.insert(item.value().unsafeGetTensorImpl());
      fits_some = true;
    }
    if (!fits_some) throw_fits_nothing(pattern, parameters);
  }
  for (const auto& item : parameters) {
    if (item.value().defined() && chosen.erase(item.value().unsafeGetTensorImpl()) > 0)
      ignored.insert(item.key(), item.value());
  }
  return ignored;
}

NamedTensors whole_tensors(const torch::nn::Module& module, const UnitsConfig& units) {
  NamedTensors tensors("Tensor");
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) tensors.insert(item.key(), item.value());
  }
  tensors.update(ignored_parameters(module, units));
  return tensors;
}

}  // namespace tessera
