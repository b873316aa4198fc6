// Tests the order of a step's operations: passes over groups, updates, exchanges of matrices, and reads of offloaded
// records. The order is compared as text.

#include "sharding/layout/plan/step_program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace tessera {
namespace {

const char* word_of(VisitWork work) {
  switch (work) {
    case VisitWork::kMeasure:
      return "measure";
    case VisitWork::kLayerUpdates:
      return "layer updates";
    case VisitWork::kDirections:
      return "directions";
    case VisitWork::kReadMasters:
      return "masters";
    case VisitWork::kUpdate:
      return "update";
    case VisitWork::kSwapAverages:
      return "averages";
  }
  return "";
}

const char* word_of(StepOpKind kind) {
  switch (kind) {
    case StepOpKind::kRounds:
      return "rounds";
    case StepOpKind::kForward:
      return "forward";
    case StepOpKind::kAnnounce:
      return "announce";
    case StepOpKind::kBackward:
      return "backward";
    case StepOpKind::kUpdateInBackward:
      return "update in backward";
    case StepOpKind::kAgree:
      return "agree";
    case StepOpKind::kDecide:
      return "decide";
    case StepOpKind::kVisit:
      return "visit";
    case StepOpKind::kAgreeOnNorms:
      return "agree on norms";
    case StepOpKind::kExchange:
      return "exchange";
    case StepOpKind::kEndPass:
      return "end pass";
    case StepOpKind::kPublished:
      return "published";
    case StepOpKind::kBarrier:
      return "barrier";
  }
  return "";
}

/// Returns the groups that are visited, each with its direction: "3<" goes backward.
std::string words_of(std::span<const Visit> visits) {
  std::string text;
  for (const Visit& visit : visits) text += " " + std::to_string(visit.group) + (visit.backward ? "<" : ">");
  return text;
}

/// Returns a text that says which work the visits do, and how they access records of parameters and of states. It is
/// the same for all visits of an operation.
std::string work_of(std::span<const Visit> visits) {
  constexpr char kLetters[] = {'-', 'r', 'w'};
  const Visit& first = visits.front();
  for (const Visit& visit : visits) {
    EXPECT_EQ(visit.work, first.work);
    EXPECT_EQ(visit.parameters, first.parameters);
    EXPECT_EQ(visit.states, first.states);
    EXPECT_EQ(visit.backward, first.backward);
  }
  const auto letter = [&](Access access) { return kLetters[static_cast<std::size_t>(access)]; };
  return std::string(" ") + word_of(first.work) + " " + letter(first.parameters) + letter(first.states) + ":";
}

std::string words_of(const StepProgram& program, const StepOp& op) {
  const std::span<const Visit> visits =
      op.kind == StepOpKind::kRounds ? std::span<const Visit>() : program.visits_of(op);
  std::string text = word_of(op.kind);
  if (op.kind == StepOpKind::kRounds) text += " " + std::to_string(op.begin);
  if (op.kind != StepOpKind::kAnnounce && !visits.empty()) text += work_of(visits);
  return text + words_of(visits) + "\n";
}

/// Returns the program as text: one line for each operation, from the announcement of the first pass on. Operations of
/// units follow a line with the unit's number.
std::string words_of(const StepProgram& program) {
  std::string text = program.ends_when_skipped ? "" : "(skipped steps too)\n";
  for (const StepOp& op : program.ops) {
    if (op.kind != StepOpKind::kUpdateInBackward) {
      text += words_of(program, op);
      continue;
    }
    text += std::string(word_of(op.kind)) + (program.announces_units ? ", unit by unit\n" : "\n");
    for (std::size_t unit = program.unit_ops.size(); unit-- > 0;) {
      if (!program.unit_ops[unit].empty()) text += "unit " + std::to_string(unit) + "\n";
      for (const StepOp& of_unit : program.unit_ops[unit]) text += "  " + words_of(program, of_unit);
    }
  }
  return text;
}

std::string words_of(const std::vector<StepProgram>& programs) {
  std::string text;
  for (const StepProgram& program : programs) text += (text.empty() ? "" : "then\n") + words_of(program);
  return text;
}

/// Returns an input with three groups, each with one unit. The last two groups have matrices if a rule updates
/// matrices.
StepInput input_of(VisitWork first_work = VisitWork::kUpdate) {
  StepInput input;
  input.groups = {{0}, {1}, {2}};
  input.first_work = first_work;
  const bool has_matrices = first_work == VisitWork::kDirections || first_work == VisitWork::kReadMasters;
  if (has_matrices) {
    input.groups[1].of_matrices = input.groups[2].of_matrices = true;
    input.first_reads_states = true;
  }
  return input;
}

StepInput in_files(StepInput input) {
  input.states = {.exist = true, .in_files = true};
  return input;
}

StepInput on_a_gpu(StepInput input) {
  input.executor.queued = true;
  return input;
}

/// The operations between the announcement of the first pass and its visits.
constexpr char kTrain[] = "backward\nagree\ndecide\n";

TEST(StepProgram, PassGoesOnWhereTheLastOneEnded) {
  const std::string forward = std::string("forward\nannounce 0> 1> 2>\n") + kTrain + "visit update ww: 0> 1> 2>\n";
  const std::string backward = std::string("forward\nannounce 2< 1< 0<\n") + kTrain + "visit update ww: 2< 1< 0<\n";
  const std::string end = "published\nend pass\n";
  EXPECT_EQ(words_of(step_programs(input_of())), forward + end + "then\n" + backward + end)
      << "values go there and back";
  StepInput behind = input_of();
  behind.publishes_behind = true;
  EXPECT_EQ(words_of(step_programs(behind)), forward + "end pass\n") << "the next forward wants the first unit first";
  EXPECT_EQ(words_of(step_programs(in_files(behind))), forward + "end pass\nthen\n" + backward + "end pass\n");
  StepInput gradients = in_files(input_of());
  gradients.gradients_below = true;
  EXPECT_EQ(words_of(step_programs(gradients)), forward + end) << "backward left the first units' gradients in memory";
}

TEST(StepProgram, GpuAlternatesDirectionOnlyWithFiles) {
  const std::string forward = std::string("(skipped steps too)\nforward\nannounce 0> 1> 2>\n") + kTrain +
                              "visit update ww: 0> 1> 2>\npublished\nend pass\n";
  const std::string backward = std::string("(skipped steps too)\nforward\nannounce 2< 1< 0<\n") + kTrain +
                               "visit update ww: 2< 1< 0<\npublished\nend pass\n";
  EXPECT_EQ(words_of(step_programs(on_a_gpu(input_of()))), forward);
  EXPECT_EQ(words_of(step_programs(on_a_gpu(in_files(input_of())))), forward + "then\n" + backward);
  StepInput pinned = on_a_gpu(input_of());
  pinned.states.exist = true;
  EXPECT_EQ(words_of(step_programs(pinned)), forward);
  pinned.executor.host_updates = true;
  EXPECT_EQ(words_of(step_programs(pinned)), backward) << "gradients come in this order";
  pinned.gradients_below = true;
  EXPECT_EQ(words_of(step_programs(pinned)), forward);
}

TEST(StepProgram, UpdatesInBackwardVisitUnitsInBackwardOrder) {
  StepInput input = in_files(input_of());
  input.groups = {{0}, {0}, {1}, {2}, {2}};
  input.updates_in_backward = true;
  EXPECT_EQ(words_of(step_programs(input)),
            "forward\nannounce 3> 4> 2> 0> 1>\nupdate in backward\n"
            "unit 2\n  visit update ww: 3> 4>\nunit 1\n  visit update ww: 2>\nunit 0\n  visit update ww: 0> 1>\n"
            "agree\ndecide\npublished\nend pass\n");
}

/// A unit that does not train has no operations.
TEST(StepProgram, LayersOfAUnitAreMeasuredAndUpdatedBehindItsOwnReduction) {
  StepInput input = in_files(input_of(VisitWork::kLayerUpdates));
  input.groups = {{0}, {2}, {2}};
  input.updates_in_backward = true;
  EXPECT_EQ(words_of(step_programs(input)),
            "forward\nannounce 1> 2>\nupdate in backward, unit by unit\n"
            "unit 2\n  announce 1> 2>\n  visit layer updates rw: 1> 2>\n  agree on norms\n  end pass\n"
            "  announce 2< 1<\n  visit update ww: 2< 1<\n  end pass\n"
            "unit 0\n  announce 0>\n  visit layer updates rw: 0>\n  agree on norms\n  end pass\n"
            "  announce 0<\n  visit update ww: 0<\n  end pass\n"
            "agree\ndecide\npublished\nend pass\n");
}

TEST(StepProgram, MicrobatchesComeFirstAndTheBarrierLast) {
  StepInput input = input_of();
  input.rounds = 4;
  input.shares_parameters = input.publishes_behind = true;
  EXPECT_EQ(words_of(step_programs(input)), std::string("rounds 3\nforward\nannounce 0> 1> 2>\n") + kTrain +
                                                "visit update ww: 0> 1> 2>\nbarrier\nend pass\n");
}

TEST(StepProgram, LayerwiseRulesMeasureForwardAndUpdateBackward) {
  const auto wanted = [](const std::string& first, const std::string& second) {
    return "forward\nannounce 0> 1> 2>\n" + std::string(kTrain) + "visit " + first +
           ": 0> 1> 2>\nagree on norms\nend pass\nannounce" + second + "\nvisit update ww:" + second +
           "\npublished\nend pass\n";
  };
  EXPECT_EQ(words_of(step_programs(in_files(input_of(VisitWork::kMeasure)))), wanted("measure rr", " 2< 1< 0<"));
  EXPECT_EQ(words_of(step_programs(in_files(input_of(VisitWork::kLayerUpdates)))),
            wanted("layer updates rw", " 2< 1< 0<"));
  EXPECT_EQ(words_of(step_programs(on_a_gpu(input_of(VisitWork::kMeasure)))),
            "(skipped steps too)\n" + wanted("measure rr", " 0> 1> 2>"));
}

TEST(StepProgram, MatrixRulesVisitMatricesThereAndBack) {
  EXPECT_EQ(words_of(step_programs(in_files(input_of(VisitWork::kDirections)))),
            std::string("forward\nannounce 0> 1> 2>\n") + kTrain +
                "visit update ww: 0>\nvisit directions -w: 1> 2>\nend pass\nannounce 2< 1<\nexchange\n"
                "visit update ww: 2< 1<\npublished\nend pass\nthen\n"
                "forward\nannounce 1> 2>\n" +
                kTrain +
                "visit directions -w: 1> 2>\nend pass\nannounce 2< 1< 0<\nexchange\n"
                "visit update ww: 2< 1< 0<\npublished\nend pass\n");
}

TEST(StepProgram, GpuQueuesTheExchangeBeforeItWaitsForRecords) {
  EXPECT_EQ(words_of(step_programs(on_a_gpu(input_of(VisitWork::kDirections)))),
            std::string("(skipped steps too)\nforward\nannounce 0> 1> 2>\n") + kTrain +
                "visit update ww: 0>\nvisit directions -w: 1> 2>\nend pass\nexchange\nannounce 1> 2>\n"
                "visit update ww: 1> 2>\npublished\nend pass\n");
}

/// The host has to know the decision, so a skipped step ends at the decision on a GPU too.
TEST(StepProgram, TensorRulesExchangeMastersWhileTheyReadThem) {
  StepInput input = on_a_gpu(in_files(input_of(VisitWork::kReadMasters)));
  const std::string first = std::string("forward\nannounce 0> 1> 2>\n") + kTrain +
                            "visit update ww: 0>\nexchange masters -r: 1> 2>\nend pass\nannounce 2< 1<\n"
                            "visit update ww: 2< 1<\npublished\nend pass\n";
  const std::string second = std::string("forward\nannounce 1> 2>\n") + kTrain +
                             "exchange masters -r: 1> 2>\nend pass\nannounce 2< 1< 0<\n"
                             "visit update ww: 2< 1< 0<\npublished\nend pass\n";
  EXPECT_EQ(words_of(step_programs(input)), first + "then\n" + second);
  input.executor.queued = false;
  EXPECT_EQ(words_of(step_programs(input)), first + "then\n" + second);
}

/// A swap of averages visits the groups in the same direction as the steps around it. The swap back begins where the
/// first swap ended.
TEST(StepProgram, AveragesAreSwappedInOnePassUnderEveryRule) {
  const std::string forward = "announce 0> 1> 2>\nvisit averages ww: 0> 1> 2>\npublished\nend pass\n";
  const std::string backward = "announce 2< 1< 0<\nvisit averages ww: 2< 1< 0<\npublished\nend pass\n";
  const std::string queued = "(skipped steps too)\n";
  for (const VisitWork work : {VisitWork::kUpdate, VisitWork::kMeasure, VisitWork::kLayerUpdates,
                               VisitWork::kDirections, VisitWork::kReadMasters}) {
    EXPECT_EQ(words_of(averages_programs(in_files(input_of(work)))), forward + "then\n" + backward);
  }
  EXPECT_EQ(words_of(averages_programs(on_a_gpu(input_of()))), queued + forward);
  EXPECT_EQ(words_of(averages_programs(on_a_gpu(in_files(input_of())))),
            queued + forward + "then\n" + queued + backward);
  StepInput on_host = on_a_gpu(input_of());
  on_host.states.exist = on_host.executor.host_updates = true;
  EXPECT_EQ(words_of(averages_programs(on_host)), queued + backward) << "as steps go";
  StepInput gradients = in_files(input_of());
  gradients.gradients_below = gradients.shares_parameters = gradients.publishes_behind = true;
  const std::vector<StepProgram> programs = averages_programs(gradients);
  EXPECT_EQ(words_of(programs), "announce 0> 1> 2>\nvisit averages ww: 0> 1> 2>\nbarrier\nend pass\n");
  for (const Visit& visit : programs.front().visits) EXPECT_FALSE(visit.needs_gradients);
}

TEST(StepProgram, OffloadedGradientsAreOpenOnlyForDeviceUpdates) {
  StepInput input = on_a_gpu(input_of());
  input.groups[1].by_device = false;
  for (const bool below : {false, true}) {
    input.gradients_below = below;
    const std::vector<StepProgram> programs = step_programs(input);
    for (const Visit& visit : programs.front().visits)
      EXPECT_EQ(visit.needs_gradients, below && visit.group != 1) << visit.group;
  }
}

/// Calls `test` for every kind of input.
template <class Test>
void for_inputs(const Test& test) {
  for (const VisitWork work : {VisitWork::kUpdate, VisitWork::kMeasure, VisitWork::kLayerUpdates,
                               VisitWork::kDirections, VisitWork::kReadMasters}) {
    for (int bits = 0; bits < 1 << 7; ++bits) {
      const auto has = [&](int bit) { return (bits >> bit & 1) != 0; };
      StepInput input = input_of(work);
      input.parameters = {has(0), has(1)};
      input.states = {has(2), has(1)};
      input.executor.queued = has(3);
      input.publishes_behind = has(4) && !has(3);
      input.gradients_below = has(5) && work == VisitWork::kUpdate;
      input.updates_in_backward = has(6) && !input.gradients_below;
      test(input, step_programs(input));
    }
  }
}

/// A unit's elements are updated while its matrices are on their way to owners.
TEST(StepProgram, MatricesOfAUnitAreExchangedBehindItsOwnReduction) {
  const auto in_backward = [](VisitWork work) {
    StepInput input = in_files(input_of(work));
    input.groups = {{0}, {1, true}, {1}, {1, true}};
    input.updates_in_backward = true;
    return words_of(step_programs(input));
  };
  const std::string before = "forward\nannounce 2> 1> 3>\nupdate in backward, unit by unit\n";
  const std::string after =
      "unit 0\n  announce 0>\n  visit update ww: 0>\n  end pass\nagree\ndecide\npublished\nend pass\n";
  EXPECT_EQ(in_backward(VisitWork::kDirections),
            before +
                "unit 1\n  announce 2> 1> 3>\n  visit update ww: 2>\n  visit directions -w: 1> 3>\n  end pass\n"
                "  announce 3< 1<\n  exchange\n  visit update ww: 3< 1<\n  end pass\n" +
                after);
  EXPECT_EQ(in_backward(VisitWork::kReadMasters),
            before +
                "unit 1\n  announce 2> 1> 3>\n  visit update ww: 2>\n  exchange masters -r: 1> 3>\n  end pass\n"
                "  announce 3< 1<\n  visit update ww: 3< 1<\n  end pass\n" +
                after);
}

/// A GPU's passes over records in pinned memory need not change their direction, since a record is already being copied
/// back when the pass ends.
TEST(StepProgram, GpuQueuesAUnitsExchangeBeforeItWaitsForRecords) {
  StepInput input = on_a_gpu(input_of(VisitWork::kDirections));
  input.groups = {{0}, {1, true}, {1}, {1, true}};
  input.updates_in_backward = true;
  EXPECT_EQ(words_of(step_programs(input)),
            "(skipped steps too)\nforward\nannounce 2> 1> 3>\nupdate in backward, unit by unit\n"
            "unit 1\n  announce 2> 1> 3>\n  visit update ww: 2>\n  visit directions -w: 1> 3>\n  end pass\n"
            "  exchange\n  announce 1> 3>\n  visit update ww: 1> 3>\n  end pass\n"
            "unit 0\n  announce 0>\n  visit update ww: 0>\n  end pass\nagree\ndecide\npublished\nend pass\n");
}

/// Returns all operations, with kUpdateInBackward replaced by the operations of each unit.
std::vector<StepOp> all_ops_of(const StepProgram& program) {
  std::vector<StepOp> all;
  for (const StepOp& op : program.ops) {
    if (op.kind != StepOpKind::kUpdateInBackward) all.push_back(op);
    for (std::size_t unit = program.unit_ops.size(); op.kind == StepOpKind::kUpdateInBackward && unit-- > 0;)
      all.insert(all.end(), program.unit_ops[unit].begin(), program.unit_ops[unit].end());
  }
  return all;
}

TEST(StepProgram, EveryGroupIsUpdatedOnceInAnAnnouncedPass) {
  for_inputs([](const StepInput& input, const std::vector<StepProgram>& programs) {
    for (const StepProgram& program : programs) {
      std::vector<std::int32_t> updated;
      std::int64_t announced = 0, visited = 0;
      for (const StepOp& op : all_ops_of(program)) {
        if (op.kind == StepOpKind::kAnnounce) {
          EXPECT_EQ(op.begin, visited) << "all visits that were announced have been made";
          announced = op.end;
        } else if (op.kind != StepOpKind::kRounds && op.end > op.begin) {
          EXPECT_EQ(op.begin, visited);
          visited = op.end;
          EXPECT_LE(visited, announced);
        }
      }
      EXPECT_EQ(visited, std::ssize(program.visits));
      for (const Visit& visit : program.visits) {
        if (visit.work == VisitWork::kUpdate) updated.push_back(visit.group);
      }
      std::ranges::sort(updated);
      EXPECT_EQ(updated, (std::vector<std::int32_t>{0, 1, 2}));
    }
    EXPECT_LE(programs.size(), 2U);
    EXPECT_EQ(programs.front().ends_when_skipped, programs.back().ends_when_skipped);
    EXPECT_TRUE(input.executor.queued || programs.front().ends_when_skipped);
  });
}

/// A pass that begins where the previous pass ended finds the records that are still in slots.
TEST(StepProgram, PassesOverFilesBeginWhereTheLastOneEnded) {
  for_inputs([](const StepInput& input, const std::vector<StepProgram>& programs) {
    if (!input.states.exist || !input.states.in_files || input.gradients_below || input.updates_in_backward) return;
    std::vector<Visit> visits;
    for (const StepProgram& program : {programs.front(), programs.back(), programs.front()})
      visits.insert(visits.end(), program.visits.begin(), program.visits.end());
    for (std::size_t i = 1; i < visits.size(); ++i) {
      const bool turns = visits[i - 1].backward != visits[i].backward;
      EXPECT_EQ(turns, visits[i - 1].group == visits[i].group) << i;
    }
  });
}

}  // namespace
}  // namespace tessera
