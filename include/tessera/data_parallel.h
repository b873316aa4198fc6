#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <type_traits>

#include "tessera/mesh.h"

namespace tessera {

/// The options of a DataParallel.
struct DataParallelOptions {
  /// Size, in MiB, of the fp32 gradients that are sent together. A larger value makes fewer calls and needs a larger
  /// buffer. A parameter that is larger than this size has a separate bucket.
  double bucket_mb = 25;
};

/// Averages gradients over the ranks and does nothing else: each rank has the whole module, and any torch::optim
/// optimizer trains it.
///
///   tessera::DataParallel parallel(model, mesh);
///   torch::optim::LBFGS optimizer(model->parameters());
///   optimizer.step([&] {
///     optimizer.zero_grad();
///     const at::Tensor loss = model->forward(input, target);
///     loss.backward();  // when it returns, every `.grad` is the mean over the ranks
///     return at::full({}, tessera::all_reduce(mesh, loss.item<double>(), tessera::Reduce::kMean));
///   });
///
/// Use it for methods that an Engine does not have, such as your own optimizer or second-order methods. A DataParallel
/// needs as much memory as NO_SHARD, and does not overlap communication with backward. An Engine can train with less
/// memory, and faster.
///
/// The constructor is collective: ranks compare names, shapes and dtypes of all parameters and buffers, and every rank
/// gets the values of rank 0. Each backward that reaches a parameter is collective at its end, also if it runs under
/// tessera::checkpoint. Gradients are added in fp32 (fp64 gradients in fp64), in one fixed order, so they have the same
/// bits on all ranks. One thread at a time uses an object.
///
/// * A parameter that only some ranks used gets a mean in which the other ranks count as zero. A parameter that no rank
///   used keeps an undefined `.grad`, and optimizers do not update it.
/// * If the losses of ranks are means over different numbers of samples or tokens, call `set_weight` with this rank's
///   number before backward. Gradients are then means over all samples or tokens. A rank without a batch calls
///   `backward_nothing`.
/// * Accumulation: each backward under a NoSync adds to `.grad` on its rank. The next backward without a NoSync
///   averages the sum.
/// * An optimizer that uses the loss (LBFGS uses it to stop) must get the same number on all ranks. Give it
///   tessera::all_reduce(mesh, loss.item<double>(), tessera::Reduce::kMean).
///
/// Throws tessera::Error (64) on all ranks if modules differ (the message names the first difference), if a parameter
/// belongs to an Engine or another DataParallel, or if a parameter is deferred (call materialize_module first).
/// Backward throws Error (64) for a sparse gradient, which it names; 75 or 70 if a rank has ended, does not make the
/// call, or makes other calls.
class DataParallel {
 public:
  /// The call is collective; the errors are described above. This object keeps `module` alive.
  DataParallel(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh, const DataParallelOptions& options = {});

  /// Makes a DataParallel for a ModuleHolder, such as one made by TORCH_MODULE.
  template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
  DataParallel(const Holder& holder, const Mesh& mesh, const DataParallelOptions& options = {})
      : DataParallel(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), mesh, options) {}

  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// A guard: while it lives, backward leaves gradients as this rank has computed them, and does not communicate.
  class NoSync {
   public:
    /// `parallel` must outlive the guard.
    explicit NoSync(DataParallel& parallel);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DataParallel& parallel_;
  };

  /// Sets the number of samples or tokens over which the loss of the next averaging backward is a mean. Gradients are
  /// then sum(weight * gradient) / sum(weight) over ranks. The weight is 1 again after that backward. With a weight of
  /// 0 this rank contributes nothing, even if its gradients are NaN. Throws Error (64) for a weight that is negative or
  /// not finite.
  void set_weight(double weight);

  /// Call it on a rank that has no batch, while other ranks run a backward. This rank contributes nothing, and gets the
  /// mean in every `.grad`. The call is collective, together with the backward of the other ranks. Throws Error (64)
  /// under a NoSync.
  void backward_nothing();

  /// Gives every rank the buffers of rank 0 (such as running statistics of a BatchNorm). The call is collective.
  void broadcast_buffers();

  /// Returns the number of gradient buckets. Each averaging makes one collective for each bucket, and one small
  /// collective.
  std::size_t num_buckets() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
