#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/cuda_host/peer_device.h"
#include "runtime/comm/local/plain_buffer.h"
#include "runtime/comm/sum/pairwise_sum.h"

namespace tessera {

/// Emulates a GPU that ranks on threads share. Work that is queued for compute is done at once, as LibTorch's operators
/// are on the CPU. Work that is queued beside compute is done as late as possible, which is when compute waits for it.
/// So if code does not wait for an event, or uses memory again too early, there are wrong values in every run, and not
/// only in some.
class EmulatedPeerDevice : public PeerDevice {
 public:
  ~EmulatedPeerDevice() override {
    const std::lock_guard lock(gpu());
    while (!side_.empty()) run_next();
  }

  int allocations = 0;  ///< the number of allocations so far

  int index() const override { return -1; }  // there is no index, since the memory is the host's
  absl::StatusOr<std::shared_ptr<std::byte>> allocate(std::size_t bytes) override {
    ++allocations;
    auto buffer = std::make_shared<PlainBuffer>(bytes);
    return std::shared_ptr<std::byte>(buffer, buffer->data());
  }
  absl::StatusOr<Place> locate(const void* memory) override {
    return Place{{}, reinterpret_cast<std::uintptr_t>(memory)};
  }
  absl::StatusOr<std::byte*> open(const Place& peers) override { return reinterpret_cast<std::byte*>(peers.offset); }

  absl::StatusOr<std::unique_ptr<Event>> make_event(Handle& handle) override {
    auto state = std::make_shared<State>();
    auto* const offered = &kept_.emplace_back(state);
    std::memcpy(handle.bytes.data(), &offered, sizeof offered);
    return std::unique_ptr<Event>(std::make_unique<EmulatedEvent>(std::move(state)));
  }
  absl::StatusOr<std::unique_ptr<Event>> open_event(const Handle& peers) override {
    std::shared_ptr<State>* offered = nullptr;
    std::memcpy(&offered, peers.bytes.data(), sizeof offered);
    return std::unique_ptr<Event>(std::make_unique<EmulatedEvent>(*offered));
  }

  absl::Status record(Queue queue, Event& event) override {
    const std::lock_guard lock(gpu());
    State& state = state_of(event);
    const int number = ++state.recorded;
    state.owner = this;
    if (queue == Queue::kCompute) {
      state.happened = number;
    } else {
      side_.push_back([&state, number] { state.happened = number; });
    }
    return absl::OkStatus();
  }
  absl::Status wait(Queue queue, Event& event) override {
    const std::lock_guard lock(gpu());
    State& state = state_of(event);
    const int number = state.recorded;
    if (queue == Queue::kCompute) {
      drive(state, number);
    } else {
      side_.push_back([&state, number] { drive(state, number); });
    }
    return absl::OkStatus();
  }

  absl::Status drain() override {
    const std::lock_guard lock(gpu());
    while (!side_.empty()) run_next();
    return absl::OkStatus();
  }
  void abandon() override {
    const std::lock_guard lock(gpu());
    side_.clear();
  }

  absl::Status copy(Queue queue, void* to, const void* from, std::size_t bytes) override {
    return run(queue, [=] { std::memmove(to, from, bytes); });
  }
  absl::Status sum(Queue queue, std::span<const void* const> inputs, DType dtype, float* output,
                   std::size_t numel) override {
    const std::vector<const void*> sources(inputs.begin(), inputs.end());
    return run(queue, [=] { pairwise_sum(sources, dtype, output, numel); });
  }

 private:
  struct State {
    int recorded = 0, happened = 0;
    EmulatedPeerDevice* owner = nullptr;
  };
  struct EmulatedEvent : Event {
    explicit EmulatedEvent(std::shared_ptr<State> state) : state(std::move(state)) {}
    const std::shared_ptr<State> state;
  };
  static State& state_of(Event& event) { return *static_cast<EmulatedEvent&>(event).state; }

  static std::mutex& gpu() {
    static std::mutex mutex;
    return mutex;
  }
  /// Runs queued work until the event has occurred `number` times.
  static void drive(State& state, int number) {
    while (state.happened < number) state.owner->run_next();
  }
  void run_next() {
    const std::function<void()> next = std::move(side_.front());
    side_.pop_front();
    next();
  }
  absl::Status run(Queue queue, std::function<void()> work) {
    const std::lock_guard lock(gpu());
    queue == Queue::kCompute ? work() : side_.push_back(std::move(work));
    return absl::OkStatus();
  }

  std::deque<std::function<void()>> side_;
  std::deque<std::shared_ptr<State>> kept_;  ///< elements do not move, since handles point to them
};

}  // namespace tessera
