#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <type_traits>

#include "tessera/mesh.h"

namespace tessera {

struct DataParallelOptions {
  /// MiB of fp32 gradients that are sent together. Larger: fewer calls, and a buffer of this size; a parameter that is larger
  /// has a bucket to itself.
  double bucket_mb = 25;
};

/// Averages gradients over the ranks, and nothing else: each rank has the whole module, and any torch::optim optimizer
/// trains it.
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
/// For what an Engine does not have (an optimizer of your own, second-order methods); it costs the memory of NO_SHARD and does
/// not overlap communication with backward, so an Engine is smaller and faster.
///
/// Making one is collective: ranks compare names, shapes and dtypes of all parameters and buffers, and every rank gets rank
/// 0's values. Each backward that reaches a parameter is collective at its end, also where it runs under
/// tessera::checkpoint. Gradients are added in fp32 (fp64 ones in fp64), in one fixed order, so they have the same bits on
/// all ranks.
///
/// * A parameter that some ranks did not use gets the mean in which they count as zero; one that no rank used keeps an
///   undefined `.grad`, and optimizers leave it alone.
/// * Where ranks' losses are means over different numbers of things, `set_weight` says how many before backward, and gradients are means
///   over all things. A rank without a batch calls `backward_nothing`.
/// * Accumulation: backwards under a NoSync add up in `.grad` on each rank; the next one without it averages the sum.
/// * An optimizer that looks at the loss (LBFGS stops by it) must see the same number on all ranks: give it
///   tessera::all_reduce(mesh, loss.item<double>(), tessera::Reduce::kMean).
///
/// Throws tessera::Error (64) on all ranks: modules that differ, by the first name that does; parameters of an Engine or of
/// another DataParallel; deferred ones (materialize_module first); sparse gradients, by name, out of backward. Out of
/// backward come 75 and 70 too: a rank that is gone, does not come, or made other calls.
class DataParallel {
 public:
  DataParallel(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh, const DataParallelOptions& options = {});

  /// For a ModuleHolder such as one made by TORCH_MODULE.
  template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
  DataParallel(const Holder& holder, const Mesh& mesh, const DataParallelOptions& options = {})
      : DataParallel(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), mesh, options) {}

  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// While one lives, backward leaves gradients as this rank made them.
  class NoSync {
   public:
    explicit NoSync(DataParallel& parallel);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DataParallel& parallel_;
  };

  /// The loss of the next backward that averages is a mean over so many things (samples, tokens): gradients are then
  /// sum(weight * gradient) / sum(weight) over ranks. After that backward the weight is 1 again. 0: this rank counts nothing, though its
  /// gradients were NaN. Throws Error (64) for what is negative or not finite.
  void set_weight(double weight);

  /// For a rank without a batch, while others run a backward that averages: takes part, counts nothing, and gets the mean in every
  /// `.grad`.
  void backward_nothing();

  /// Rank 0's buffers (running statistics of a BatchNorm) for every rank. Collective.
  void broadcast_buffers();

  /// Calls that each averaging takes, beside a small one.
  std::size_t num_buckets() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
