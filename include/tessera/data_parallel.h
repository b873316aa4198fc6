#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <type_traits>

#include "tessera/mesh.h"

namespace tessera {

/// The way in which a DataParallel sends gradients.
struct DataParallelOptions {
  /// MiB of fp32 gradients that are sent together. A larger value makes fewer calls and needs a buffer of this size. A
  /// parameter that is larger than this has a bucket to itself.
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
/// Use it for what an Engine does not have: an optimizer of your own, second-order methods. It needs the memory of
/// NO_SHARD and does not overlap communication with backward, so an Engine is smaller and faster.
///
/// The constructor is collective: ranks compare names, shapes and dtypes of all parameters and buffers, and every rank
/// gets rank 0's values. Each backward that reaches a parameter is collective at its end, also where it runs under
/// tessera::checkpoint. Gradients are added in fp32 (fp64 ones in fp64), in one fixed order, so they have the same bits
/// on all ranks. One thread at a time uses an object.
///
/// * A parameter that only some ranks used gets a mean in which the other ranks count as zero. A parameter that no rank
///   used keeps an undefined `.grad`, and optimizers leave it alone.
/// * If ranks' losses are means over different numbers of things, call `set_weight` with that number before backward;
///   gradients are then means over all things. A rank without a batch calls `backward_nothing`.
/// * Accumulation: backwards under a NoSync add up in `.grad` on each rank. The next backward without it averages the
///   sum.
/// * An optimizer that looks at the loss (LBFGS stops by it) must see the same number on all ranks. Give it
///   tessera::all_reduce(mesh, loss.item<double>(), tessera::Reduce::kMean).
///
/// Throws tessera::Error (64) on all ranks for: modules that differ (the message names the first difference);
/// parameters of an Engine or of another DataParallel; deferred parameters (call materialize_module first); sparse
/// gradients, by name, out of backward. Backward also throws 75 or 70 if a rank is gone, does not come, or makes other
/// calls.
class DataParallel {
 public:
  /// The call is collective; see above for errors. `module` is kept alive by this object.
  DataParallel(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh, const DataParallelOptions& options = {});

  /// Makes a DataParallel for a ModuleHolder, such as one made by TORCH_MODULE.
  template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
  DataParallel(const Holder& holder, const Mesh& mesh, const DataParallelOptions& options = {})
      : DataParallel(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), mesh, options) {}

  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// A guard: while it lives, backward leaves gradients as this rank made them and does not communicate.
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

  /// Says over how many things (samples, tokens) the loss of the next averaging backward is a mean. Gradients are then
  /// sum(weight * gradient) / sum(weight) over ranks. The weight is 1 again after that backward. 0 means that this rank
  /// counts nothing, even if its gradients are NaN. Throws Error (64) for a weight that is negative or not finite.
  void set_weight(double weight);

  /// Call it on a rank that has no batch, while other ranks run a backward. This rank counts nothing and gets the mean
  /// in every `.grad`. It is collective with the others' backward. Throws Error (64) under a NoSync.
  void backward_nothing();

  /// Gives every rank rank 0's buffers (such as running statistics of a BatchNorm). The call is collective.
  void broadcast_buffers();

  /// Returns the number of gradient buckets. An averaging makes one call for each bucket and one small call.
  std::size_t num_buckets() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
