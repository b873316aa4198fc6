#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/dtype.h"

namespace tessera {

/// What moves the bytes of a group.
enum class TransportKind {
  kSolo,          ///< a rank alone: nothing is moved
  kFake,          ///< one rank of a world that is not there, for plans
  kThread,        ///< ranks that are threads of this process
  kHost,          ///< shared memory of one host
  kGloo,          ///< Gloo, for all pairs of ranks
  kHierarchical,  ///< one transport inside hosts, another across
  kNccl,
  kCudaHost,  ///< ranks that share GPUs of one host
  kOwn,       ///< a c10d::Backend of the user's own
};

/// Something started that can be waited for. A default-made Work is done and succeeded. Waiting twice returns the same
/// status.
class Work {
 public:
  struct State {
    virtual ~State() = default;
    virtual absl::Status advance() { return absl::OkStatus(); }
    virtual absl::Status wait() = 0;
    /// The Work no longer needs the state, whether it was waited for or not.
    virtual void release() { delete this; }
  };

  Work() = default;
  explicit Work(absl::Status done) : status_(std::move(done)) {}
  explicit Work(std::unique_ptr<State> state) : state_(state.release()) {}
  /// For a state that the Work does not own: when the Work is done with it, it calls State::release.
  explicit Work(State* state) : state_(state) {}

  /// It has ended: `wait` returns at once.
  bool done() const { return state_ == nullptr; }

  /// Does what this rank has to do before its peers can finish the operation; blocks until all have started it. `wait`
  /// does it too. Calling it a while earlier spares the peers the wait for this rank.
  absl::Status advance() { return state_ ? state_->advance() : status_; }

  /// Blocks until the operation's outputs may be read and its inputs overwritten.
  absl::Status wait() {
    if (state_) {
      status_ = state_->wait();
      state_.reset();
    }
    return status_;
  }

 private:
  struct Release {
    void operator()(State* state) const { state->release(); }
  };
  std::unique_ptr<State, Release> state_;
  absl::Status status_;
};

/// Memory that the transport can reach without a copy: on `host` a shared mapping that every rank of the group maps,
/// on `thread` plain memory, on `nccl` registered memory. Collectives accept any pointer; on memory from here they are
/// fast. Freed with the object, which must not outlive its Collectives.
class CommBuffer {
 public:
  virtual ~CommBuffer() = default;
  virtual std::byte* data() const = 0;
  virtual std::size_t bytes() const = 0;
};

/// Sees a sum while it is still in cache: where its squares are added up, or where it is added onto something else.
class SumVisitor {
 public:
  /// `values[0, numel)` are `output[offset, offset + numel)` of the call, final (but perhaps not at that address).
  /// Called with consecutive pieces in ascending order that cover the output; each begins at a multiple of
  /// `kAlignment` elements. They come between the call and the end of its Work::wait, on the thread that makes them;
  /// where the call fails, only some may have come.
  virtual void visit(std::size_t offset, const float* values, std::size_t numel) = 0;

  static constexpr std::size_t kAlignment = 256;

 protected:
  ~SumVisitor() = default;
};

/// When the caller of a reduction means to wait for it.
enum class Waits {
  kAtOnce,
  kLater,  ///< after other calls, of this group too, or after computing: ranks need not meet to start it
};

class Collectives;

/// Makes sums by calls of its own, of fewer bytes than the elements have.
class SumMethod {
 public:
  /// `data[0, numel)` of this rank becomes what the method gives for the sum over the ranks of `group`, the same bits on all of them.
  /// Until it returns, the calls of `group` are the method's, the same ones on every rank. Where reductions go on in background, it is
  /// called on their thread.
  virtual absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) = 0;

 protected:
  ~SumMethod() = default;
};

/// How a reduction is made.
struct ReduceOptions {
  ReduceOptions() = default;
  ReduceOptions(Waits waits) : waits(waits) {}  // NOLINT(google-explicit-constructor): most callers say no more

  Waits waits = Waits::kAtOnce;
  /// Forms on the wire, for transports that send over a network; others ignore them. Where a form is lossy, a rank's own contribution
  /// is rounded too, and what all_reduce returns is the same on all ranks. kLossless changes no bit; only `gloo` packs.
  WireForm contributions = WireForm::kPlain;
  WireForm sums = WireForm::kPlain;  ///< of all_reduce: what the rank that made a sum sends to the others
  /// Error feedback: what rounding took from this rank's earlier contributions is added to this one, and replaced by what
  /// it takes now (runs that are not finite leave it as it was). As many elements as this rank sends (Collectives::compressed_part);
  /// the same memory at each reduction of the same gradients. Null: none.
  float* feedback = nullptr;
  /// Makes the sums of fp32 instead, where compressed_part() is not 0; then the forms and `feedback` have no effect, and of
  /// reduce_scatter the whole input becomes sums. It lives until the Work is waited for. Null: none.
  SumMethod* method = nullptr;
};

/// What a gather brings, and how it is sent.
struct GatherOptions {
  DType dtype = DType::kU8;  ///< of the elements; those that are not fp32, bf16 or fp16 are sent as they are
  /// On the wire, for transports that send over a network; others ignore it. Where it is lossy, every rank gets the same rounded elements,
  /// of its own part too, so `full` must not be where the exact ones are kept. kLossless changes no bit; only `gloo` packs.
  WireForm form = WireForm::kPlain;
};

/// One group of ranks and the operations every transport has, on flat buffers.
///
/// Rules, the same for all transports:
///  1. Every rank of the group makes the same calls in the same order with the same sizes, dtypes and labels. A
///     transport that notices a difference fails on all ranks with both calls and both ranks in the message.
///  2. One call at a time per object, from any thread (advancing a Work and waiting for it are calls too). Two objects
///     are independent: neither waits behind the other.
///  3. Sums accumulate in fp32, over ranks in a *pairwise tree*: neighbours are added (0+1, 2+3, ...; an odd last one
///     is carried up unchanged), then neighbours of those, until one is left. The order depends on nothing but
///     `size()`, so results have the same bits on every transport that adds by itself (all but `nccl`); and sums over
///     aligned blocks of 2^k ranks followed by a sum over the blocks equal the sum over all.
///  4. `label` names the unit (at most 63 bytes are kept); messages and the signature of the call hold it.
///  5. After the first failure every later call returns that same status at once (sticky), on this rank; `abort` makes
///     it so on all ranks.
///
/// Errors carry exit code 75 (peer lost, timeout), or 70 (ranks disagree), and name rank, label and operation:
/// `rank 1/4 blocks.3 reduce_scatter #412: rank 2 (pid 4711) is gone`.
class Collectives {
 public:
  /// Reductions with Waits::kLater that may be under way at a time.
  static constexpr int kMostUnderWay = 16;

  virtual ~Collectives() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual TransportKind kind() const = 0;
  /// The same for people: "host", "thread", "gloo", "nccl", "fake", "hierarchical(host, gloo)", ...
  virtual std::string transport() const = 0;

  /// Whose memory calls are about: the host's, or that of the GPU with this index. On a GPU calls are ordered on the
  /// current stream, and Work::wait makes the current stream wait, not the host.
  static constexpr int kHostMemory = -1;
  virtual int gpu() const { return kHostMemory; }

  /// Whether reductions with Waits::kLater go on by themselves, phase after phase, while the caller computes. Then Work::advance does
  /// nothing.
  virtual bool reduces_in_background() const { return false; }

  /// Whether all_gather, broadcast and all_to_all go on by themselves between the call and the wait for it, while the caller computes.
  virtual bool gathers_in_background() const { return false; }

  /// How much of the input of a reduction this rank rounds where ReduceOptions say so: 1: all of it, L: the L-th part, rounded up
  /// (ranks of a host were summed before). 0: nothing, since the transport ignores these options.
  virtual int compressed_part() const { return 0; }

  /// Collective: every rank calls it with the same `bytes`, in the same order as its other calls. Zero-filled.
  virtual absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) = 0;

  /// Whether `allocate_common` can succeed: true on `host` and `thread`, and where a rank is alone.
  virtual bool shares_memory() const { return false; }

  /// As `allocate`, but *common memory*: the same bytes on all ranks, though not at the same address. What a rank
  /// wrote its peers see after the next collective. Gone when the last rank lets go, without a trace.
  ///
  /// Inputs may lie anywhere in it. `all_gather` with `full` and `broadcast` with `data` in it (the same place on every
  /// rank) move nothing that is there already: in place both cost a barrier, and no rank writes another's part. All
  /// other outputs in it must not overlap those of other ranks.
  ///
  /// Errors: 69 where ranks cannot share memory.
  virtual absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes);

  /// `full[r * bytes_per_rank ...] = shard of rank r`. In place where `shard == full + rank * bytes_per_rank`.
  Work all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank,
                  const GatherOptions& options = {}) {
    return do_all_gather(label, shard, full, bytes_per_rank, options);
  }

  /// `output[i] = sum over ranks q of input_q[rank * numel_per_rank + i]`, fp32, for i < numel_per_rank.
  /// `input` holds `size() * numel_per_rank` elements of `dtype` (fp32, bf16, fp16). `output` may alias this rank's
  /// slice of `input` when dtype is fp32. The caller gives `input` up: what it holds afterwards, but for an aliased
  /// `output`, is undefined (`nccl` adds narrow types there).
  /// `visitor`, if any, sees `output` and must live until the Work is waited for. (`nccl` has no sums that the host
  /// could see, and refuses one.)
  ///
  /// `options.waits` is kAtOnce where the next thing is to wait. With kLater every rank starts, advances and waits for its calls
  /// (of all groups) in the same order, so that no two wait for each other. A Work that is dropped without a wait ends
  /// the group, but for those that a device runs on its own.
  Work reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel_per_rank,
                      SumVisitor* visitor = nullptr, const ReduceOptions& options = {}) {
    return do_reduce_scatter(label, input, dtype, output, numel_per_rank, visitor, options);
  }

  /// `output[i] = sum over ranks of input_q[i]`, fp32, for i < numel; the same bits on every rank.
  /// `output` may be `input` when dtype is fp32. `input`, `visitor` and `options` as in reduce_scatter: the visitor sees
  /// all of `output` on every rank.
  Work all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                  SumVisitor* visitor = nullptr, const ReduceOptions& options = {}) {
    return do_all_reduce(label, input, dtype, output, numel, visitor, options);
  }

  /// `data` of `root` to all.
  virtual Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) = 0;

  /// `output[q * bytes_per_rank ...] = input_q[rank * bytes_per_rank ...]`.
  virtual Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) = 0;

  virtual Work barrier(std::string_view label) = 0;

  /// Ends the group: calls under way and to come, on every rank, fail with `reason` and this rank's number.
  virtual void abort(const absl::Status& reason) = 0;

  /// This rank makes no more calls: peers that need it for one are told so at once, where the transport can tell them. The
  /// destructor does the same.
  virtual void leave() {}

  /// Ok, or the failure of a call that could be queued but failed when it ran. On a GPU Work::wait returns before the call
  /// has run, so code that reads a result from the GPU must ask here afterwards whether the result is valid.
  virtual absl::Status status() const { return absl::OkStatus(); }

  /// Where a device makes the calls: the number of the call that it has come to and not got through, counted from 1 without
  /// `allocate`. 0: none.
  virtual std::uint64_t stands_in() const { return 0; }

 protected:
  virtual Work do_all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank,
                             const GatherOptions& options) = 0;
  virtual Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output,
                                 std::size_t numel_per_rank, SumVisitor* visitor, const ReduceOptions& options) = 0;
  virtual Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                             SumVisitor* visitor, const ReduceOptions& options) = 0;
};

}  // namespace tessera
