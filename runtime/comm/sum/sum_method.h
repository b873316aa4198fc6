#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

#include "runtime/base/wire/sign_messages.h"
#include "runtime/comm/collectives.h"

namespace tessera {

/// The part of a SumMethod whose messages a GPU can make. Then the contribution itself need not be copied to the host.
class SumOfMessages {
 public:
  /// Returns how a GPU makes the messages of the next sum's contribution, which has `numel` elements; or nothing if the
  /// host has to make them. It is called in the order of the sums, on the thread that starts them.
  virtual std::optional<SignMessages> next_messages(std::size_t numel) = 0;
  /// Does the rest of SumMethod::sum. `data` begins with the messages that next_messages described, and its other bytes
  /// have any values.
  virtual absl::Status sum_messages(Collectives& group, std::string_view label, float* data, std::size_t numel) = 0;

 protected:
  ~SumOfMessages() = default;
};

/// A compressor that makes sums with its own calls, which send fewer bytes than the elements have.
class SumMethod {
 public:
  /// Replaces `data[0, numel)` of this rank by the compressor's sum over the ranks of `group`, with the same bits on
  /// all of them. Until this function returns, only the compressor calls `group`. Every rank makes the same calls. If
  /// reductions run in the background, the thread that makes them calls this function.
  virtual absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) = 0;
  /// Returns the part whose messages a GPU can make; null if there is none.
  virtual SumOfMessages* of_messages() { return nullptr; }

 protected:
  ~SumMethod() = default;
};

/// Wraps `group` so that reductions of fp32 with ReduceOptions::method are made by that method, before the call
/// returns. All other calls go to `group` unchanged. It is meant for transports that send over a network. If a
/// transport also uses reducing_in_background, that function wraps the result of this one. If a method fails, the group
/// ends, since its peers would wait for this rank.
std::shared_ptr<Collectives> summing_by_methods(std::shared_ptr<Collectives> group);

/// Makes `call`, of fp32, over `group` by ReduceOptions::method, which is not null. If ReduceOptions::encoded is not
/// null, it is the beginning of `call.input`, and holds messages (SumOfMessages).
absl::Status reduce_by_method(Collectives& group, const ReduceCall& call);

}  // namespace tessera
