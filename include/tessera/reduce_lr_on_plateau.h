#pragma once

#include <cstdint>
#include <limits>

namespace tessera {

class Engine;

/// Lowers an Engine's learning rates when a measure has stopped improving, as
/// torch.optim.lr_scheduler.ReduceLROnPlateau does. The strategy's lr_schedule.type must be "manual".
///
///   tessera::ReduceLROnPlateau plateau(engine, {.patience = 3});
///   ...
///   plateau.step(engine.evaluate(batches, loss_of).loss);  // after each epoch, on all ranks
///
/// All ranks must give the same measures, such as those that `evaluate` returns; if rates differ between ranks, the
/// next step throws an error. A checkpoint does not hold the state of this object. The thread that drives the Engine
/// uses this object.
class ReduceLROnPlateau {
 public:
  enum class Mode { kMin, kMax };  ///< whether a lower or a higher measure is better
  /// whether `threshold` is a fraction of the best measure or a difference from it
  enum class Threshold { kRelative, kAbsolute };

  /// Options with PyTorch's names and defaults.
  struct Options {
    Mode mode = Mode::kMin;                           ///< whether a lower or a higher measure is better
    double factor = 0.1;                              ///< new rate = rate * factor
    std::int64_t patience = 10;                       ///< number of measures in a row without improvement that do not
                                                      ///< lower the rate yet; one more lowers it
    double threshold = 1e-4;                          ///< smallest improvement of a measure that counts
    Threshold threshold_mode = Threshold::kRelative;  ///< whether `threshold` is relative or absolute
    std::int64_t cooldown = 0;                        ///< measures after a reduction that do not count as bad
    /// lower bound of all rates: the rate of all parameters, and the rates of groups
    double min_lr = 0.0;
    double eps = 1e-8;  ///< a rate that would change by no more than this is not changed
  };

  /// The Engine must outlive this object. Throws Error (64) for a factor outside (0, 1), for negative numbers, and for
  /// a schedule that is not "manual".
  explicit ReduceLROnPlateau(Engine& engine);
  /// Makes the schedule with other options than the default ones.
  ReduceLROnPlateau(Engine& engine, const Options& options);

  /// Takes the next measure, and returns whether the call lowered a rate. NaN is not an improvement. Errors: those of
  /// set_lr.
  bool step(double measure);
  /// Returns the best measure so far; before the first measure infinity (kMin) or -infinity (kMax).
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
