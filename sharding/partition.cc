#include "sharding/partition.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "sharding/layout/buckets.h"
#include "sharding/scalar_type.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

using torch::nn::Module;

// This file cuts a module into units.
//
// A Partitioner walks over the module tree once and gives each parameter to a Claim, which becomes a unit later
// (`visit`, `claim`). The class, path or size of a module decides whether it begins a unit (`choose_by_size` is done
// before the walk). If units are buckets, there is one claim, which is cut by size instead (`cut_into_buckets`). In the
// end, each claim becomes a Unit with flat groups and their layouts (`make_groups`).

/// Returns the name of the module's class without namespace and "Impl": "Block" for "tessera::models::BlockImpl".
std::string class_of(const Module& module) {
  std::string name = module.name();
  // Templates keep their arguments, so only the namespace in front of the first '<' is cut off.
  const std::size_t end = std::min(name.find('<'), name.size());
  if (const std::size_t colon = name.rfind("::", end); colon != std::string::npos) name = name.substr(colon + 2);
  if (name.size() > 4 && name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

bool is_container(const std::string& class_name) {
  return class_name == "ModuleList" || class_name == "ModuleDict" || class_name == "Sequential";
}

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

std::int64_t own_numel(const Module& module) {
  std::int64_t numel = 0;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) numel += parameter.value().numel();
  return numel;
}

/// Chooses, bottom-up, the modules that become units because of `min_numel`. Returns the number of elements under
/// `module` that no unit has claimed.
std::int64_t choose_by_size(const Module& module, const std::string& path, std::int64_t min_numel,
                            std::set<std::string>& chosen) {
  std::int64_t unclaimed = own_numel(module);
  for (const auto& child : module.named_children()) {
    unclaimed += choose_by_size(*child.value(), join(path, child.key()), min_numel, chosen);
  }
  if (path.empty() || is_container(class_of(module)) || unclaimed < min_numel) return unclaimed;
  chosen.insert(path);
  return 0;
}

/// The parameters of one unit, before they are grouped.
struct Claim {
  std::string name;
  std::vector<FlatParameter> parameters;
  std::vector<DType> dtypes;

  void take(Claim& from, std::size_t i) {
    parameters.push_back(std::move(from.parameters[i]));
    dtypes.push_back(from.dtypes[i]);
  }
};

class Partitioner {
 public:
  using HasMaster = std::function<bool(const at::Tensor&)>;

  Partitioner(Module& module, const Strategy& strategy, const HasMaster& has_master)
      : strategy_(strategy), has_master_(has_master) {
    if (strategy.units.min_numel > 0) choose_by_size(module, "", strategy.units.min_numel, by_size_);
    for (const auto& item : ignored_parameters(module, strategy.units))
      ignored_.insert(item.value().unsafeGetTensorImpl());
    claims_.push_back({"(root)", {}, {}});
    visit(module, "", 0);
    check_names();
  }

  std::vector<Claim> take_claims() { return std::move(claims_); }

 private:
  void visit(Module& module, const std::string& path, std::size_t unit) {
    const std::string class_name = class_of(module);
    classes_seen_.insert(class_name);
    paths_seen_.insert(path);
    if (!path.empty() && begins_unit(class_name, path)) {
      unit = claims_.size();
      claims_.push_back({path, {}, {}});
    }
    for (auto& parameter : module.named_parameters(/*recurse=*/false)) {
      claim(parameter.value(), join(path, parameter.key()), class_name, unit);
    }
    for (auto& child : module.named_children()) visit(*child.value(), join(path, child.key()), unit);
  }

  bool begins_unit(const std::string& class_name, const std::string& path) const {
    if (strategy_.units.bucket_cap_mb) return false;
    const auto has = [](const std::vector<std::string>& names, const std::string& name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    return has(strategy_.units.classes, class_name) || has(strategy_.units.modules, path) || by_size_.count(path) > 0;
  }

  void claim(const at::Tensor& tensor, const std::string& name, const std::string& class_name, std::size_t unit) {
    if (!tensor.defined() || ignored_.contains(tensor.unsafeGetTensorImpl())) return;
    const auto [known, fresh] = known_.try_emplace(tensor.unsafeGetTensorImpl(), unit, claims_[unit].parameters.size());
    const bool is_embedding = class_name == "Embedding" || class_name == "EmbeddingBag";
    if (!fresh) {  // a tied parameter
      FlatParameter& tied = claims_[known->second.first].parameters[known->second.second];
      tied.aliases.push_back(name);
      tied.is_embedding |= is_embedding;
      return;
    }
    FlatParameter parameter{tensor, name, {}, tensor.sizes().vec(), tensor.strides().vec(), tensor.numel()};
    parameter.number = static_cast<std::int64_t>(known_.size()) - 1;
    parameter.is_embedding = is_embedding;
    if (!tensor.is_non_overlapping_and_dense()) {
      const auto strides = c10::contiguous_strides(tensor.sizes());
      parameter.strides.assign(strides.begin(), strides.end());
    }
    claims_[unit].dtypes.push_back(dtype_for(tensor, name, class_name));
    claims_[unit].parameters.push_back(std::move(parameter));
  }

  DType dtype_for(const at::Tensor& tensor, const std::string& name, const std::string& class_name) const {
    const DType own = has_master_ && has_master_(tensor) ? DType::kF32 : dtype_of(tensor.scalar_type(), name);
    const auto& mixed = strategy_.mixed_precision;
    const bool kept = std::any_of(mixed.keep_fp32.begin(), mixed.keep_fp32.end(),
                                  [&](const std::string& prefix) { return class_name.starts_with(prefix); });
    const DType dtype = is_trainable(own) && mixed.param != DType::kF32 ? (kept ? DType::kF32 : mixed.param) : own;
    if (tensor.requires_grad() && !is_trainable(dtype)) {
      throw Error(ExitCode::kConfig,
                  "parameter " + name + " trains in " + std::string(name_of(dtype)) +
                      ". Trainable parameters are fp32, bf16 or fp16. [T0620] hint: convert the module first");
    }
    return dtype;
  }

  void check_names() const {
    std::string lines_with_hints;
    const auto check = [&](const std::vector<std::string>& names, const std::set<std::string>& seen, const char* what) {
      for (const std::string& name : names) {
        if (seen.count(name)) continue;
        lines_with_hints += std::string("\n  /units/") + what + ": \"" + name + "\" matches no module";
        lines_with_hints += hint_of_names(name, {seen.begin(), seen.end()});
      }
    };
    check(strategy_.units.classes, classes_seen_, "classes");
    check(strategy_.units.modules, paths_seen_, "modules");
    if (lines_with_hints.empty()) return;
    std::string classes;
    for (const std::string& name : classes_seen_) classes += " " + name;
    throw Error(ExitCode::kConfig,
                "units that do not exist:" + lines_with_hints + "\n  classes of this module:" + classes);
  }

  const Strategy& strategy_;
  const HasMaster& has_master_;
  std::set<std::string> by_size_, classes_seen_, paths_seen_;
  std::vector<Claim> claims_;
  std::unordered_map<const c10::TensorImpl*, std::pair<std::size_t, std::size_t>> known_;
  std::set<const c10::TensorImpl*> ignored_;
};

BucketLimits limits_of(const UnitsConfig& units) {
  constexpr double kMiB = 1 << 20;
  return {static_cast<std::int64_t>(units.first_bucket_mb * kMiB),
          static_cast<std::int64_t>(*units.bucket_cap_mb * kMiB)};
}

/// Leaves frozen parameters in the root unit. The other parameters become buckets, which follow the root unit. The last
/// bucket is the one that is reduced first.
std::vector<Claim> cut_into_buckets(Claim all, const Strategy& strategy) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(strategy.mixed_precision.reduce));
  std::vector<Claim> claims = {{all.name, {}, {}}};
  std::vector<std::size_t> trainable;  // indices into `all`; the parameter that was registered last comes first
  std::vector<BucketItem> items;
  for (std::size_t i = 0; i < all.parameters.size(); ++i) {
    if (!all.parameters[i].tensor.requires_grad()) claims[0].take(all, i);
  }
  for (std::size_t i = all.parameters.size(); i-- > 0;) {
    if (!all.parameters[i].tensor.defined()) continue;  // already in a bucket
    trainable.push_back(i);
    items.push_back({all.parameters[i].numel * element_bytes, all.dtypes[i]});
  }
  const std::vector<std::vector<std::size_t>> buckets = fill_buckets(items, limits_of(strategy.units));
  for (std::size_t number = buckets.size(); number-- > 0;) {
    Claim& bucket = claims.emplace_back(Claim{"bucket." + std::to_string(number), {}, {}});
    for (const std::size_t item : buckets[number]) bucket.take(all, trainable[item]);
  }
  return claims;
}

/// Returns the shape of the elements as a matrix in memory order. A tensor that is not a matrix counts as one row.
MatrixShape matrix_shape(const FlatParameter& parameter) {
  if (parameter.sizes.size() != 2) return {1, parameter.numel};
  const MatrixShape shape{parameter.sizes.at(0), parameter.sizes.at(1)};
  const bool is_by_columns = parameter.strides.at(0) < parameter.strides.at(1);
  return is_by_columns ? MatrixShape{shape.columns, shape.rows} : shape;
}

/// Returns the shape of one tensor for GroupShape::factored.
MatrixShape factored_shape(const FlatParameter& parameter) {
  if (parameter.sizes.size() < 2 || parameter.numel == 0) return {};
  std::int64_t rows = 1, stride = 0;  // size and stride of the outermost dimension with more than one element
  for (std::size_t i = 0; i < parameter.sizes.size(); ++i) {
    if (parameter.sizes[i] == 1 || parameter.strides[i] <= stride) continue;
    rows = parameter.sizes[i];
    stride = parameter.strides[i];
  }
  return {rows, parameter.numel / rows};
}

/// The way in which the tensors of a group are packed into the parts of its ranks.
struct Packing {
  int parts;
  SmallTensors small;
  bool in_pages;  ///< whether each part consists of whole pages
};

/// Groups a claim's parameters by (dtype, trains, is a matrix). Groups are in the order of first appearance, and
/// trainable groups come first.
void make_groups(Unit& unit, Claim claim, const Packing& packing, bool sends_factors,
                 const std::function<bool(const FlatParameter&)>& is_matrix) {
  std::map<std::tuple<bool, DType, bool>, FlatGroup*> groups;
  for (bool trainable : {true, false}) {
    for (std::size_t i = 0; i < claim.parameters.size(); ++i) {
      if (claim.parameters[i].tensor.requires_grad() != trainable) continue;
      const bool as_matrix = trainable && is_matrix && is_matrix(claim.parameters[i]);
      FlatGroup*& group = groups[{trainable, claim.dtypes[i], as_matrix}];
      if (!group) {
        group = unit.groups.emplace_back(std::make_unique<FlatGroup>()).get();
        group->unit = &unit;
        group->index = unit.groups.size() - 1;
        group->dtype = claim.dtypes[i];
        group->trainable = trainable;
      }
      if (as_matrix) group->matrices.push_back(matrix_shape(claim.parameters[i]));
      if (sends_factors) group->factored.push_back(factored_shape(claim.parameters[i]));
      group->parameters.push_back(std::move(claim.parameters[i]));
      claim.parameters[i].tensor = group->parameters.back().tensor;  // the next iteration reads requires_grad
    }
  }
  for (auto& group : unit.groups) {
    std::vector<std::int64_t> numels;
    for (const FlatParameter& parameter : group->parameters) numels.push_back(parameter.numel);
    group->layout = Layout::pack(numels, packing.parts, packing.small,
                                 packing.in_pages ? Chunks::kPage / group->element_bytes() : 1);
  }
}

}  // namespace

std::vector<std::unique_ptr<Unit>> partition(Module& module, const Strategy& strategy, int parts,
                                             const std::function<bool(const at::Tensor&)>& has_master,
                                             const std::function<bool(const FlatParameter&)>& is_matrix) {
  // A block of an 8-bit state has one scale, so it must belong to one tensor.
  static_assert(kStateBlock == Layout::kBlock);
  const bool scales_blocks = strategy.optimizer.state_dtype == StateDType::k8Bit;
  const SmallTensors small = scales_blocks ? SmallTensors::kOwnBlocks : SmallTensors::kShareBlocks;
  const Packing packing{parts, small, /*in_pages=*/strategy.offload.parameters.tier != Tier::kMemory};
  const bool sends_factors = std::holds_alternative<PowerSgdConfig>(strategy.compression.method);
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<Claim> claims = Partitioner(module, strategy, has_master).take_claims();
  if (strategy.units.bucket_cap_mb) claims = cut_into_buckets(std::move(claims[0]), strategy);
  for (Claim& claim : claims) {
    if (claim.parameters.empty() && !units.empty()) continue;
    auto& unit = units.emplace_back(std::make_unique<Unit>(static_cast<int>(units.size()), claim.name));
    make_groups(*unit, std::move(claim), packing, sends_factors, is_matrix);
  }
  return units;
}

}  // namespace tessera
