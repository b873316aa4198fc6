#pragma once

#include <memory>
#include <vector>

#include "sharding/unit.h"
#include "sharding/whole_tensors.h"

namespace tessera {

/// Each parameter has its own memory, or one that no other parameter and none of `whole` trains: an Engine gives each parameter new memory.
/// Tensors whose elements lie between each other's are not compared. Throws tessera::Error (64) with both names.
void expect_own_memory(const std::vector<std::unique_ptr<Unit>>& units, const NamedTensors& whole);

/// Notices what a program does to an Engine's parameters where the Engine cannot follow, under every strategy alike:
///
/// 1. a parameter left its flat buffer (torch::load, Module::to, set_data, share_memory): operators would read one memory, the Engine
///    update another;
/// 2. it was written in place outside Gathered(kWrite): every rank of a host would write the one copy, and a sharded
///    copy would be lost. Told by the tensor's version, which `.data()` shares while an Engine has the parameter
///    (share_version_with_data), and which writes through a raw pointer do not change;
/// 3. it was frozen when the Engine was made, and is to train now: there is no memory for its gradient.
///
/// 4. with "check.values": this rank's part of it was written in any way.
///
/// A few loads a parameter; called at each backward and step.
class ParameterChecks {
 public:
  ParameterChecks(const std::vector<std::unique_ptr<Unit>>& units, bool checks_values);

  /// Parameters are as they should be: what they are now is compared with from here on.
  void accept();
  void accept(Unit& unit);
  /// Throws tessera::Error (64) naming the first parameter of which one of the above is true.
  /// But the third, where `may_unfreeze`: a call comes that makes memory for it.
  void expect_accepted(bool may_unfreeze) const;

 private:
  const std::vector<std::unique_ptr<Unit>>& units_;
  const bool checks_values_;
};

}  // namespace tessera
