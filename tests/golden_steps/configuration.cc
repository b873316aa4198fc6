#include "tests/golden_steps/configuration.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>

#include "tests/support/offloaded.h"
#include "tests/support/stand_ins/own_adamw.h"
#include "tests/support/stand_ins/own_muon.h"

namespace tessera::testing {
namespace {

/// A hook that sends contributions in bf16. Every rank adds up all of them.
struct InBf16 final : CommHook {
  void sum(Bucket& bucket, Ranks& ranks) override {
    const at::Tensor own = bucket.gradients.to(at::kBFloat16);
    bucket.gradients.zero_();
    for (const at::Tensor& each : ranks.all_gather(own)) bucket.gradients.add_(each);
  }
};

Joined joined_of(const std::string& name) {
  static const std::map<std::string, Joined> kNames = {{"memory", Joined::kMemory},
                                                       {"hosts", Joined::kHosts},
                                                       {"gloo", Joined::kGloo},
                                                       {"cuda_host", Joined::kCudaHost},
                                                       {"nccl", Joined::kNccl}};
  return kNames.at(name);
}

TinyOptions model_of(const std::string& name) {
  TinyOptions recomputed = kWide;
  recomputed.recompute = true;
  const std::map<std::string, TinyOptions> models = {
      {"wide", kWide}, {"awkward", kAwkward}, {"recomputed", recomputed}};
  return models.at(name);
}

std::vector<Configuration> read_configurations() {
  std::ifstream file(TESSERA_GOLDEN_FOLDER "/configurations.json");
  std::vector<Configuration> all;
  for (const nlohmann::json& row : nlohmann::json::parse(file)) {
    all.push_back({row.at("name"), row.at("ranks"), joined_of(row.at("joined")), model_of(row.at("model")),
                   row.at("strategy").dump()});
  }
  return all;
}

std::string with_folder(std::string text, const std::string& folder) {
  static const std::string kFolder = "$FOLDER";
  for (std::size_t at = text.find(kFolder); at != std::string::npos; at = text.find(kFolder))
    text.replace(at, kFolder.size(), folder);
  return text;
}

}  // namespace

Topology Configuration::topology() const {
  Topology topology;
  topology.world_size = ranks;
  topology.local_world_size = joined == Joined::kHosts ? ranks / 2 : ranks;
  topology.launcher = "thread";
  return topology;
}

Strategy Configuration::trained(const std::filesystem::path& folder) const {
  Strategy result = Strategy::from_json(with_folder(strategy, folder.string()), name);
  if (joined == Joined::kGloo) result.comm.transport = TransportChoice::kGloo;
  return result;
}

Strategy Configuration::planned() const {
  Strategy result = trained("a folder");
  if (joined == Joined::kCudaHost) result.comm.transport = TransportChoice::kCudaHost;
  if (joined == Joined::kNccl) result.comm.transport = TransportChoice::kNccl;
  return result;
}

std::ostream& operator<<(std::ostream& out, const Configuration& configuration) { return out << configuration.name; }

const std::vector<Configuration>& configurations() {
  static const std::vector<Configuration> all = read_configurations();
  return all;
}

std::vector<std::string> names_of_configurations() {
  std::vector<std::string> names;
  for (const Configuration& each : configurations()) names.push_back(each.name);
  return names;
}

OwnRules own_rules_for(const Strategy& strategy) {
  OwnRules rules;
  if (strategy.optimizer.type == OptimizerType::kOwn) rules.elements = std::make_shared<OwnAdamW>();
  if (strategy.optimizer.type == OptimizerType::kOwnMatrix) rules.matrices = std::make_shared<OwnMuon>();
  if (std::holds_alternative<CommHookConfig>(strategy.compression.method)) rules.comm_hook = std::make_shared<InBf16>();
  return rules;
}

std::string name_of_case(const Configuration& configuration) {
  std::string name = "Row";
  for (const char c : configuration.name) {
    if (std::isalnum(static_cast<unsigned char>(c)))
      name += c;
    else if (name.back() != '_')
      name += '_';
  }
  return name;
}

}  // namespace tessera::testing
