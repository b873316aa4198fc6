#pragma once

// See docs/glossary.md: carried, unit.

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/dtype.h"
#include "tessera/transports.h"

namespace tessera {

/// The kind of transport that moves a group's bytes.
enum class TransportKind {
  kSolo,          ///< a group of one rank: nothing is moved
  kFake,          ///< one rank of a fake world, for plans
  kThread,        ///< ranks that are threads of this process
  kHierarchical,  ///< one transport inside hosts, another between them
  kOwn,           ///< the user's own c10d::Backend
// all transports that comm.transport can name follow
#define TESSERA_ENUMERATOR(enumerator, ...) enumerator,
  TESSERA_TRANSPORTS(TESSERA_ENUMERATOR)
#undef TESSERA_ENUMERATOR
};

/// Returns the kind of the groups of a transport. REQUIRES: `choice` is not kAuto, which has no kind of its own.
TransportKind kind_of(TransportChoice choice);

/// Returns whether groups of this kind move the memory of GPUs, and not the memory of the host.
bool is_of_gpus(TransportKind kind);

/// An operation that was started and can be waited for. A default-constructed Work is done and has succeeded. Waiting
/// twice returns the same status. One thread at a time uses a Work.
class Work {
 public:
  struct State {
    virtual ~State() = default;
    virtual absl::Status advance() { return absl::OkStatus(); }
    virtual absl::Status wait() = 0;
    /// The Work calls this function when it no longer needs the state, whether the Work was waited for or not.
    virtual void release() { delete this; }
  };

  Work() = default;
  explicit Work(absl::Status done) : status_(std::move(done)) {}
  explicit Work(std::unique_ptr<State> state) : state_(state.release()) {}
  /// Makes a Work of a state that it does not own. The Work calls State::release when it no longer needs the state.
  explicit Work(State* state) : state_(state) {}

  /// Returns whether `wait` returns at once, since the operation is known to have ended.
  bool done() const { return state_ == nullptr; }

  /// Does the work of this rank that its peers need to finish the operation. It blocks until all ranks have started the
  /// operation. `wait` does the same first. Call `advance` some time before `wait`, so that peers need not wait.
  absl::Status advance() { return state_ ? state_->advance() : status_; }

  /// Blocks until the caller may read the operation's outputs and overwrite its inputs.
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

/// Memory that the transport reaches without a copy: a shared mapping that every rank of the group maps on `host`,
/// plain memory on `thread`, registered memory on `nccl`. Collectives accept any pointer, and are fast on this memory.
/// The memory is freed with the object. The object must not outlive its Collectives.
class CommBuffer {
 public:
  virtual ~CommBuffer() = default;
  virtual std::byte* data() const = 0;
  virtual std::size_t bytes() const = 0;
};

/// Gets a sum while the sum is still in cache, to add up the sum's squares or to add the sum to other values.
class SumVisitor {
 public:
  /// `values[0, numel)` are the final values of `output[offset, offset + numel)` of the call, but perhaps not at that
  /// address. `visit` is called with consecutive pieces in ascending order that cover the output. Each piece begins at
  /// a multiple of `kAlignment` elements. The calls of `visit` come between the start of the reduction and the end of
  /// Work::wait, on the thread that starts the reduction and waits for it. If the reduction fails, the visitor may have
  /// seen only some of the pieces.
  virtual void visit(std::size_t offset, const float* values, std::size_t numel) = 0;

  static constexpr std::size_t kAlignment = 256;

 protected:
  ~SumVisitor() = default;
};

/// The time at which the caller of a reduction intends to wait for the result.
enum class Waits {
  kAtOnce,
  kLater,  ///< the caller makes other calls or computes before it waits, so the start needs no barrier
};

class SumMethod;

/// The way in which a reduction is made. The caller fills it in for each call; reducers take it from the strategy.
struct ReduceOptions {
  ReduceOptions() = default;
  ReduceOptions(Waits waits) : waits(waits) {}  // NOLINT(google-explicit-constructor): most callers set nothing else
  ReduceOptions(SumVisitor* visitor, Waits waits = Waits::kAtOnce)  // NOLINT(google-explicit-constructor): as above
      : waits(waits), visitor(visitor) {}

  Waits waits = Waits::kAtOnce;
  /// A visitor that gets the output; null if there is none. It must live until the Work was waited for. (Under `nccl`
  /// the host has no sums, so `nccl` refuses a visitor.)
  SumVisitor* visitor = nullptr;
  /// Codecs on the wire, for transports that send over a network; other transports ignore them. A lossy codec rounds a
  /// rank's own contribution too, and all_reduce returns the same values on all ranks. kLossless changes no bit; only
  /// `gloo` sends fewer bytes with it.
  WireForm contributions = WireForm::kPlain;
  /// This rank's contribution in the form `contributions`, which is lossy, if it was encoded before the call; otherwise
  /// null. If it is not null, `input` is not read, and `feedback` is null. A contribution to reduce_scatter has a
  /// message (encoded_bytes, runtime/base/wire/wire_block.h) for each rank, one after the other. A contribution to
  /// all_reduce is one message. Only transports over c10d (c10d_collectives.h) read `encoded`. With `method`, `encoded`
  /// is the beginning of `input`: see reduce_by_method.
  const std::byte* encoded = nullptr;
  WireForm sums = WireForm::kPlain;  ///< codec in which a rank of all_reduce sends its sums to the other ranks
  /// Memory for error feedback: the rounding error of this rank's earlier contributions is added to this contribution.
  /// The new error replaces the old one (runs that are not finite do not change it). The memory has as many elements as
  /// this rank sends (Collectives::compressed_part). Give the same memory at each reduction of the same gradients. If
  /// it is null, there is no feedback.
  float* feedback = nullptr;
  /// A compressor (sum/sum_method.h) that sums fp32 values in place of the transport, if compressed_part() is not
  /// 0. The codecs and `feedback` then have no effect, and the whole input of reduce_scatter becomes sums.
  /// The compressor must live until the Work was waited for. It is null if there is no compressor. Transports do not
  /// read this member: summing_by_methods makes these calls.
  SumMethod* method = nullptr;
};

enum class Operation : std::uint32_t;  // runtime/comm/call.h

/// A call of reduce_scatter or all_reduce with its arguments, as groups over groups pass it on.
struct ReduceCall {
  bool scatters = false;  ///< true: reduce_scatter; false: all_reduce
  std::string_view label;
  void* input = nullptr;
  DType dtype = DType::kF32;
  float* output = nullptr;
  std::size_t numel = 0;  ///< number of elements of `output`
  ReduceOptions options;

  Operation operation() const;
  /// Returns the number of elements of `input` in a group of `ranks` ranks.
  std::size_t input_numel(int ranks) const { return scatters ? numel * static_cast<std::size_t>(ranks) : numel; }
};

/// The options of a gather: its elements, and the codec on the wire.
struct GatherOptions {
  DType dtype = DType::kU8;  ///< dtype of the elements; those that are not fp32, bf16 or fp16 are sent unchanged
  /// Codec on the wire, for transports that send over a network; other transports ignore it. A lossy codec gives every
  /// rank the same rounded elements, also those of its own part. `full` must therefore not be the memory with the exact
  /// elements. kLossless changes no bit; only `gloo` sends fewer bytes with it.
  WireForm form = WireForm::kPlain;
};

/// A call of all_gather with its arguments, as groups over groups pass it on.
struct GatherCall {
  std::string_view label;
  const void* shard = nullptr;
  void* full = nullptr;
  std::size_t bytes_per_rank = 0;
  GatherOptions options = {};
};

/// One group of ranks and the operations that every transport has, on flat buffers.
///
/// These rules hold for all transports:
///  1. Every rank of the group makes the same calls in the same order with the same sizes, dtypes and labels. A
///     transport that notices a difference fails on all ranks. The message has both calls and both ranks.
///  2. One call at a time is made per object, from any thread (advancing a Work and waiting for it are calls too). Two
///     objects are independent: a call of one never waits for a call of the other.
///  3. Sums accumulate in fp32, over ranks in a *pairwise tree*. Neighbours are added (0+1, 2+3, ...; an odd last
///     addend is carried up unchanged), then neighbours of those sums, until one sum is left. The order depends on
///     nothing but `size()`. Results therefore have the same bits on every transport that adds by itself (all but
///     `nccl`). A sum over aligned blocks of 2^k ranks, followed by a sum over the blocks, equals the sum over all
///     ranks.
///  4. `label` names the unit in messages and in the signature of the call. At most 63 bytes of it are used.
///  5. After the first failure every later call returns that same status at once (sticky), on this rank. `abort` does
///     this on all ranks.
///
/// Errors carry exit code 75 (peer lost, timeout), or 70 (ranks disagree), and name rank, label and operation:
/// `rank 1/4 blocks.3 reduce_scatter #412: rank 2 (pid 4711) is gone`.
class Collectives {
 public:
  /// Largest number of reductions with Waits::kLater that may be under way at a time.
  static constexpr int kMostUnderWay = 16;

  virtual ~Collectives() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual TransportKind kind() const = 0;
  /// Returns the transport's name for people: "host", "thread", "gloo", "nccl", "fake", "hierarchical(host, gloo)", ...
  virtual std::string transport() const = 0;

  /// The memory on which calls work: the memory of the host, or the memory of the GPU with this index. Calls on a GPU
  /// are ordered on the current stream, and Work::wait makes the current stream wait, not the host.
  static constexpr int kHostMemory = -1;
  virtual int gpu() const { return kHostMemory; }

  /// Returns whether reductions with Waits::kLater continue by themselves, phase after phase, while the caller
  /// computes. Work::advance then does nothing.
  virtual bool reduces_in_background() const { return false; }

  /// Returns whether all_gather, broadcast and all_to_all continue by themselves while the caller computes, between the
  /// call and the wait for it.
  virtual bool gathers_in_background() const { return false; }

  /// Returns which part of a reduction's input this rank rounds if ReduceOptions ask for it. The result is 1 if the
  /// rank rounds all of it, and L if it rounds 1 / L of it (rounded up), since the L ranks of a host were summed
  /// before. It is 0 if the rank rounds nothing, since the transport ignores these options.
  virtual int compressed_part() const { return 0; }

  /// Allocates zero-filled memory. The call is collective: every rank makes it with the same `bytes`, in the same order
  /// as its other calls.
  virtual absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) = 0;

  /// Returns whether `allocate_common` can succeed: true on `host` and `thread`, and for a group of one rank.
  virtual bool shares_memory() const { return false; }

  /// Allocates *common memory*: the same bytes on all ranks, though perhaps not at the same address. After the next
  /// collective, peers see the values that a rank wrote there. The memory is freed when the last rank gives up its
  /// CommBuffer. The call is collective, like `allocate`.
  ///
  /// Inputs may lie anywhere in common memory. `all_gather` with `full` in this memory, and `broadcast` with `data` in
  /// it (at the same place on every rank), do not move data that lie there already. Such a call in place costs a
  /// barrier, and no rank writes another rank's part. All other outputs in common memory must not overlap those of
  /// other ranks.
  ///
  /// Error: 69 if ranks cannot share memory.
  virtual absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes);

  /// Gathers the shards: `full[r * bytes_per_rank ...]` becomes the shard of rank r. It works in place if `shard ==
  /// full + rank * bytes_per_rank`.
  Work all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank,
                  const GatherOptions& options = {}) {
    return do_all_gather({label, shard, full, bytes_per_rank, options});
  }
  Work all_gather(const GatherCall& call) { return do_all_gather(call); }

  /// `output[i] = sum over ranks q of input_q[rank * numel_per_rank + i]`, fp32, for i < numel_per_rank. `input` holds
  /// `size() * numel_per_rank` elements of `dtype` (fp32, bf16, fp16). `output` may alias this rank's slice of `input`
  /// if dtype is fp32. The caller gives up `input`: its content is undefined afterwards, except for an aliased `output`
  /// (`nccl` adds narrow types in `input`).
  ///
  /// `options.waits` is kAtOnce if the caller waits for the Work right after the call. Every rank with kLater starts,
  /// advances and waits for its calls (those of all groups) in the same order, so that no two ranks wait for each
  /// other. A Work that is dropped without a wait ends the group, except Works that a device runs on its own.
  Work reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel_per_rank,
                      const ReduceOptions& options = {}) {
    return do_reduce({true, label, input, dtype, output, numel_per_rank, options});
  }

  /// `output[i] = sum over ranks of input_q[i]`, fp32, for i < numel. All ranks get the same bits. `output` may be
  /// `input` when dtype is fp32. `input` and `options` have the same meaning as in reduce_scatter, but the visitor sees
  /// all of `output` on every rank.
  Work all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                  const ReduceOptions& options = {}) {
    return do_reduce({false, label, input, dtype, output, numel, options});
  }

  /// Makes a reduce_scatter or an all_reduce, depending on `call.scatters`.
  Work reduce(const ReduceCall& call) { return do_reduce(call); }

  /// Copies `data` of rank `root` to all ranks.
  virtual Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) = 0;

  /// Exchanges parts between all ranks: `output[q * bytes_per_rank ...] = input_q[rank * bytes_per_rank ...]`.
  virtual Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) = 0;

  /// Makes a barrier: the wait for its Work ends after all ranks have called this function.
  virtual Work barrier(std::string_view label) = 0;

  /// Ends the group: calls on every rank, both those under way and later ones, fail with `reason` and this rank's
  /// number.
  virtual void abort(const absl::Status& reason) = 0;

  /// Announces that this rank makes no more calls. Peers that need this rank for a call get an error immediately, if
  /// the transport can inform them. The destructor does the same.
  virtual void leave() {}

  /// Returns OK, or the failure of a call that was queued and failed when it ran. Work::wait on a GPU returns before
  /// the call has run. Code that reads a result from the GPU must therefore call this function after it has read the
  /// result, to learn whether the result is valid.
  virtual absl::Status status() const { return absl::OkStatus(); }

  /// If a device makes the calls: returns the number of the call that the device has reached and not finished. The
  /// number counts from 1, without `allocate`. 0 means that there is none.
  virtual std::uint64_t stands_in() const { return 0; }

  /// Tells whether the store has this key. It is false if the store does not answer in time. An error means that the
  /// process that serves the store has been gone for some seconds.
  using HasKey = absl::FunctionRef<absl::StatusOr<bool>(const std::string& key)>;
  /// Ends the group's call under way if a rank of the group has failed. The caller of that call gets an error (75).
  /// CallWatch calls this from its own thread after a call has taken long, since a network library may not notice the
  /// end of a connection. It does nothing and returns false, unless a rank of the group has written to the store that
  /// it failed, or was seen to be gone (NextRank). Transports that notice a failed rank by themselves always return
  /// false.
  virtual bool end_if_left_alone(HasKey) { return false; }

 protected:
  virtual Work do_all_gather(const GatherCall& call) = 0;
  virtual Work do_reduce(const ReduceCall& call) = 0;
};

}  // namespace tessera
