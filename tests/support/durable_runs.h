#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "tests/support/session.h"

namespace tessera::testing {

Strategy made_durable(Strategy strategy, const std::filesystem::path& folder, std::int64_t every = 1);

/// Trains steps [begin, end) and offers each step for a commit. Returns the number of commits.
int train_durably(Session& session, std::size_t begin, std::size_t end);

/// Ends a run two steps after its last commit, and continues from the commit in a second run. Checks that the second
/// run has the bits of a run that was not interrupted.
void expect_goes_on(const Mesh& mesh, const Strategy& strategy, const TinyOptions& model,
                    const std::filesystem::path& folder, const std::string& what, const OwnRules& own_rules = {});

}  // namespace tessera::testing
