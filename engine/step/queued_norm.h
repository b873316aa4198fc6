#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/memory/device_gradients.h"
#include "engine/step/device_tables.h"
#include "optim/device_kernels.h"
#include "sharding/unit.h"

namespace tessera {

/// The norm's sums over this rank's gradients on a GPU, queued: of all gradients at once in the step, or, where the sums of units have no
/// place of their own, of each unit when its sum is there.
class QueuedNorm {
 public:
  /// `groups`: that train, in the order of units. `sums`: memory of the device for what is added up, as many numbers as NormSums::count of
  /// all groups' gradient parts. `gradients`: where sums lie below the device's memory, or null. `kernels` outlive this.
  QueuedNorm(std::span<FlatGroup* const> groups, double* sums, std::shared_ptr<const DeviceGradients> gradients,
             DeviceKernels& kernels, c10::Device device);

  /// A unit's sum of the step is on the current stream, perhaps once more.
  void add(const Unit& unit);
  /// All sums are.
  void finish();

 private:
  NormTables put(const NormLaunch& launch);
  void plan_unit(std::span<FlatGroup* const> groups, double* sums, double* scratch);

  const std::shared_ptr<const DeviceGradients> gradients_;
  DeviceKernels& kernels_;
  DeviceTables tables_;
  NormTables all_;                              ///< without `gradients_`
  std::vector<std::vector<NormTables>> units_;  ///< [unit][slot]; the root has one place
};

}  // namespace tessera
