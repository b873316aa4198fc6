#include "sharding/gradient_method.h"

#include "runtime/border/throw.h"
#include "sharding/power_sgd.h"
#include "sharding/top_k.h"

namespace tessera {

void expect_comm_hook(const CompressionConfig& compression, const CommHook* hook) {
  if (compression.hook && !hook)
    throw Error(ExitCode::kUsage,
                "compression.hook is true, and the program brings no rule. hint: give the Engine a CommHook "
                "(tessera/comm_hook.h)");
  if (!compression.hook && hook)
    throw Error(
        ExitCode::kUsage,
        "the Engine is given a CommHook, and compression.hook is false. hint: \"compression\": {\"hook\": true}");
}

std::unique_ptr<GradientMethod> make_gradient_method(const MemoryPlan& plan, const FlatGroup& group, float* kept,
                                                     float* work) {
  const GroupShape shape = group.shape();
  if (plan.method_memory_of(shape).kept == 0) return nullptr;
  const CompressionConfig& compression = plan.input().compression;
  if (compression.power_sgd_rank > 0) {
    return std::make_unique<PowerSgd>(group, compression.power_sgd_rank, kept, work);
  }
  return std::make_unique<TopK>(shape.layout.numel(), count_of_largest(shape, compression.top_k), kept, work);
}

}  // namespace tessera
