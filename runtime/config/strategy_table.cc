#include "runtime/config/strategy_table.h"

#include <algorithm>

#include "runtime/config/strategy_keys.h"

namespace tessera {
namespace {

/// Fills in the members that a row leaves to its field.
void fill_in(StrategyKey& key) {
  if (key.pointer.empty()) key.pointer = key.field.pointer;
  if (key.range == Range{}) key.range = key.field.range;
  if (key.unit.empty()) key.unit = key.field.unit;
  if (key.default_json.empty()) key.default_json = key.field.get(Strategy{}).dump();
}

std::vector<StrategyKey> all_keys() {
  std::vector<StrategyKey> all;
  for (auto part :
       {sharding_keys, precision_keys, step_keys, optimizer_keys, ema_keys, schedule_keys, offload_keys,
        compression_keys, checkpoint_keys, spike_keys, noise_keys, durable_keys, sync_keys, platform_keys}) {
    for (StrategyKey& key : part()) {
      fill_in(key);
      all.push_back(std::move(key));
    }
  }
  return all;
}

}  // namespace

std::string dotted(const std::string& pointer) {
  std::string path = pointer.substr(1);
  std::replace(path.begin(), path.end(), '/', '.');
  return path;
}

const std::vector<StrategyKey>& strategy_keys() {
  static const std::vector<StrategyKey> keys = all_keys();
  return keys;
}

const std::vector<StrategyGroup>& strategy_groups() {
  static const std::vector<StrategyGroup> groups = {
      {"/mesh", "The ranks as a grid: replicate x shard, which placement calls host x rank."},
      {"/placement",
       "Where state lies, said by axes of the mesh, in place of strategy (docs/guide/placement.md). All three keys "
       "stand together. null: strategy says it."},
      {"/units", "Which modules are gathered together."},
      {"/secondary", "A second copy of sharded parameters, inside a host."},
      {"/mixed_precision", "Types of parameters and gradients."},
      {"/mixed_precision/loss_scale", "Loss scaling, which keeps small fp16 gradients from vanishing."},
      {"/record_hashes", "Hashes of what steps make, to compare other runs with (docs/reproducible.md)."},
      {"/deal", "Which microbatches of a step a rank computes (docs/guide/dealing.md)."},
      {"/optimizer", "The update of the master weights."},
      {"/optimizer/muon", "Muon's own numbers."},
      {"/optimizer/adafactor", "Adafactor's own numbers."},
      {"/ema", "An exponential moving average of the master weights."},
      {"/lr_schedule", "The learning rate over time."},
      {"/offload", "Training state and activations on tiers below memory."},
      {"/offload/parameters", "Each rank's part of the parameters."},
      {"/offload/masters", "What fp32 masters have beside bf16 or fp16 parameters."},
      {"/offload/moments", "Optimizer states, the average of the weights among them."},
      {"/offload/gradients", "Sums of gradients, from their reduction to the update."},
      {"/offload/activations", "Tensors that forward saves for backward."},
      {"/compression",
       "Gradients and parameters in fewer bits, where they go over a network. Gradients of a GPU then go through the "
       "memory of its host and over Gloo, whatever joins the GPUs."},
      {"/checkpoint", "Where, when and how checkpoints are saved."},
      {"/on_spike", "Steps whose loss is far above those before them."},
      {"/noise_scale", "The noise of gradients, measured."},
      {"/durable", "Steps that outlive the process, without checkpoints."},
      {"/sync", "How replicas of the mesh stay one model."},
      {"/sync/outer", "The outer optimizer."},
      {"/sync/delay_compensation",
       "What mends gradients that were made with older values (DC-ASGD, arXiv 1609.08326)."},
      {"/memory", "What a rank may use."},
      {"/check", "Checks that cost something, for finding mistakes in a program."},
      {"/comm", "How ranks talk."}};
  return groups;
}

}  // namespace tessera
