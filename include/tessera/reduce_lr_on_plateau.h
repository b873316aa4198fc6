#pragma once

#include <cstdint>
#include <limits>

namespace tessera {

class Engine;

/// Lowers an Engine's learning rates when a measure has stopped improving, as torch.optim.lr_scheduler.ReduceLROnPlateau.
/// Needs lr_schedule.type "manual".
///
///   tessera::ReduceLROnPlateau plateau(engine, {.patience = 3});
///   ...
///   plateau.step(engine.evaluate(batches, loss_of).loss);  // after each epoch, on all ranks
///
/// All ranks must give the same measures, such as `evaluate` returns: ranks whose rates differ are told so at their next
/// step. State is the object's own: it is not in a checkpoint.
class ReduceLROnPlateau {
 public:
  enum class Mode { kMin, kMax };  ///< the measure improves when it falls, or when it rises
  enum class Threshold { kRelative, kAbsolute };

  /// Named and preset as PyTorch's.
  struct Options {
    Mode mode = Mode::kMin;
    double factor = 0.1;         ///< new rate = rate * factor
    std::int64_t patience = 10;  ///< measures without improvement that are let pass
    double threshold = 1e-4;     ///< by how much a measure must improve to count
    Threshold threshold_mode = Threshold::kRelative;
    std::int64_t cooldown = 0;  ///< measures after a reduction that do not count
    double min_lr = 0.0;        ///< everybody's rate and groups' own do not fall below it
    double eps = 1e-8;          ///< a rate that would change by less stays
  };

  /// The Engine must outlive it. Throws Error (64) for a factor outside (0, 1), or negative numbers.
  explicit ReduceLROnPlateau(Engine& engine);
  ReduceLROnPlateau(Engine& engine, const Options& options);

  /// Returns whether rates were lowered. NaN is no improvement. Throws as Engine::set_lr.
  bool step(double measure);
  double best() const { return best_; }

 private:
  bool improves(double measure) const;
  bool reduce();

  Engine& engine_;
  const Options options_;
  double best_;
  std::int64_t bad_ = 0, cooling_ = 0;
};

}  // namespace tessera
