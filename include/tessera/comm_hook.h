#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

class Collectives;

/// A rule, defined by the program, that sums gradients over the ranks: for example in fewer bits, from some of the
/// elements only, or with noise. A program derives a class from CommHook and gives the object to the Engine.
///
///   struct InBf16 final : tessera::CommHook {
///     void sum(Bucket& bucket, Ranks& ranks) override {
///       const at::Tensor own = bucket.gradients.to(at::kBFloat16);
///       bucket.gradients.zero_();
///       for (const at::Tensor& each : ranks.all_gather(own)) bucket.gradients.add_(each);
///     }
///   };
///   // "compression": {"method": {"type": "hook"}} in the file
///   strategy.compression.method = tessera::CommHookConfig();
///   tessera::Engine engine(model, strategy, mesh, std::make_shared<InBf16>());
///
/// The Engine calls `sum` for each bucket of gradients as soon as backward has completed that bucket, in the same order
/// on every rank. Over a network, a communication thread makes the call, which therefore overlaps with backward, as all
/// reductions do. Otherwise the thread of backward makes the call. One call runs at a time.
///
/// A hook needs a strategy under which a rank has all gradients of a unit in one place: NO_SHARD, SHARD_OPTIMIZER or
/// SHARD_GRADIENTS, with units or `units.bucket_cap_mb` as buckets. If GPUs train, their hosts make these sums, so a
/// hook gets tensors on the CPU there too. A job of one rank does not call the hook.
class CommHook {
 public:
  /// The gradients of one unit or one bucket. All of them belong to parameters of one dtype.
  struct Bucket {
    /// The part of a bucket that belongs to one parameter.
    struct Part {
      std::string parameter;  ///< name of the parameter, such as "blocks.3.attention.weight"
      at::Tensor gradient;    ///< gradient of the parameter, in the parameter's shape; a view of `gradients`
    };

    std::string unit;  ///< path of the unit, such as "blocks.3"
    /// index of the bucket, from 0, the same in every step; a hook can use it as a key for data that it keeps, such as
    /// error feedback
    std::int64_t index = 0;
    std::int64_t step = 1;  ///< training step, counted from 1
    /// [elements], fp32: this rank's contribution, of one microbatch or, with gradient_sync "last_microbatch", of a
    /// whole step. Elements of parameters without a gradient, and elements between parameters, are zeros. The values in
    /// this tensor when `sum` returns are the result.
    at::Tensor gradients;
    std::vector<Part> parts;  ///< the parts of `gradients`, in the order in which they lie there
  };

  /// The ranks whose gradients are summed. Every rank makes the same calls in the same order, with tensors of the same
  /// sizes. Tensors are dense, on the CPU, and of any dtype unless the call says otherwise. A call that fails throws
  /// tessera::Error (64 for a wrong tensor), which ends training on all ranks.
  class Ranks {
   public:
    /// The Engine makes this object. `label`: name of the bucket, for messages.
    Ranks(Collectives& group, const std::string& label) : group_(group), label_(label) {}

    /// Returns the index of this rank in the group, from 0 to size() - 1.
    int rank() const;
    /// Returns the number of ranks in the group.
    int size() const;
    /// Replaces `tensor`, contiguous and fp32, by the sum over ranks. Sums are made in fp32 in pairwise order, so every
    /// rank has the same bits.
    void all_reduce(const at::Tensor& tensor);
    /// Returns the tensor of each rank, in rank order: size() tensors of the shape of `tensor`.
    std::vector<at::Tensor> all_gather(const at::Tensor& tensor);
    /// Sends row q of `tensor` [size(), ...] to rank q. Returns the rows that this rank received, in rank order, in the
    /// same shape.
    at::Tensor all_to_all(const at::Tensor& tensor);

   private:
    Collectives& group_;
    const std::string& label_;
  };

  virtual ~CommHook() = default;

  /// Replaces `bucket.gradients` by the *sum* over ranks (the Engine divides it by the number of ranks), or by other
  /// values that the rule uses instead of the sum. The result must have the same bits on every rank, since otherwise
  /// the parameters of ranks become different; `check.replica_hash_every` would report that. Autograd is off. An
  /// exception that `sum` throws ends training on all ranks, with the exception's text.
  virtual void sum(Bucket& bucket, Ranks& ranks) = 0;
};

}  // namespace tessera
