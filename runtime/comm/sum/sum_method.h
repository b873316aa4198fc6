#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <memory>
#include <string_view>

#include "runtime/comm/collectives.h"

namespace tessera {

/// A compressor that makes sums with its own calls, which send fewer bytes than the elements have.
class SumMethod {
 public:
  /// Replaces `data[0, numel)` of this rank by the compressor's sum over the ranks of `group`, with the same bits on
  /// all of them. Until this function returns, only the compressor calls `group`. Every rank makes the same calls. If
  /// reductions run in the background, the thread that makes them calls this function.
  virtual absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) = 0;

 protected:
  ~SumMethod() = default;
};

/// Wraps `group` so that reductions of fp32 with ReduceOptions::method are made by that method, before the call
/// returns. All other calls go to `group` unchanged. It is meant for transports that send over a network, below
/// reducing_in_background. If a method fails, the group ends, since its peers would wait for this rank.
std::shared_ptr<Collectives> summing_by_methods(std::shared_ptr<Collectives> group);

/// Makes `call`, of fp32, over `group` by ReduceOptions::method, which is not null.
absl::Status reduce_by_method(Collectives& group, const ReduceCall& call);

}  // namespace tessera
