#include "sharding/compress/gradient_method.h"

#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "sharding/compress/level_method.h"
#include "sharding/compress/majority_vote.h"
#include "sharding/compress/one_bit.h"
#include "sharding/compress/power_sgd.h"
#include "sharding/compress/random_k.h"
#include "sharding/compress/sign_feedback.h"
#include "sharding/compress/top_k.h"
#include "sharding/layout/factor_layout.h"

namespace tessera {

namespace {

/// The inputs from which a method is made.
struct Site {
  const FlatGroup& group;
  GroupShape shape;
  const MeshPosition& mesh;
  float* kept;
  float* work;

  std::int64_t numel() const { return shape.layout.numel(); }
  /// `of_rank`: the rank, if each rank draws separately; else -1.
  DrawStream draws(std::int64_t seed, std::int64_t of_rank) const {
    return {seed, group.parameters.front().number, of_rank};
  }
};
using Made = std::unique_ptr<GradientMethod>;

// A row for each type of CompressionMethod; the compiler refuses one that is missing.
Made make(const NoMethodConfig&, const Site&) { return nullptr; }
Made make(const PowerSgdConfig& method, const Site& at) {
  return std::make_unique<PowerSgd>(at.group, method.rank, at.kept, at.work);
}
Made make(const TopKConfig& method, const Site& at) {
  return std::make_unique<TopK>(at.numel(), count_of(at.shape, method.fraction), static_cast<float>(method.momentum),
                                at.kept, at.work);
}
Made make(const RandomKConfig& method, const Site& at) {
  return std::make_unique<RandomK>(at.numel(), count_of(at.shape, method.fraction), at.draws(method.seed, -1), at.kept,
                                   at.work);
}
Made make(const SignMajorityConfig&, const Site& at) {
  return std::make_unique<MajorityVote>(at.shape.layout, at.mesh.shard_size, at.work);
}
Made make(const SignFeedbackConfig&, const Site& at) {
  return std::make_unique<SignFeedback>(at.shape.layout, at.kept, at.work);
}
Made make(const OneBitConfig& method, const Site& at) {
  return std::make_unique<OneBit>(at.shape.layout, at.mesh.shard_index, at.mesh.shard_size,
                                  static_cast<float>(method.momentum), at.kept, at.work);
}
Made make(const QsgdConfig& method, const Site& at) {
  return std::make_unique<LevelMethod>(at.numel(), LevelForm{method.levels, LevelNorm::kSquares},
                                       at.draws(method.seed, at.mesh.shard_index), at.work);
}
Made make(const TernGradConfig& method, const Site& at) {
  return std::make_unique<LevelMethod>(at.numel(), LevelForm{1, LevelNorm::kMagnitude},
                                       at.draws(method.seed, at.mesh.shard_index), at.work);
}
Made make(const CommHookConfig&, const Site&) { return nullptr; }

}  // namespace

void expect_comm_hook(const CompressionConfig& compression, const CommHook* hook) {
  const bool wants = std::holds_alternative<CommHookConfig>(compression.method);
  if (wants && !hook)
    throw Error(ExitCode::kUsage, "compression.method is of type hook, and the program brings no rule. [T0618] hint: " +
                                      say(phrases::kBringHook));
  if (!wants && hook)
    throw Error(
        ExitCode::kUsage,
        "the Engine is given a CommHook, and compression.method is of another type than hook. [T0619] hint: set "
        "\"compression\": {\"method\": {\"type\": \"hook\"}}");
}

std::unique_ptr<GradientMethod> make_gradient_method(const MemoryPlan& plan, const FlatGroup& group, float* kept,
                                                     float* work) {
  const Site site{group, group.shape(), plan.placement().mesh, kept, work};
  if (plan.method_layout_of(site.shape).messages.empty()) return nullptr;
  return std::visit([&](const auto& method) { return make(method, site); }, plan.wire().compression.method);
}

}  // namespace tessera
