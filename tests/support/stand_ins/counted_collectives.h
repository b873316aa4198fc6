#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tests/support/stand_ins/wrapped_groups.h"

namespace tessera::testing {

/// Counts the calls of one rank in the groups that have one purpose (WrapGroup's `use`).
struct Calls {
  std::int64_t calls = 0, bytes = 0;
  std::int64_t later = 0;  ///< the number of all-reduces that may run beside compute (Waits::kLater)
  friend bool operator==(const Calls&, const Calls&) = default;
};
using CallsOfGroups = std::map<std::string, Calls>;  ///< [use], as in WrapGroup

/// Passes all calls on, and counts them in `calls`. `calls` must outlive this object. Reductions count the bytes of
/// their whole input, and a broadcast counts the bytes of its data. Other calls count the bytes of one rank's part.
class CountedCollectives final : public ForwardingCollectives {
 public:
  /// `in_background` is the result of reduces_in_background. If it is empty, the inner group gives this result.
  CountedCollectives(std::shared_ptr<Collectives> inner, Calls& calls, std::optional<bool> in_background = {})
      : ForwardingCollectives(std::move(inner)), calls_(calls), in_background_(in_background) {}

  bool reduces_in_background() const override {
    return in_background_.value_or(ForwardingCollectives::reduces_in_background());
  }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    note(bytes);
    return ForwardingCollectives::broadcast(label, data, bytes, root);
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    note(bytes);
    return ForwardingCollectives::all_to_all(label, input, output, bytes);
  }
  Work barrier(std::string_view label) override {
    note(0);
    return ForwardingCollectives::barrier(label);
  }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    note(call.bytes_per_rank);
    return ForwardingCollectives::do_all_gather(call);
  }
  Work do_reduce(const ReduceCall& call) override {
    note(call.input_numel(size()) * size_of(call.dtype));
    calls_.later += !call.scatters && call.options.waits == Waits::kLater ? 1 : 0;
    return ForwardingCollectives::do_reduce(call);
  }

 private:
  void note(std::size_t bytes) {
    ++calls_.calls;
    calls_.bytes += static_cast<std::int64_t>(bytes);
  }

  Calls& calls_;
  const std::optional<bool> in_background_;
};

}  // namespace tessera::testing
