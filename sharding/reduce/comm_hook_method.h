#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "sharding/compress/gradient_method.h"
#include "sharding/unit.h"
#include "tessera/comm_hook.h"
#include "tessera/strategy.h"

namespace tessera {

/// A method whose sums are made by a CommHook of the program.
class CommHookMethod final : public GradientMethod {
 public:
  /// `index` is CommHook::Bucket::index.
  CommHookMethod(const FlatGroup& group, std::shared_ptr<CommHook> hook, std::int64_t index);

  void begin_step(std::int64_t step) override { bucket_.step = step; }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  /// Adds nothing, since the program owns the data that its hook keeps.
  void add_kept(FlatGroup&, KeptGradients&) const override {}

 private:
  const FlatGroup& group_;
  const std::shared_ptr<CommHook> hook_;
  CommHook::Bucket bucket_;
};

/// Throws tessera::Error (64) if compression.method has the type hook and there is no hook, or if there is a hook and
/// the method has another type.
void expect_comm_hook(const CompressionConfig& compression, const CommHook* hook);

}  // namespace tessera
