#pragma once

#include <string>

#include "planner/predicted_step.h"
#include "sharding/layout/plan/memory_plan.h"
#include "tests/golden_steps/golden_file.h"

namespace tessera::testing {

/// Appends all numbers of a plan. `what` begins each line.
void write_plan(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines);

/// Appends all numbers of a predicted step, without the text about the parts that are not included.
void write_step(const std::string& what, const PredictedStep& step, GoldenFile::Lines& lines);

}  // namespace tessera::testing
