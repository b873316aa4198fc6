#include "workshop/app/plan/backup_gain.h"

#include "runtime/base/bytes.h"
#include "workshop/app/plan/unlike_ranks.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {

bool has_backups(const PlannedWorld& world) { return world.plan.wire().backups > 0; }

BackupGain backup_gain(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options,
                       const SimulatedWorld* with) {
  WorldOptions untraced = options;
  untraced.traced.clear();
  PlannedWorld without = world;
  without.strategy.deal.backups = 0;
  without.plan = ModelShapes(world.config).plan(without.strategy, world.topology);
  const SimulatedWorld own = with ? SimulatedWorld() : simulated(world, files, untraced);
  const SimulatedWorld& found = with ? *with : own;
  return {.backups = world.plan.wire().backups,
          .seconds = found.mean_s,
          .without_s = simulated(without, files, untraced).mean_s,
          .made_again = found.made_again,
          .twice = found.twice,
          .memory_bytes = world.plan.use().total() - without.plan.use().total(),
          .sent_bytes = world.plan.block_bytes_of_step() - without.plan.block_bytes_of_step()};
}

std::string to_text(const BackupGain& gain) {
  const double won_s = gain.won_s();
  return "deal.backups " + std::to_string(gain.backups) + ": a step takes " + number_text(gain.seconds, "%.4f") +
         " s, and " + number_text(gain.without_s, "%.4f") +
         " s without: " + number_text(won_s < 0 ? -won_s : won_s, "%.4f") + (won_s < 0 ? " s lost" : " s won") + "\n" +
         "microbatches of a step that another rank ends first: " + number_text(gain.made_again, "%.2f") +
         "; on which two ranks spend time: " + number_text(gain.twice, "%.2f") + "\n" + "they cost " +
         format_bytes(gain.memory_bytes) + " a rank, which sends " + format_bytes(gain.sent_bytes) +
         " more in each step\n"
         "not counted: the questions by which ranks claim microbatches, and the all-gather of who made which\n";
}

nlohmann::ordered_json to_json(const BackupGain& gain) {
  return {{"backups", gain.backups},       {"seconds", gain.seconds},  {"seconds_without", gain.without_s},
          {"made_again", gain.made_again}, {"made_twice", gain.twice}, {"memory_bytes", gain.memory_bytes},
          {"sent_bytes", gain.sent_bytes}};
}

}  // namespace tessera::app
