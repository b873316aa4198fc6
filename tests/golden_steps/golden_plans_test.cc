// Tests that the bytes, traffic and predicted seconds of all configurations are exactly those of plans.txt. These
// numbers do not depend on the machine: bytes and traffic are integers, and seconds are computed from made-up links and
// a made-up profile.
//
// docs/testing.md says when plans.txt may be written again.

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "engine/detailed_plan.h"
#include "engine/job/mesh_shape.h"
#include "tests/golden_steps/configuration.h"
#include "tests/golden_steps/golden_file.h"
#include "tests/golden_steps/written_plan.h"

namespace tessera::testing {
namespace {

/// Returns a model with more units than any plan has slots. Each unit has several records.
TinyOptions deep(TinyOptions options) {
  options.vocab = options.width = 64;
  options.hidden = 192;
  options.blocks = 10;
  return options;
}

Links links_of(double alpha_s, double beta_s_per_byte) {
  const auto fit = [&](double share) {
    return OperationFit{alpha_s * share, beta_s_per_byte * share, alpha_s * share * 1.5,
                        beta_s_per_byte * share * 1.25};
  };
  Links links{.transport = "made up", .all_gather = fit(1), .reduce_scatter = fit(1.125), .all_reduce = fit(1.25)};
  links.small = fit(0.5);
  links.cpu_s_per_byte = beta_s_per_byte / 8;
  links.sum_s_per_byte = beta_s_per_byte / 16;
  links.coding = {.lossless_s_per_byte = beta_s_per_byte / 4,
                  .int8_s_per_byte = beta_s_per_byte / 16,
                  .int4_s_per_byte = beta_s_per_byte / 32,
                  .load = 0.5};
  return links;
}

Links in_memory(Links links) {
  links.reduces_in_background = links.gathers_in_background = false;
  return links;
}

/// Returns the links of a configuration. Each byte takes `slower` times as long.
MeshLinks links_for(const Configuration& configuration, const Strategy& strategy, double slower) {
  const Links network = links_of(1e-5, 1e-9 * slower), memory = in_memory(links_of(2e-6, 2.5e-10 * slower));
  const Topology topology = configuration.topology();
  const bool is_in_memory = would_share_memory(mesh_shape(strategy, topology), topology, strategy.comm.transport);
  return {is_in_memory ? memory : network, configuration.joined == Joined::kMemory ? memory : network};
}

/// Returns a profile in which forward uses units in order, and backward in the reverse order. A recomputed unit
/// runs forward once more in backward.
StepProfile profile_for(const MemoryPlan& plan, bool recomputes) {
  StepProfile profile;
  const std::vector<UnitShape>& units = plan.units();
  const auto seconds = [&](std::size_t unit) { return 1e-4 + 1e-5 * static_cast<double>(unit); };
  for (std::size_t i = 0; i < units.size(); ++i)
    profile.entries.push_back({units[i].name, RoundPass::kForward, seconds(i)});
  for (std::size_t i = units.size(); i-- > 0;) {
    if (recomputes && i > 0) profile.entries.push_back({units[i].name, RoundPass::kForward, seconds(i)});
    profile.entries.push_back({units[i].name, RoundPass::kBackward, 2 * seconds(i)});
    profile.updated_elements += units[i].trainable_numel();
  }
  profile.update_seconds = 4e-4;
  profile.rest_seconds = 5e-5;
  return profile;
}

GoldenFile& golden() {
  static GoldenFile file(
      TESSERA_GOLDEN_FOLDER "/plans.txt",
      {"The plan of each configuration, and the predicted seconds of a step: for the model that golden_runs_test",
       "trains (small), and for one of more units (deep). Numbers that are 0 are left out.",
       "golden_plans_test compares it. docs/testing.md says when it may be written anew."},
      names_of_configurations());
  return file;
}

class GoldenPlans : public ::testing::TestWithParam<Configuration> {
 protected:
  static void TearDownTestSuite() { golden().write(); }
};

TEST_P(GoldenPlans, BytesTrafficAndSecondsEqualTheStoredOnes) {
  const Configuration& configuration = GetParam();
  const Strategy strategy = configuration.planned();
  GoldenFile::Lines lines;
  for (const auto& [what, model] : {std::pair("small", configuration.model), {"deep", deep(configuration.model)}}) {
    Tiny module = make_tiny(model, true);
    const MemoryPlan plan = plan_in_detail(*module, strategy, configuration.topology(), own_rules_for(strategy));
    write_plan(what, plan, lines);
    const StepProfile profile = profile_for(plan, model.recompute);
    for (const auto& [speed, slower] : {std::pair("fast", 1.0), {"slow", 50.0}}) {
      const auto step = predict_step(plan, profile, links_for(configuration, strategy, slower));
      ASSERT_TRUE(step.ok()) << step.status();
      write_step(std::string(what) + " ns, " + speed + " links", *step, lines);
    }
  }
  golden().expect(configuration.name, lines);
  if (GoldenFile::is_written_anew()) GTEST_SKIP() << "stored, and not compared";
}

TEST(GoldenPlansFile, SectionsAreExactlyTheConfigurations) { golden().expect_no_other_sections(); }

INSTANTIATE_TEST_SUITE_P(Configurations, GoldenPlans, ::testing::ValuesIn(configurations()),
                         [](const auto& info) { return name_of_case(info.param); });

}  // namespace
}  // namespace tessera::testing
