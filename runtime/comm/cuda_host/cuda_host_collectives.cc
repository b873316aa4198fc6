#include "runtime/comm/cuda_host/cuda_host_collectives.h"

#include <atomic>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/call.h"
#include "runtime/comm/sum/visited_sum.h"

// Collectives of ranks whose GPUs can read each other's memory. A call has two halves. `start` records this rank's
// `ready` event on the compute queue. Then `start` exchanges an Offer (call and place of the input) over `host_`. This
// exchange is also a barrier of the processes. Then `start` queues the work on the side queue behind all peers' `ready`
// events, and records `done`. `finish`, at the wait, makes another barrier of the processes and lets the compute queue
// wait for all `done` events. The events of kRing calls are kept in a ring.

namespace tessera {
namespace {

using Queue = PeerDevice::Queue;

/// The message that a rank sends to the other ranks when a call starts. It is sent as plain bytes.
struct Offer {
  CallSignature call;
  PeerDevice::Place input;
};

struct EventHandles {
  PeerDevice::Handle ready, done;
};

class DeviceAllocation : public CommBuffer {
 public:
  DeviceAllocation(std::shared_ptr<std::byte> memory, std::size_t bytes) : memory_(std::move(memory)), bytes_(bytes) {}
  std::byte* data() const override { return memory_.get(); }
  std::size_t bytes() const override { return bytes_; }

 private:
  const std::shared_ptr<std::byte> memory_;
  const std::size_t bytes_;
};

class CudaHostCollectives : public Collectives {
 public:
  CudaHostCollectives(const Group& group, std::shared_ptr<Collectives> host, std::unique_ptr<PeerDevice> device)
      : group_(group), host_(std::move(host)), device_(std::move(device)) {}

  /// Frees events and memory after all devices have finished their queues, when no peer can use these events and this
  /// memory any more.
  ~CudaHostCollectives() override {
    const bool all_is_well = !failed_ && ring_.size() == kRing && std::uncaught_exceptions() == exceptions_at_start_;
    if (all_is_well && device_->drain().ok() && host_->barrier("end").wait().ok()) return;
    device_->abandon();
    for (Events& events : ring_) {
      for (auto* list : {&events.ready, &events.done}) {
        // NOLINT: left unfreed, since the work that waits for it may remain too
        for (auto& event : *list) event.release();
      }
    }
  }

  /// Makes this rank's events and opens the events of the other ranks.
  absl::Status set_up();

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  TransportKind kind() const override { return TransportKind::kCudaHost; }
  std::string transport() const override { return "cuda_host"; }
  int gpu() const override { return device_->index(); }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override;
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override;
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override;
  Work barrier(std::string_view label) override;
  void abort(const absl::Status& reason) override {
    failed_ = true;
    host_->abort(reason);
  }
  void leave() override { host_->leave(); }
  absl::Status status() const override { return host_->status(); }

 protected:
  Work do_all_gather(const GatherCall& call) override;
  Work do_reduce(const ReduceCall& call) override;

 private:
  /// Number of calls that may be under way. An event is recorded again after this many calls.
  static constexpr std::uint64_t kRing = 32;
  static_assert(kRing >= 2 * kMostUnderWay);

  /// The inputs of all ranks, at the addresses where this rank reads them.
  using Inputs = std::vector<const std::byte*>;
  /// Queues this rank's work after all inputs are ready.
  using Enqueue = std::function<absl::Status(const Inputs&)>;
  class Pending;
  struct Events {
    std::vector<std::unique_ptr<PeerDevice::Event>> ready, done;  ///< one event for each rank
  };

  Work start(const CallSignature& call, const void* input, const Enqueue& enqueue,
             std::function<absl::Status()> finish = nullptr);
  absl::Status try_start(CallSignature call, const void* input, const Enqueue& enqueue);
  absl::Status exchange(const CallSignature& call, const void* input, Inputs& inputs);
  absl::Status finish(const CallSignature& call, const std::function<absl::Status()>& finish);
  absl::Status fail(const CallSignature& call, const absl::Status& why);
  struct Scratch {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;  ///< size of `memory`, which may be more than was asked for
  };
  absl::StatusOr<Scratch> take_scratch(std::size_t bytes);
  absl::Status copy(void* to, const void* from, std::size_t bytes) {
    return bytes == 0 || to == from ? absl::OkStatus() : device_->copy(Queue::kSide, to, from, bytes);
  }

  const Group group_;
  const std::shared_ptr<Collectives> host_;
  const std::unique_ptr<PeerDevice> device_;
  const int exceptions_at_start_ = std::uncaught_exceptions();
  std::atomic<bool> failed_ = false;
  std::uint64_t sequence_ = 0;
  std::vector<Events> ring_;
  std::vector<Offer> offers_;
  std::vector<Scratch> spare_;  ///< scratch for all-reduces in place
};

class CudaHostCollectives::Pending : public Work::State {
 public:
  Pending(CudaHostCollectives& owner, const CallSignature& call, std::function<absl::Status()> finish)
      : owner_(owner), call_(call), finish_(std::move(finish)) {}
  absl::Status wait() override { return owner_.finish(call_, finish_); }

 private:
  CudaHostCollectives& owner_;
  const CallSignature call_;
  const std::function<absl::Status()> finish_;
};

absl::Status CudaHostCollectives::set_up() {
  const auto ranks = static_cast<std::size_t>(size());
  offers_.resize(ranks);
  for (std::uint64_t slot = 0; slot < kRing; ++slot) {
    EventHandles own;
    TESSERA_ASSIGN_OR_RETURN(auto ready, device_->make_event(own.ready));
    TESSERA_ASSIGN_OR_RETURN(auto done, device_->make_event(own.done));
    std::vector<EventHandles> all(ranks);
    TESSERA_RETURN_IF_ERROR(host_->all_gather("events", &own, all.data(), sizeof own).wait());
    Events& events = ring_.emplace_back();
    for (int q = 0; q < size(); ++q) {
      if (q == rank()) {
        events.ready.push_back(std::move(ready));
        events.done.push_back(std::move(done));
        continue;
      }
      TESSERA_ASSIGN_OR_RETURN(auto peers_ready, device_->open_event(all[q].ready));
      TESSERA_ASSIGN_OR_RETURN(auto peers_done, device_->open_event(all[q].done));
      events.ready.push_back(std::move(peers_ready));
      events.done.push_back(std::move(peers_done));
    }
  }
  return host_->barrier("events").wait();
}

absl::StatusOr<std::unique_ptr<CommBuffer>> CudaHostCollectives::allocate(std::size_t bytes) {
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, device_->allocate(bytes));
  return std::unique_ptr<CommBuffer>(std::make_unique<DeviceAllocation>(std::move(memory), bytes));
}

absl::Status CudaHostCollectives::fail(const CallSignature& call, const absl::Status& why) {
  const absl::Status failure =
      make_error(exit_code_of(why), group_.self() + " " + where(call) + ": " + message_of(why));
  abort(failure);
  return failure;
}

Work CudaHostCollectives::start(const CallSignature& call, const void* input, const Enqueue& enqueue,
                                std::function<absl::Status()> finish) {
  CallSignature numbered = call;
  numbered.sequence = ++sequence_;
  absl::Status started = try_start(numbered, input, enqueue);
  if (!started.ok()) return Work(std::move(started));
  return Work(std::make_unique<Pending>(*this, numbered, std::move(finish)));
}

absl::Status CudaHostCollectives::try_start(CallSignature call, const void* input, const Enqueue& enqueue) {
  Events& events = ring_[call.sequence % kRing];
  const absl::Status recorded = device_->record(Queue::kCompute, *events.ready[rank()]);
  if (!recorded.ok()) return fail(call, recorded);
  Inputs inputs;
  TESSERA_RETURN_IF_ERROR(exchange(call, input, inputs));
  const auto queue = [&]() -> absl::Status {
    for (const auto& ready : events.ready) TESSERA_RETURN_IF_ERROR(device_->wait(Queue::kSide, *ready));
    TESSERA_RETURN_IF_ERROR(enqueue(inputs));
    return device_->record(Queue::kSide, *events.done[rank()]);
  };
  const absl::Status queued = queue();
  return queued.ok() ? queued : fail(call, queued);
}

/// Exchanges offers. Every rank has recorded its `ready` event before, so a queue can wait for all of them afterwards.
absl::Status CudaHostCollectives::exchange(const CallSignature& call, const void* input, Inputs& inputs) {
  Offer own;
  own.call = call;
  if (input) {
    auto place = device_->locate(input);
    if (!place.ok()) return fail(call, place.status());
    own.input = *place;
  }
  if (absl::Status met = host_->all_gather(call.label_text(), &own, offers_.data(), sizeof own).wait(); !met.ok()) {
    failed_ = true;
    return met;
  }
  for (int q = 0; q < size(); ++q) {
    const Offer& offer = offers_[static_cast<std::size_t>(q)];
    if (!(offer.call == call)) {
      return fail(
          call, make_error(ExitCode::kInternal, "ranks disagree: " + group_.who(rank()) + " calls " + call.describe() +
                                                    ", " + group_.who(q) + " calls " + offer.call.describe()));
    }
    if (!input || q == rank()) {
      inputs.push_back(static_cast<const std::byte*>(input));
      continue;
    }
    auto opened = device_->open(offer.input);
    if (!opened.ok()) return fail(call, opened.status());
    inputs.push_back(*opened);
  }
  return absl::OkStatus();
}

/// Makes the barrier at the end of a call. Every rank has queued its part before it calls this function.
absl::Status CudaHostCollectives::finish(const CallSignature& call, const std::function<absl::Status()>& finish) {
  if (absl::Status met = host_->barrier(call.label_text()).wait(); !met.ok()) {
    failed_ = true;
    return met;
  }
  const auto queue = [&]() -> absl::Status {
    for (const auto& done : ring_[call.sequence % kRing].done) {
      TESSERA_RETURN_IF_ERROR(device_->wait(Queue::kCompute, *done));
    }
    return finish ? finish() : absl::OkStatus();
  };
  const absl::Status queued = queue();
  return queued.ok() ? queued : fail(call, queued);
}

Work CudaHostCollectives::do_all_gather(const GatherCall& given) {
  const std::size_t bytes = given.bytes_per_rank;
  const CallSignature call = make_signature(Operation::kAllGather, given.label, DType::kU8, bytes);
  return start(call, given.shard, [&](const Inputs& shards) -> absl::Status {
    for (std::size_t q = 0; q < shards.size(); ++q)
      TESSERA_RETURN_IF_ERROR(copy(static_cast<std::byte*>(given.full) + q * bytes, shards[q], bytes));
    return absl::OkStatus();
  });
}

Work CudaHostCollectives::broadcast(std::string_view label, void* data, std::size_t bytes, int root) {
  const CallSignature call =
      make_signature(Operation::kBroadcast, label, DType::kU8, bytes, static_cast<std::uint32_t>(root));
  return start(call, data, [&](const Inputs& all) { return copy(data, all[static_cast<std::size_t>(root)], bytes); });
}

Work CudaHostCollectives::all_to_all(std::string_view label, const void* input, void* output,
                                     std::size_t bytes_per_rank) {
  const CallSignature call = make_signature(Operation::kAllToAll, label, DType::kU8, bytes_per_rank);
  const std::size_t mine = static_cast<std::size_t>(rank()) * bytes_per_rank;
  return start(call, input, [&](const Inputs& inputs) -> absl::Status {
    for (std::size_t q = 0; q < inputs.size(); ++q) {
      std::byte* const to = static_cast<std::byte*>(output) + q * bytes_per_rank;
      TESSERA_RETURN_IF_ERROR(copy(to, inputs[q] + mine, bytes_per_rank));
    }
    return absl::OkStatus();
  });
}

Work CudaHostCollectives::barrier(std::string_view label) {
  const CallSignature call = make_signature(Operation::kBarrier, label, DType::kU8, 0);
  return start(call, nullptr, [](const Inputs&) { return absl::OkStatus(); });
}

/// Takes the smallest scratch that fits.
absl::StatusOr<CudaHostCollectives::Scratch> CudaHostCollectives::take_scratch(std::size_t bytes) {
  auto best = spare_.end();
  for (auto it = spare_.begin(); it != spare_.end(); ++it) {
    if (it->bytes >= bytes && (best == spare_.end() || it->bytes < best->bytes)) best = it;
  }
  if (best == spare_.end()) {
    TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, device_->allocate(bytes));
    return Scratch{std::move(memory), bytes};
  }
  Scratch scratch = std::move(*best);
  spare_.erase(best);
  return scratch;
}

/// If an all-reduce is in place, no rank may write its output before all ranks have read its input. The sum therefore
/// waits in scratch until then.
Work CudaHostCollectives::do_reduce(const ReduceCall& given) {
  const CallSignature call = make_signature(given.operation(), given.label, given.dtype, given.numel);
  if (absl::Status usable = check_device_sum(given.label, given.dtype, given.options.visitor); !usable.ok())
    return Work(fail(call, usable));
  const std::size_t bytes = given.numel * sizeof(float);
  const std::size_t mine =
      given.scatters ? static_cast<std::size_t>(rank()) * given.numel * size_of(given.dtype) : std::size_t{0};
  const auto sum_into = [this, mine, dtype = given.dtype, numel = given.numel](float* to) {
    return [this, mine, dtype, numel, to](const Inputs& inputs) {
      std::vector<const void*> slices;
      for (const std::byte* all : inputs) slices.push_back(all + mine);
      return device_->sum(Queue::kSide, slices, dtype, to, numel);
    };
  };
  if (given.scatters || static_cast<const void*>(given.output) != given.input)
    return start(call, given.input, sum_into(given.output));
  auto scratch = take_scratch(bytes);
  if (!scratch.ok()) return Work(fail(call, scratch.status()));
  auto* const sum = reinterpret_cast<float*>(scratch->memory.get());
  return start(call, given.input, sum_into(sum), [this, taken = *scratch, output = given.output, bytes] {
    spare_.push_back(taken);
    return bytes == 0 ? absl::OkStatus() : device_->copy(Queue::kCompute, output, taken.memory.get(), bytes);
  });
}

}  // namespace

absl::StatusOr<std::shared_ptr<Collectives>> cuda_host_collectives(const Group& group,
                                                                   std::shared_ptr<Collectives> host,
                                                                   std::unique_ptr<PeerDevice> device) {
  if (group.size() > static_cast<int>(PeerDevice::kMostInputs)) {
    return make_error(ExitCode::kConfig, group.self() + ": cuda_host joins at most " +
                                             std::to_string(PeerDevice::kMostInputs) + " ranks, got " +
                                             std::to_string(group.size()) +
                                             ". [T0454] hint: take comm.transport \"nccl\"");
  }
  auto collectives = std::make_shared<CudaHostCollectives>(group, std::move(host), std::move(device));
  TESSERA_RETURN_IF_ERROR(collectives->set_up());
  return std::shared_ptr<Collectives>(std::move(collectives));
}

}  // namespace tessera
