#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/comm/call.h"
#include "runtime/comm/forwarding_collectives.h"

namespace tessera {

/// A group that reports its calls to an observer, on the thread that makes them:
///
///     std::uint64_t begins(CallSignature call);   // the program begins a call; gives the call a number
///     void waits(std::uint64_t call);             // the program advances the work, or waits for it
///     void leaves(std::uint64_t call, const absl::Status& status, bool is_over);   // the program leaves the call
///     absl::Status cause_of(const absl::Status& failure) const;   // any thread: the error for the program
///     void aborted(const absl::Status& reason);   // any thread: the group is about to fail
///     void ends();                                // the group is about to be destroyed
///
/// `is_over` means that the call is complete or has failed. Each `begins` and each `waits` is followed by a `leaves`.
/// Calls on a GPU's memory begin and end for the observer before the device has reached them. `allocate` is reported
/// only if ranks share memory, since it is a barrier only then.
///
/// A call costs only the observer's time. It allocates nothing if at most kMostStarted calls are under way.
template <class Observer>
class ObservedCollectives final : public ForwardingCollectives {
 public:
  ObservedCollectives(std::shared_ptr<Observer> observer, std::shared_ptr<Collectives> group)
      : ForwardingCollectives(std::move(group)), observer_(std::move(observer)) {}
  ~ObservedCollectives() override { observer_->ends(); }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override {
    return allocated(Operation::kAllocate, bytes, [&] { return group_->allocate(bytes); });
  }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes) override {
    return allocated(Operation::kAllocateCommon, bytes, [&] { return group_->allocate_common(bytes); });
  }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return started(make_signature(Operation::kBroadcast, label, DType::kU8, bytes, static_cast<std::uint32_t>(root)),
                   [&] { return group_->broadcast(label, data, bytes, root); });
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    return started(make_signature(Operation::kAllToAll, label, DType::kU8, bytes),
                   [&] { return group_->all_to_all(label, input, output, bytes); });
  }
  Work barrier(std::string_view label) override {
    return started(make_signature(Operation::kBarrier, label, DType::kU8, 0), [&] { return group_->barrier(label); });
  }
  void abort(const absl::Status& reason) override {
    observer_->aborted(reason);
    group_->abort(reason);
  }
  absl::Status status() const override {
    const absl::Status status = group_->status();
    return status.ok() ? status : observer_->cause_of(status);
  }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    return started(make_signature(Operation::kAllGather, call.label, DType::kU8, call.bytes_per_rank),
                   [&] { return group_->all_gather(call); });
  }
  Work do_reduce(const ReduceCall& call) override {
    return started(make_signature(call.operation(), call.label, call.dtype, call.numel),
                   [&] { return group_->reduce(call); });
  }

 private:
  static constexpr std::size_t kMostStarted = 2 * kMostUnderWay;

  /// The time that the program spends in a call. It ends when the object is destroyed, also by an exception.
  class Stay {
   public:
    Stay(Observer& observer, std::uint64_t call) : observer_(observer), call_(call) {}
    ~Stay() { observer_.leaves(call_, status_, is_over_); }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;
    absl::Status ends_with(const absl::Status& status, bool is_over) {
      is_over_ = is_over;
      return status_ = status.ok() ? status : observer_.cause_of(status);
    }

   private:
    Observer& observer_;
    const std::uint64_t call_;
    absl::Status status_;
    bool is_over_ = false;
  };

  /// A call under way.
  class Started final : public Work::State {
   public:
    /// `is_its_own` is true if the object lies on the heap, and not in ObservedCollectives::started_.
    void begin(Observer& observer, std::uint64_t call, Work work, bool is_its_own) {
      observer_ = &observer;
      call_ = call;
      work_ = std::move(work);
      is_its_own_ = is_its_own;
    }
    absl::Status advance() override {
      observer_->waits(call_);
      Stay stay(*observer_, call_);
      absl::Status status = work_.advance();
      return stay.ends_with(status, /*is_over=*/!status.ok());
    }
    absl::Status wait() override {
      observer_->waits(call_);
      Stay stay(*observer_, call_);
      return stay.ends_with(work_.wait(), /*is_over=*/true);
    }
    /// The transport may wait for a Work that is dropped.
    void release() override {
      if (!work_.done()) {
        observer_->waits(call_);
        const Stay stay(*observer_, call_);
        work_ = Work();
      }
      if (is_its_own_) {
        delete this;
      } else {
        is_held.store(false, std::memory_order_release);
      }
    }

    std::atomic<bool> is_held = false;  ///< whether a Work uses this entry of started_

   private:
    Observer* observer_ = nullptr;
    std::uint64_t call_ = 0;
    Work work_;
    bool is_its_own_ = false;
  };

  template <class Start>
  Work started(const CallSignature& signature, const Start& start) {
    const std::uint64_t call = observer_->begins(signature);
    Work work;
    {
      Stay stay(*observer_, call);
      work = start();
      if (work.done()) return Work(stay.ends_with(work.wait(), /*is_over=*/true));
    }
    // The caller makes one call at a time, so a free entry stays free until this call takes it.
    for (std::size_t tried = 0; tried < kMostStarted; ++tried) {
      Started& place = started_[next_++ % kMostStarted];
      if (place.is_held.load(std::memory_order_acquire)) continue;
      place.is_held.store(true, std::memory_order_relaxed);
      place.begin(*observer_, call, std::move(work), /*is_its_own=*/false);
      return Work(&place);
    }
    auto own = std::make_unique<Started>();
    own->begin(*observer_, call, std::move(work), /*is_its_own=*/true);
    return Work(std::move(own));
  }

  template <class Allocate>
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocated(Operation operation, std::size_t bytes,
                                                        const Allocate& allocate) {
    if (!group_->shares_memory()) return allocate();
    const std::uint64_t call = observer_->begins(make_signature(operation, "", DType::kU8, bytes));
    Stay stay(*observer_, call);
    absl::StatusOr<std::unique_ptr<CommBuffer>> memory = allocate();
    if (const absl::Status status = stay.ends_with(memory.status(), /*is_over=*/true); !status.ok()) return status;
    return memory;
  }

  const std::shared_ptr<Observer> observer_;
  std::size_t next_ = 0;
  std::array<Started, kMostStarted> started_;
};

}  // namespace tessera
