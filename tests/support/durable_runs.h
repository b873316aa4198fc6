#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "tests/support/session.h"

namespace tessera::testing {

Strategy made_durable(Strategy strategy, const std::filesystem::path& folder, std::int64_t every = 1);

/// Trains [begin, end) and offers each step for a commit; how many there were.
int train_durably(Session& session, std::size_t begin, std::size_t end);

/// A run that ends two steps behind its last commit, which a second one goes on from, with the bits of a run that nothing happened to.
void expect_goes_on(const Mesh& mesh, const Strategy& strategy, const TinyOptions& model,
                    const std::filesystem::path& folder, const std::string& what, const OwnRules& own_rules = {});

}  // namespace tessera::testing
