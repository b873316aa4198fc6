#pragma once

// See docs/glossary.md: tier.

#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/strategy.h"

namespace tessera {

/// The strategy file's word for an enumerator, and a description of the enumerator's effect. Parsing, printing and the
/// reference all come from these lists.
template <typename Enum>
struct Named {
  Enum value;
  std::string name;
  std::string doc;
};

const std::vector<Named<ShardingStrategy>>& sharding_strategies();
const std::vector<Named<SecondaryForm>>& secondary_forms();
const std::vector<Named<DType>>& training_dtypes();  ///< dtypes that a strategy may name: fp32, bf16, fp16
const std::vector<Named<GradientSync>>& gradient_syncs();
const std::vector<Named<DealBy>>& deals();
const std::vector<Named<BufferBroadcast>>& buffer_broadcasts();
const std::vector<Named<MasterKind>>& master_kinds();
const std::vector<Named<OptimizerType>>& optimizer_types();
const std::vector<Named<MuonLrAdjustment>>& muon_lr_adjustments();
const std::vector<Named<DType>>& muon_dtypes();  ///< MuonConfig::ns_dtype
const std::vector<Named<StateDType>>& state_dtypes();
const std::vector<Named<bool>>& shard_overs();  ///< OptimizerConfig::shard_over_world
const std::vector<Named<LrScheduleType>>& lr_schedule_types();
const std::vector<Named<BatchScaling>>& batch_scalings();
const std::vector<Named<Tier>>& tiers();           ///< tiers of parameters
const std::vector<Named<Tier>>& state_tiers();     ///< tiers of masters and moments
const std::vector<Named<Tier>>& gradient_tiers();  ///< tiers of gradients and activations
const std::vector<Named<OffloadedStep>>& offloaded_steps();
const std::vector<Named<WireForm>>& wire_forms();
const std::vector<Named<CompressedAxes>>& compressed_axes();
const std::vector<Named<SpikeAction>>& spike_actions();
const std::vector<Named<SyncType>>& sync_types();
const std::vector<Named<AgeScale>>& age_scales();
const std::vector<Named<StateSharing>>& state_sharings();
const std::vector<Named<ShardOwners>>& shard_owners();
const std::vector<Named<TransportChoice>>& transport_choices();
const std::vector<Named<NcclBuffers>>& nccl_buffers();

std::string name_of(WireForm form);
std::string name_of(MuonLrAdjustment adjustment);
/// Returns the name of an entry of optimizer.groups: "group 1" or "group 1 (head)".
std::string name_of_group(const OptimizerConfig& optimizer, std::size_t index);

/// Returns whether the rule adapts rates by the norms of each parameter.
bool adapts_layers(OptimizerType type);
/// Returns whether the rule updates whole matrices, or all tensors as a whole. Each such tensor is then assigned to one
/// rank.
bool updates_whole_tensors(OptimizerType type);
/// Returns whether the method or error feedback has residuals of gradients, which stay from step to step.
bool keeps_gradients(const CompressionConfig& compression);
/// Returns whether the method draws random numbers, so that it has a seed.
bool draws_gradients(const CompressionMethod& method);
/// Returns b for a method in which ranks send the momentum b m + (1 - b) g instead of gradients g, and keep residuals.
/// It is 0 otherwise.
double momentum_of_residuals(const CompressionMethod& method);
/// Returns the method's text for messages, such as "top_k, fraction 0.01, momentum 0.9".
std::string describe(const CompressionMethod& method);
/// Returns whether ranks get whole sums of gradients from each other; otherwise every sum has one owner.
bool gets_whole_sums(const Strategy& strategy);
/// Returns whether the optimizer keeps states in addition to the master weights.
bool keeps_states(const OptimizerConfig& optimizer);

}  // namespace tessera
