// DeepSpeed: "scheduler".
//
// DeepSpeed's scheduler takes its first step after the first update. Update k, counted from 0, has the rate of iteration
// k - 1, and the first two have that of the beginning. Tessera's schedules (optim/lr_schedule.h) count updates. With
// W = warmup_num_steps and T = total_num_steps of DeepSpeed, and a rise that is linear from 0:
//
//   scheduler       DeepSpeed, iteration i = k - 1              Tessera, update k                       equal from
//   WarmupLR        i / W, then 1                               constant, warmup_steps W + 1            k = W + 1
//   WarmupDecayLR   i / W, then (T - i) / (T - W)               linear, W + 1 and total_steps T + 1     k = W + 1
//   WarmupCosineLR  i / W, then a cosine of (i - W + 1)/(T - W) cosine, W and T                         k = W + 1
//
// Before that Tessera's rate is (k + 1) / (warmup_steps + 1) of the peak: a little higher, and never 0.

#include <algorithm>
#include <map>

#include "app/import/import_formats.h"
#include "runtime/base/text.h"

namespace tessera::app {
namespace {

constexpr char kSchedulerParams[] = "scheduler.params.";
constexpr std::int64_t kDefaultWarmup = 1000;
constexpr std::int64_t kLeastWarmup = 2;  // DeepSpeed rounds up to it
constexpr double kDefaultPeak = 0.001;
constexpr double kDefaultCosineEnd = 0.0001;

struct KnownScheduler {
  std::string name;   ///< lower case
  std::string type;   ///< of Tessera
  bool late = false;  ///< its numbers are one update later in Tessera's counting
  bool has_total = false;
  std::vector<std::string> params;
};

const std::vector<KnownScheduler>& known_schedulers() {
  static const std::vector<KnownScheduler> known = {
      {"warmuplr",
       "constant",
       true,
       false,
       {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"}},
      {"warmupdecaylr",
       "linear",
       true,
       true,
       {"total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
        "last_batch_iteration"}},
      {"warmupcosinelr",
       "cosine",
       false,
       true,
       {"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
        "last_batch_iteration"}},
  };
  return known;
}

const KnownScheduler* scheduler_of(const ImportSession& session) {
  const JsonNode* type = session.find("scheduler.type");
  if (type == nullptr) return nullptr;
  const auto& known = known_schedulers();
  const auto found =
      std::find_if(known.begin(), known.end(), [&](const KnownScheduler& each) { return each.name == word_of(*type); });
  return found == known.end() ? nullptr : &*found;
}

std::string param(const std::string& name) { return kSchedulerParams + name; }

// Its numbers come from the training program.
bool is_left_to_program(const ImportSession& session, const KnownScheduler& scheduler) {
  return session.is_auto(param("warmup_num_steps")) ||
         (scheduler.has_total && session.is_auto(param("total_num_steps")));
}

constexpr char kLogarithm[] =
    "the warm-up of DeepSpeed rises with the logarithm of the step, which is its default, and Tessera's rises "
    "linearly. Say \"warmup_type\": "
    "\"linear\" if that is fine";

// Why the schedule as a whole cannot be said; empty: it can.
std::string schedule_problem(const ImportSession& session, const KnownScheduler& scheduler) {
  if (scheduler.has_total && session.find(param("total_num_steps")) == nullptr)
    return "total_num_steps is missing. Give it, or set lr_schedule in the strategy";
  if (session.find(param("warmup_type")) == nullptr) return kLogarithm;
  return "";
}

// Null: the schedule is not taken over.
const KnownScheduler* taken_scheduler(const ImportSession& session) {
  const KnownScheduler* scheduler = scheduler_of(session);
  if (scheduler == nullptr || is_left_to_program(session, *scheduler) || !schedule_problem(session, *scheduler).empty())
    return nullptr;
  return scheduler;
}

const std::map<std::string, std::string>& refused_schedulers() {
  static const std::map<std::string, std::string> refused = {
      {"onecycle",
       "DeepSpeed's OneCycle rises and falls linearly, moves the momentum against the rate and decays afterwards; "
       "Tessera's one_cycle follows "
       "cosines and leaves the momentum. Set lr_schedule {\"type\": \"one_cycle\"}, or {\"type\": \"manual\"} and call "
       "Engine::set_lr"},
      {"lrrangetest",
       "Tessera has no range test. Set lr_schedule {\"type\": \"manual\"} and call Engine::set_lr before each step"},
  };
  return refused;
}

void scheduler_type(ImportSession& session, const ConfigKey& key) {
  const KnownScheduler* scheduler = scheduler_of(session);
  if (scheduler == nullptr) {
    const auto refused = refused_schedulers().find(word_of(*key.node));
    if (refused != refused_schedulers().end()) return session.refused(key, refused->second);
    std::vector<std::string> names = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
    return session.refused(
        key, "Tessera does not know this scheduler" + did_you_mean(word_of(*key.node), names) +
                 "; or set lr_schedule in the strategy; with {\"type\": \"manual\"} the program calls Engine::set_lr");
  }
  if (is_left_to_program(session, *scheduler))
    return session.ignored(key,
                           "its numbers are \"auto\", so the schedule is the program's. TesseraTrainer takes it from "
                           "TrainingArguments; elsewhere set "
                           "lr_schedule {\"type\": \"" +
                               scheduler->type + "\"} in the strategy");
  if (const std::string problem = schedule_problem(session, *scheduler); !problem.empty())
    return session.refused(key, problem);
  session.put(key, "/lr_schedule/type", scheduler->type);
}

void warmup_steps(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::int64_t> steps = integer_of(*key.node);
  if (!steps || *steps < 0) return session.refused(key, "must be an integer of at least 0");
  const std::int64_t rounded = std::max(*steps, kLeastWarmup);
  session.put(key, "/lr_schedule/warmup_steps", rounded + (scheduler_of(session)->late ? 1 : 0),
              "From the end of the warm-up on every rate is that of DeepSpeed. Difference: in the warm-up Tessera's is "
              "up to two updates ahead, "
              "as its first is not 0");
}

void total_steps(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::int64_t> steps = integer_of(*key.node);
  if (!steps || *steps < 1) return session.refused(key, "must be an integer of at least 1");
  const bool late = scheduler_of(session)->late;
  session.put(key, "/lr_schedule/total_steps", *steps + (late ? 1 : 0),
              late ? "DeepSpeed's scheduler takes its first step after the first update, so it ends one update later "
                     "than it says"
                   : "");
}

void warmup_type(ImportSession& session, const ConfigKey& key) {
  if (word_of(*key.node) == "linear") return session.ignored(key, "Tessera's warm-up rises linearly too");
  session.refused(key, kLogarithm);
}

using SchedulerRule = std::function<void(ImportSession&, const ConfigKey&)>;

ImportRow of_schedulers(const std::string& name, const std::string& doc, const SchedulerRule& rule) {
  return by_rule(param(name), doc, [name, rule](ImportSession& session, const ConfigKey& key) {
    const KnownScheduler* scheduler = scheduler_of(session);
    const bool unknown = scheduler != nullptr &&
                         std::find(scheduler->params.begin(), scheduler->params.end(), name) == scheduler->params.end();
    if (unknown) return session.refused(key, "scheduler.type " + scheduler->name + " has no such parameter");
    if (taken_scheduler(session) == nullptr)
      return session.ignored(key, "follows scheduler.type, which is not taken over");
    rule(session, key);
  });
}

ImportRow starts_at_zero(const std::string& name) {
  const ImportRow plain = expects(name, 0.0, "Tessera's warm-up begins near 0 too",
                                  "Tessera's warm-up begins near 0. Set it to 0, or set lr_schedule {\"type\": "
                                  "\"manual\"} and call Engine::set_lr");
  return of_schedulers(name, plain.doc, plain.apply);
}

}  // namespace

nlohmann::json deepspeed_scheduler_peak(const ImportSession& session) {
  const KnownScheduler* scheduler = taken_scheduler(session);
  if (scheduler == nullptr || scheduler->name == "warmupcosinelr" || session.is_auto(param("warmup_max_lr")))
    return nullptr;
  const JsonNode* given = session.find(param("warmup_max_lr"));
  if (given != nullptr) return number_of(*given) ? nlohmann::json(*number_of(*given)) : nlohmann::json();
  return scheduler->name == "warmupdecaylr" ? nlohmann::json(kDefaultPeak) : nlohmann::json();
}

std::vector<ImportRow> deepspeed_scheduler_rows() {
  const ImportRow iteration = expects("last_batch_iteration", -1.0, "the schedule begins at the beginning",
                                      "a checkpoint says at which step training goes on");
  return {
      by_rule("scheduler.type",
              "WarmupLR, WarmupDecayLR, WarmupCosineLR with a linear warm-up: `lr_schedule.type` \"constant\", "
              "\"linear\", \"cosine\". Ignored where its "
              "numbers are \"auto\". Refused: a logarithmic warm-up, which is DeepSpeed's default; OneCycle; "
              "LRRangeTest; all others",
              scheduler_type),
      of_schedulers(
          "warmup_num_steps",
          "`lr_schedule.warmup_steps`, one more for WarmupLR and WarmupDecayLR, whose schedule begins an update late",
          warmup_steps),
      of_schedulers("total_num_steps", "`lr_schedule.total_steps`, one more for WarmupDecayLR", total_steps),
      of_schedulers("warmup_type", "\"linear\": ignored, as Tessera's is linear; else refused", warmup_type),
      of_schedulers("warmup_max_lr", "`optimizer.lr`", sets("", "/optimizer/lr").apply),
      starts_at_zero("warmup_min_lr"),
      starts_at_zero("warmup_min_ratio"),
      of_schedulers("cos_min_ratio", "`lr_schedule.min_ratio`", sets("", "/lr_schedule/min_ratio").apply),
      of_schedulers("last_batch_iteration", iteration.doc, iteration.apply),
      by_rule("scheduler.params.*", "refused, but ignored where `scheduler.type` is not taken over",
              [](ImportSession& session, const ConfigKey& key) {
                if (taken_scheduler(session) == nullptr)
                  return session.ignored(key, "follows scheduler.type, which is not taken over");
                session.refused(key, "unknown parameter of the scheduler");
              }),
  };
}

void finish_deepspeed_scheduler(ImportSession& session) {
  const KnownScheduler* scheduler = taken_scheduler(session);
  if (scheduler == nullptr) return;
  if (session.find(param("warmup_num_steps")) == nullptr)
    session.imply("/lr_schedule/warmup_steps", kDefaultWarmup + (scheduler->late ? 1 : 0), "DeepSpeed's default");
  if (scheduler->type == "cosine" && session.find(param("cos_min_ratio")) == nullptr)
    session.imply("/lr_schedule/min_ratio", kDefaultCosineEnd, "DeepSpeed's default");
}

}  // namespace tessera::app
