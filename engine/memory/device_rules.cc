#include <string>
#include <utility>

#include "engine/memory/make_plan.h"
#include "runtime/border/throw.h"
#include "sharding/layout/plan/tier_choice.h"

namespace tessera {
namespace {

/// Throws for a tier that the device does not have: on the CPU, state is in the host's memory anyway.
void expect_tiers_of_device(const OffloadConfig& offload, bool is_gpu) {
  const auto refuse = [](const char* key, const std::string& text) {
    throw Error(ExitCode::kConfig, std::string("/offload/") + key + "/tier: " + text);
  };
  const auto expect_paths_for_auto = [&](const char* key, Tier tier) {
    if (tier != Tier::kAuto || is_gpu || !offload.paths.empty()) return;
    refuse(key,
           "\"auto\" needs \"paths\" where the CPU trains: one directory on each local disk, such as "
           "[\"/mnt/nvme0\"]. [T0212] hint: name some; or where a GPU is meant, say so by comm.transport \"nccl\"");
  };
  const std::pair<const char*, Tier> states[] = {{"parameters", offload.parameters.tier},
                                                 {"gradients", offload.gradients},
                                                 {"masters", offload.masters.tier},
                                                 {"moments", offload.moments.tier},
                                                 {"activations", offload.activations}};
  for (const auto& [key, tier] : states) {
    if (tier == Tier::kHost && !is_gpu) {
      refuse(key, std::string("\"host\" is for a GPU's ") + key +
                      "; the CPU's are in the host's memory already. [T0213] hint: take \"nvme\", or leave it out; or "
                      "where a GPU is meant, say so by comm.transport \"nccl\"");
    }
    expect_paths_for_auto(key, tier);
  }
  const auto has = [&](Tier tier) { return offload.masters.tier == tier || offload.moments.tier == tier; };
  const bool is_auto_host = tier_below(offload, is_gpu) == Tier::kHost;
  const bool on_host = has(Tier::kHost) || (has(Tier::kAuto) && is_auto_host);
  if (offload.step != OffloadedStep::kAuto && !is_gpu) {
    throw Error(ExitCode::kConfig,
                "/offload/step: says who updates a GPU's masters and moments in its host's memory, and the CPU trains "
                "here. [T0214] hint: leave it out; or where a GPU is meant, say so by comm.transport \"nccl\"");
  }
  if (offload.step == OffloadedStep::kCpu && !on_host) {
    throw Error(
        ExitCode::kConfig,
        "/offload/step: \"cpu\" updates a GPU's masters and moments that lie in its host's memory, and here none do: "
        "the GPU itself updates those in files and in its own memory. [T0215] hint: give masters and moments "
        "the tier \"host\", or leave \"step\" out");
  }
  if (!is_gpu) return;
  const bool chooses_host = is_auto_host && (has(Tier::kAuto) || offload.parameters.tier == Tier::kAuto);
  if (chooses_host && (offload.cache_bytes > 0 || offload.verify)) {
    throw Error(ExitCode::kConfig, std::string("/offload/") + (offload.verify ? "verify" : "cache") +
                                       ": there are no files: without paths, tier auto of a GPU is its host's memory. "
                                       "[T0216] hint: leave it out, or name directories in \"paths\"");
  }
}

[[noreturn]] void refuse(const std::string& text) { throw Error(ExitCode::kConfig, text); }

}  // namespace

void expect_built_for_device(const Strategy& strategy, bool is_gpu) {
  expect_tiers_of_device(strategy.offload, is_gpu);
  if (!is_gpu) return;
  if (strategy.sync.is_hogwild()) {
    refuse(
        "/sync/type: hogwild trains one copy of the parameters, which the operators of all ranks read in memory of the "
        "host, and a GPU trains. [T0825] hint: take \"asynchronous\", or train on the CPU (comm.transport \"host\")");
  }
  if (strategy.secondary.form == SecondaryForm::kInt8) {
    refuse(
        "/secondary/form: \"int8\" is rounded by the CPU's codec, and a GPU trains. [T0980] hint: take \"plain\", or "
        "train on the CPU (comm.transport \"host\" or \"gloo\")");
  }
}

}  // namespace tessera
