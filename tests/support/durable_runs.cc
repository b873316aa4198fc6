#include "tests/support/durable_runs.h"

#include <gtest/gtest.h>

#include "tessera/durable.h"

namespace tessera::testing {

Strategy made_durable(Strategy strategy, const std::filesystem::path& folder, std::int64_t every) {
  strategy.durable = {.every = every, .dir = folder.string()};
  return strategy;
}

int train_durably(Session& session, std::size_t begin, std::size_t end) {
  int commits = 0;
  for (std::size_t i = begin; i < end; ++i) {
    session.train(i);
    commits += commit_durable(session.engine) ? 1 : 0;
  }
  return commits;
}

void expect_goes_on(const Mesh& mesh, const Strategy& strategy, const TinyOptions& model,
                    const std::filesystem::path& folder, const std::string& what, const OwnRules& own_rules) {
  const Values wanted = trained(mesh, strategy, 6, model, own_rules);
  const Strategy durable = made_durable(strategy, folder, 2);
  {
    Session first(mesh, durable, model, own_rules);
    EXPECT_FALSE(resume_durable(first.engine).has_value());
    EXPECT_EQ(train_durably(first, 0, 5), 2) << what;
    first.train(0);  // this sixth step has other data, and no commit is made after it
  }
  {
    Session second(mesh, durable, model, own_rules);
    const auto resumed = resume_durable(second.engine);
    ASSERT_TRUE(resumed.has_value()) << what;
    EXPECT_EQ(resumed->step, 4) << what;
    EXPECT_EQ(second.engine.plan().use, second.engine.allocated()) << what;
    train_durably(second, 4, 6);
    EXPECT_TRUE(all_same_bits(second.values(), wanted)) << what;
  }
  Session third(mesh, durable, model, own_rules);
  EXPECT_EQ(resume_durable(third.engine)->step, 6) << what;
  EXPECT_TRUE(all_same_bits(third.values(), wanted)) << what;
}

}  // namespace tessera::testing
