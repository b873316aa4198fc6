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
#include "sharding/layout/method_layout.h"

namespace tessera {

void expect_comm_hook(const CompressionConfig& compression, const CommHook* hook) {
  if (compression.hook && !hook)
    throw Error(ExitCode::kUsage,
                "compression.hook is true, and the program brings no rule. [T0618] hint: " + say(phrases::kBringHook));
  if (!compression.hook && hook)
    throw Error(ExitCode::kUsage,
                "the Engine is given a CommHook, and compression.hook is false. [T0619] hint: set \"compression\": "
                "{\"hook\": true}");
}

std::unique_ptr<GradientMethod> make_gradient_method(const MemoryPlan& plan, const FlatGroup& group, float* kept,
                                                     float* work) {
  const GroupShape shape = group.shape();
  if (plan.method_memory_of(shape).work == 0) return nullptr;
  const CompressionConfig& compression = plan.input().compression;
  const MeshPosition& mesh = plan.input().mesh;
  const std::int64_t numel = shape.layout.numel(), number = group.parameters.front().number;
  switch (method_kind(compression)) {
    case MethodKind::kNone:
      return nullptr;
    case MethodKind::kPowerSgd:
      return std::make_unique<PowerSgd>(group, compression.power_sgd_rank, kept, work);
    case MethodKind::kTopK:
      return std::make_unique<TopK>(numel, count_of_largest(shape, compression.top_k),
                                    static_cast<float>(compression.top_k_momentum), kept, work);
    case MethodKind::kRandomK:
      return std::make_unique<RandomK>(numel, count_of_largest(shape, compression.random_k),
                                       DrawStream(compression.seed, number, /*of_rank=*/-1), kept, work);
    case MethodKind::kMajority:
      return std::make_unique<MajorityVote>(shape.layout, mesh.shard_size, work);
    case MethodKind::kSignFeedback:
      return std::make_unique<SignFeedback>(shape.layout, kept, work);
    case MethodKind::kOneBit:
      return std::make_unique<OneBit>(shape.layout, mesh.shard_index, mesh.shard_size,
                                      static_cast<float>(compression.one_bit_momentum), kept, work);
    case MethodKind::kLevels: {
      const LevelNorm norm = compression.terngrad ? LevelNorm::kMagnitude : LevelNorm::kSquares;
      return std::make_unique<LevelMethod>(numel, LevelForm{levels_of(compression), norm},
                                           DrawStream(compression.seed, number, mesh.shard_index), work);
    }
  }
  return nullptr;
}

}  // namespace tessera
