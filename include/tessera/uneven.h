#pragma once

#include <functional>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include "tessera/engine.h"
#include "tessera/unpadded_epoch.h"

namespace tessera {

/// The work that all ranks do after a step, such as `set_lr` or a save; the function gets the step's result.
using OnStep = std::function<void(const StepResult&)>;

/// The part of a training loop that handles different numbers of batches on the ranks. `uneven` below uses it, and a
/// program may use it in a loop that it writes itself. All ranks make an UnevenLoop and call `next` until it returns
/// false.
class UnevenLoop {
 public:
  /// `engine` must outlive this object. `on_step` is called after each step that `next` makes, with its result.
  explicit UnevenLoop(Engine& engine, OnStep on_step = {}) : engine_(engine), on_step_(std::move(on_step)) {}

  /// Decides whether the program should train with a batch now. `has_batch`: whether this rank has another batch.
  /// Returns true if the program should train with the batch, by one backward, and by a step if a step is due. Returns
  /// false when no rank has a batch left and the last step is complete. A rank without a batch stays in this call while
  /// other ranks have batches, and takes part in their backwards and steps (Engine::backward_nothing, Engine::step).
  /// The call is collective. Errors are those of Engine::step.
  bool next(bool has_batch);

 private:
  void step(bool partial);

  Engine& engine_;
  OnStep on_step_;
};

/// The batches of a loader, for a loop in which ranks may have different numbers of batches, as with PyTorch's Join:
///
///   for (auto& batch : tessera::uneven(*loader, engine)) {
///     const at::Tensor loss = model->forward(batch.data, batch.target);
///     engine.backward(loss, {.weight = static_cast<double>(batch.data.size(0))});
///     if (engine.step_is_due()) engine.step();
///   }
///
/// The body runs on ranks that have a batch. A rank without a batch takes part in the microbatches and steps of the
/// other ranks, but adds nothing to them. When no rank has a batch left, the remaining microbatches make a step
/// (`step(partial)`). An epoch in which each microbatch has its weight therefore trains as on one rank, whatever the
/// number of ranks. A rank may have no batch at all. Give `on_step` the work that all ranks must do after a
/// step. The loop calls `on_step` after the steps that the loop itself makes. The body must do the same work after its
/// own steps. RankSampler adds no samples in such a loop, so ranks may have different numbers of batches. The ranks
/// exchange one small message for each batch. If the body leaves the loop, it must do so on all ranks at the same
/// point.
template <class Loader>
class Uneven {
 public:
  /// `loader` and `engine` must outlive this object. `on_step`: as in UnevenLoop.
  Uneven(Loader& loader, Engine& engine, OnStep on_step) : loader_(loader), loop_(engine, std::move(on_step)) {}

  struct End {};  ///< end of the loop
  /// Single-pass iterator. Both its constructor and `++` call `look`, which is collective, so each iteration is
  /// collective too.
  class Iterator {
   public:
    /// Begins the loop with its first iteration. It is collective.
    explicit Iterator(Uneven& batches)
        : batches_(batches), next_(begin_of(batches.loader_)), end_(std::end(batches.loader_)) {
      look();
    }
    /// Returns this iteration's batch of the loader.
    decltype(auto) operator*() {
      using Batch = decltype(*next_);
      if constexpr (std::is_lvalue_reference_v<Batch>) {
        return *next_;
      } else {
        if (!made_) made_.emplace(*next_);
        return (*made_);
      }
    }
    /// Advances to the next iteration. It is collective.
    Iterator& operator++() {
      made_.reset();
      ++next_;
      look();
      return *this;
    }
    /// Returns whether this rank has another batch.
    bool operator!=(End) const { return goes_on_; }

   private:
    static auto begin_of(Loader& loader) {
      const UnpaddedEpoch unpadded;
      return std::begin(loader);
    }
    void look() { goes_on_ = batches_.loop_.next(next_ != end_); }

    Uneven& batches_;
    decltype(std::begin(std::declval<Loader&>())) next_;
    decltype(std::end(std::declval<Loader&>())) end_;
    std::optional<std::decay_t<decltype(*std::declval<decltype(std::begin(std::declval<Loader&>()))&>())>> made_;
    bool goes_on_ = false;
  };
  /// Begins the loop, for a range-based `for`. It is collective.
  Iterator begin() { return Iterator(*this); }
  /// Returns the end of the loop.
  End end() const { return {}; }

 private:
  Loader& loader_;
  UnevenLoop loop_;
};

/// Returns the loop over `loader`, which is a range or a pointer to a range (make_data_loader returns a pointer).
/// `loader` and `engine` must outlive the loop.
template <class Loader>
auto uneven(Loader& loader, Engine& engine, OnStep on_step = {}) {
  if constexpr (requires { std::begin(loader); }) {
    return Uneven<Loader>(loader, engine, std::move(on_step));
  } else {
    return Uneven<std::remove_reference_t<decltype(*loader)>>(*loader, engine, std::move(on_step));
  }
}

}  // namespace tessera
