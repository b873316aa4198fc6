#pragma once

// See docs/glossary.md: flat group, unit.

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/memory/records/device_gradients.h"
#include "engine/step/queued/queued_context.h"
#include "engine/step/rules/element_update.h"
#include "optim/device_kernels.h"
#include "sharding/unit.h"
#include "tessera/memory.h"

namespace tessera {

/// The CPU's update of a GPU's masters and optimizer states where they lie, in records in pinned memory of its host
/// (OffloadedStep::kCpu). It also makes the transfers for this update. Sums of gradients are copied to the host, and so
/// are the parameters that are masters or halves of masters. New parameters are copied back. Parameters that themselves
/// lie in the host's memory are updated there. Copies run on separate streams at the same time as the computation, and
/// events keep them in order:
///
/// 1. A unit's gradients are copied after its reduction, in a step's last backward. Gradients that are offloaded to the
///    host's memory (DeviceGradients) are used where they lie. If a sum changes again, it is copied again. Copies to
///    the host run in the order in which they were queued, so the last one counts.
/// 2. The host waits for a group's copies before it updates the group. It updates groups in the order in which their
///    gradients arrive, the last group first. If sums are offloaded, it begins with the first group instead.
/// 3. All work that is queued later waits for the copies of new parameters. The host waits for the last such copy of a
///    group before it overwrites the memory from which the copy reads.
///
/// Only the host visits the records, so they are complete between steps.
class HostUpdate {
 public:
  /// The units' memory must outlive this object. REQUIRES: PassPlan::steps_on_host.
  explicit HostUpdate(const QueuedContext& context);
  /// Waits for the copies under way; a failure is logged.
  ~HostUpdate();
  HostUpdate(const HostUpdate&) = delete;
  HostUpdate& operator=(const HostUpdate&) = delete;

  /// Sets whether sums of gradients now belong to a whole step, so that `fetch` copies them. They belong to a whole
  /// step from the beginning of its last backward to its end.
  void expect(bool sums_of_step) { fetches_ = sums_of_step; }
  /// Copies the sum of a unit's gradients, which is on the current stream.
  void fetch(const Unit& unit);
  /// Begins to copy the parameters that updates read, from the last group to the first. It is called when the step is
  /// made, since a program may write parameters until then.
  void fetch_parameters();

  /// Begins a pass over all groups. `used` says which trainable parameters take part in this step; only their step
  /// counts grow. Work that is already queued on the current stream may still read parameters.
  void begin(std::span<const char> used);
  /// Updates a group's records and begins to copy its new parameters. Work that is queued on the current stream after
  /// this call finds the new parameters. `group`: the group's index among all trainable groups, in the order of units.
  void update(std::size_t group, const UpdateRates& rates);
  /// Exchanges a group's masters and averages, and begins to copy the new parameters.
  void swap_averages(std::size_t group);

  /// Takes the numbers in `options` for the next step.
  void follow(const UpdateOptions& options) { elements_.follow(options); }

  /// Implements Step::resume. `steps` [trainable parameter]: the number of steps in which the parameter took part.
  void resume(std::span<const std::int64_t> steps) { steps_.assign(steps.begin(), steps.end()); }

  const HostStepBytes& copied() const { return copied_; }

 private:
  /// The records of a flat group, and the events of their copies.
  struct Group {
    FlatGroup* group = nullptr;
    Extent part;  ///< a part of the flat buffer
    std::size_t first_parameter = 0;
    Extent on_gpu = {};                ///< the first elements of `part`, whose parameters lie in the GPU's memory
    float* gradient = nullptr;         ///< [part]; pinned memory, like all pointers here
    bool has_sums_here = false;        ///< whether the group's sums lie where DeviceGradients keeps them
    std::byte* parameter = nullptr;    ///< [on_gpu], of the group's dtype
    std::vector<std::byte*> records;   ///< [chunk - RecordLayout::first_record]
    std::vector<UpdateRun> runs = {};  ///< runs of this step
    /// events of copies; null if there is no copy
    std::shared_ptr<DeviceKernels::Mark> gradient_came = {}, parameter_came = {}, sent = {};
  };
  /// Elements of one record and one run, for one thread.
  struct Piece {
    Extent extent;
    std::int64_t chunk = 0;
    const UpdateRun* run = nullptr;
    std::byte* parameter = nullptr;
  };
  using Visit = c10::function_ref<void(const OptimizerSlice& slice, const UpdateRun& run)>;

  std::shared_ptr<DeviceKernels::Mark> download(void* pinned, const void* device, std::int64_t bytes);
  void take_copies(Group& group, std::byte*& place, float*& sums) const;
  void wait_for_gradients(Group& group) const;
  void cut(const Group& group);
  void cut_by_parameters(const Group& group, Extent extent, std::int64_t chunk, const UpdateRun& run);
  OptimizerSlice slice_of(const Group& group, const Piece& piece) const;
  void pass_over(Group& group, Visit visit);
  void send(Group& group, bool swaps);

  const std::shared_ptr<std::byte> memory_;
  const std::shared_ptr<DeviceGradients> gradients_;  ///< null if no gradients are offloaded
  DeviceKernels& kernels_;
  ElementUpdate elements_;
  const std::size_t threads_;
  std::vector<std::span<std::byte>> parameter_records_;  ///< memory of each parameter record; empty if there are none
  /// trainable groups, in the order of units; a group without records has an empty `part`
  std::vector<Group> groups_;
  std::vector<std::size_t> first_of_unit_;  ///< [units + 1]: index into groups_ of the unit's first group
  std::vector<std::int64_t> steps_;         ///< applied steps of each trainable parameter
  bool fetches_ = false;
  std::unique_ptr<DeviceKernels::Mark> read_;  ///< event behind queued work that may still read the parameters
  std::vector<Piece> pieces_;
  std::vector<DeviceKernels::UploadPiece> uploads_;
  std::shared_ptr<DeviceKernels::Mark> last_came_, last_sent_;  ///< the latest copy in each direction
  HostStepBytes copied_;
};

/// Returns the number of threads with which the CPU updates state in the memory of a GPU's host: LibTorch's number
/// (on_threads). A rule that the program defines is called on one thread only.
std::size_t host_update_threads();
/// The largest number of elements that one of these threads updates at once.
constexpr std::int64_t kHostPiece = 1 << 16;

}  // namespace tessera
