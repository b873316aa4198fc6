#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

class Collectives;

/// How gradients are summed over ranks, by a rule of the program's own: in fewer bits, by less than all of them, with noise.
///
///   struct InBf16 final : tessera::CommHook {
///     void sum(Bucket& bucket, Ranks& ranks) override {
///       const at::Tensor own = bucket.gradients.to(at::kBFloat16);
///       bucket.gradients.zero_();
///       for (const at::Tensor& each : ranks.all_gather(own)) bucket.gradients.add_(each);
///     }
///   };
///   strategy.compression.hook = true;  // "compression": {"hook": true} in the file
///   tessera::Engine engine(model, strategy, mesh, std::make_shared<InBf16>());
///
/// It is called for each bucket of gradients as soon as backward has completed it, in the same order on every rank: over a network on a
/// thread of communication, while backward goes on; else on the thread of backward. So it hides behind backward as all reductions do,
/// one call of it at a time. It needs strategies under which a rank has all gradients of a unit in one place: NO_SHARD,
/// SHARD_OPTIMIZER, SHARD_GRADIENTS, with units or `units.bucket_cap_mb` as buckets. On the CPU only. A rank alone does not call it.
class CommHook {
 public:
  /// The gradients of one unit, or of one bucket, of parameters of one dtype.
  struct Bucket {
    struct Part {
      std::string parameter;  ///< "blocks.3.attention.weight"
      at::Tensor gradient;    ///< in its shape; its memory is that of `gradients`
    };

    std::string unit;  ///< "blocks.3"
    std::int64_t index =
        0;  ///< of the bucket, from 0, the same in every step: by it a hook finds what it keeps, as error feedback
    std::int64_t step = 1;  ///< of training, counted from 1
    /// [elements], fp32: this rank's contribution, of one microbatch, or with gradient_sync "last_microbatch" of all of a step. Zeros
    /// where a parameter got no gradient, and between parameters. What it is when `sum` returns counts.
    at::Tensor gradients;
    std::vector<Part> parts;  ///< of `gradients`, in the order in which they lie there
  };

  /// The ranks whose gradients are summed. Every rank makes the same calls in the same order, with tensors of the same sizes. Tensors are on
  /// the CPU, and of any dtype but where it says so. A call that fails throws, and so ends training on all ranks.
  class Ranks {
   public:
    Ranks(Collectives& group, const std::string& label) : group_(group), label_(label) {}

    int rank() const;
    int size() const;
    /// The tensor, contiguous and fp32, becomes the sum over ranks: in fp32, in pairwise order, the same bits on every rank.
    void all_reduce(const at::Tensor& tensor);
    /// The tensor of each rank, in rank order.
    std::vector<at::Tensor> all_gather(const at::Tensor& tensor);
    /// `tensor` [size(), ...]: row q goes to rank q. Returns the rows that came, in rank order, in the same shape.
    at::Tensor all_to_all(const at::Tensor& tensor);

   private:
    Collectives& group_;
    const std::string& label_;
  };

  virtual ~CommHook() = default;

  /// Replaces `bucket.gradients` by the *sum* over ranks (the Engine divides by their number), or what the rule takes for it: the same
  /// bits on every rank, or parameters drift apart; `check.replica_hash_every` would find that. Autograd is off. What it throws ends
  /// training on all ranks, with its text.
  virtual void sum(Bucket& bucket, Ranks& ranks) = 0;
};

}  // namespace tessera
