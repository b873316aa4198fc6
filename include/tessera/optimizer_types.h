#pragma once

namespace tessera {

// clang-format off
/// The types of "optimizer", with a row for each: ROW(enumerator, word, text, traits, defaults...). A new row must be
/// the last one. The library uses these rows to make OptimizerType, the words that a strategy file may use, their texts
/// in docs/strategy.md, and the lists of keys that have an effect. `traits` are those of
/// runtime/config/optimizer_rows.h, joined by |: the numbers that the rule reads, and how it updates. `defaults` are
/// members of OptimizerDefaults (the same header) for which the rule has another default than adamw.
#define TESSERA_OPTIMIZER_TYPES(ROW)                                                                                   \
  ROW(kAdamW, "adamw", "Adam with decoupled weight decay (arXiv 1711.05101)", kBetas | kEps | kFreezeStep)             \
  ROW(kAdam, "adam", "Adam (arXiv 1412.6980), weight decay added to the gradient", kBetas | kEps | kFreezeStep,        \
      .weight_decay = 0)                                                                                               \
  ROW(kSgd, "sgd", "stochastic gradient descent, with momentum if wanted",                                             \
      kMomentum | kDampening | kNesterov | kOnlyMomentum, .weight_decay = 0)                                           \
  ROW(kLion, "lion", "Lion (arXiv 2302.06675); lr is a third to a tenth of adamw's", kBetas,                           \
      .lr = 1e-4, .beta2 = 0.99, .weight_decay = 0)                                                                    \
  ROW(kAdagrad, "adagrad", "Adagrad (JMLR 2011), as PyTorch has it", kEps | kLrDecay,                                  \
      .lr = 1e-2, .eps = 1e-10, .weight_decay = 0)                                                                     \
  ROW(kRmsprop, "rmsprop", "RMSprop, as PyTorch has it", kEps | kMomentum | kAlpha | kCentered,                        \
      .lr = 1e-2, .weight_decay = 0)                                                                                   \
  ROW(kMuon, "muon", "Muon (Jordan et al., 2024) for matrices but those of embeddings, adamw for all else",            \
      kBetas | kEps | kMatrices, .weight_decay = 0.1)                                                                  \
  ROW(kLamb, "lamb", "LAMB (arXiv 1904.00962): adamw, with steps as long as each tensor's weights say",                \
      kBetas | kEps | kLayers, .eps = 1e-6)                                                                            \
  ROW(kLars, "lars", "LARS (arXiv 1708.03888): sgd, with steps as long as each tensor's weights say",                  \
      kEps | kMomentum | kNesterov | kTrustCoefficient | kOnlyMomentum | kLayers | kGradientNorms,                     \
      .lr = 1.0, .weight_decay = 0)                                                                                    \
  ROW(kAdafactor, "adafactor",                                                                                         \
      "Adafactor (arXiv 1804.04235), as PyTorch has it; lr is an upper limit of relative steps",                       \
      kTensors | kTensorStates, .lr = 1e-2, .weight_decay = 0)                                                         \
  ROW(kOwn, "own", "a rule of the program's, which it gives the Engine (tessera/elementwise_optimizer.h)",             \
      kOwnElements)                                                                                                    \
  ROW(kOwnMatrix, "own_matrix",                                                                                        \
      "a rule of the program's for matrices but those of embeddings (tessera/matrix_optimizer.h), adamw for all else", \
      kBetas | kEps | kMatrices | kTensorStates)
// clang-format on

#define TESSERA_ENUMERATOR(enumerator, ...) enumerator,
/// The update rule. docs/guide/optimizers.md describes each rule.
enum class OptimizerType { TESSERA_OPTIMIZER_TYPES(TESSERA_ENUMERATOR) };
#undef TESSERA_ENUMERATOR

}  // namespace tessera
