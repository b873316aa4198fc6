#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <variant>

namespace tessera {

// Methods of compression (CompressionConfig::method), each with its numbers. They sum gradients, and most send only a
// part of them. If a method keeps gradients, the part that a rank did not send is added to its next contribution (error
// feedback).

/// "none": all gradients are sent, in the forms of CompressionConfig::gradients and sums.
struct NoMethodConfig {
  /// Whether a rank keeps the part of its gradients that it did not send, and adds this part to its next contribution.
  /// Each method has this constant.
  static constexpr bool kKeepsGradients = false;
};

/// "power_sgd": gradients of matrices are sent as two factors, if the factors are smaller than the matrix (PowerSGD,
/// arXiv 1905.13727).
struct PowerSgdConfig {
  static constexpr bool kKeepsGradients = true;
  std::int64_t rank = 4;  ///< number of columns of each factor
};

/// "top_k": a rank sends the gradients of largest magnitude.
struct TopKConfig {
  static constexpr bool kKeepsGradients = true;
  double fraction = 0.01;  ///< fraction of each unit's gradients that is sent
  /// above 0: the rank sends momentum with this factor instead of gradients (arXiv 1712.01887)
  double momentum = 0;
};

/// "random_k": ranks send the gradients of some random elements. The elements change from step to step and are the same
/// on all ranks.
struct RandomKConfig {
  static constexpr bool kKeepsGradients = true;
  double fraction = 0.01;  ///< fraction of each unit's gradients that is sent
  std::int64_t seed = 0;   ///< seed of the random numbers
};

/// "sign_majority": ranks vote about each sign (signSGD with majority vote, arXiv 1810.05291).
struct SignMajorityConfig {
  static constexpr bool kKeepsGradients = false;
};

/// "sign_feedback": signs are sent, with the mean magnitude of neighbouring gradients (EF-signSGD, arXiv 1901.09847).
struct SignFeedbackConfig {
  static constexpr bool kKeepsGradients = true;
};

/// "one_bit": contributions and sums are both sent as one bit for each element, both with error feedback (arXiv
/// 2102.02888).
struct OneBitConfig {
  static constexpr bool kKeepsGradients = true;
  double momentum = 0;  ///< above 0: ranks send momentum with this factor instead of gradients, as 1-bit Adam does
};

/// "qsgd": a rank sends the norm of each 256 neighbouring gradients, and for each gradient its sign and a level. The
/// level is the gradient's fraction of the norm, rounded stochastically (QSGD, arXiv 1610.02132).
struct QsgdConfig {
  static constexpr bool kKeepsGradients = false;
  std::int64_t levels = 7;  ///< number of levels
  std::int64_t seed = 0;    ///< seed of the random numbers
};

/// "terngrad": gradients are sent as -1, 0 or 1 times the largest magnitude of their neighbours, rounded stochastically
/// (TernGrad, arXiv 1705.07878).
struct TernGradConfig {
  static constexpr bool kKeepsGradients = false;
  std::int64_t seed = 0;  ///< seed of the random numbers
};

/// "hook": a CommHook of the program makes the sums (tessera/comm_hook.h).
struct CommHookConfig {
  static constexpr bool kKeepsGradients = false;
};

// clang-format off
/// The types of compression.method except "none", with a row for each: ROW(struct, word, text, cost, keys...). A new
/// row must be the last one, since commits of durable runs hold the index of a type. The library uses these rows to
/// make CompressionMethod, the words and keys that a strategy file may use, and the texts about them in
/// docs/strategy.md. A key is TESSERA_METHOD_KEY(struct, member, ...) with fields of StrategyKey
/// (runtime/config/strategy_table.h). `not_exact` is a function of runtime/config/keys/compression_keys.cc, which reads
/// the rows. Each method has a file in sharding/compress, with its memory, its messages and the method itself.
#define TESSERA_COMPRESSION_METHODS(ROW)                                                                               \
  ROW(PowerSgdConfig, "power_sgd",                                                                                     \
      "The gradient of a matrix goes as two factors (PowerSGD, arXiv 1905.13727), where those are shorter than it; "   \
      "all else goes as it is. What is not sent is kept.",                                                             \
      not_exact("4 bytes for each element of a matrix, and the factors."),                                             \
      TESSERA_METHOD_KEY(PowerSgdConfig, rank, .range = {1, 1024}, .default_json = "4", .example_json = "2",           \
          .doc = "The rank of the factors.",                                                                           \
          .cost = "As many more bytes."))                                                                              \
  ROW(TopKConfig, "top_k",                                                                                             \
      "A rank sends the gradients of largest magnitude, with their places. What is not sent is kept.",                 \
      not_exact("4 bytes for each gradient, and 8 for each that a rank sends and for each that it gets."),             \
      TESSERA_METHOD_KEY(TopKConfig, fraction, .range = {0, 1, true}, .default_json = "0.01", .example_json = "0.1",   \
          .doc = "The share of the gradients of each flat group of a unit that is sent.",                              \
          .cost = "As many more bytes."),                                                                              \
      TESSERA_METHOD_KEY(TopKConfig, momentum, .range = {0, 1, false, true}, .default_json = "0.0",                    \
          .example_json = "0.9",                                                                                       \
          .doc = "Above 0: what a rank keeps and sends is the momentum of its own gradients (momentum correction and " \
                 "momentum factor masking of Deep Gradient Compression, arXiv 1712.01887), which this multiplies "     \
                 "each step. It stands in for the optimizer's momentum: take sgd with momentum 0, whose steps are "    \
                 "then those of momentum SGD. An optimizer with momentum of its own applies both: sgd's steps get 1 "  \
                 "/ (1 - this) times as long, so its lr has to be that much smaller; Adam and its kin divide that "    \
                 "out again, but their first moment is smoothed twice, and so later by about 1 / (1 - this) steps.",   \
          .cost = "Memory: 4 bytes more for each gradient."))                                                          \
  ROW(RandomKConfig, "random_k",                                                                                       \
      "Ranks send some gradients, others each time, drawn from seed, the same on all ranks; so their places do not "   \
      "travel. What is not sent is kept.",                                                                             \
      "Gradients are not exact: an element waits for 1 / fraction steps in the mean, whatever it is. Memory: 4 bytes " \
      "for each gradient, and 8 for each that a rank sends.",                                                          \
      TESSERA_METHOD_KEY(RandomKConfig, fraction, .range = {0, 1, true}, .default_json = "0.01",                       \
          .example_json = "0.1",                                                                                       \
          .doc = "The share of the gradients of each flat group of a unit that is sent.",                              \
          .cost = "As many more bytes."),                                                                              \
      TESSERA_METHOD_KEY(RandomKConfig, seed, .range = {0, kMany}, .default_json = "0", .example_json = "1",           \
          .doc = "What is drawn depends on it, the unit and the step.",                                                \
          .cost = "None."))                                                                                            \
  ROW(SignMajorityConfig, "sign_majority",                                                                             \
      "Ranks send the signs of gradients and vote (signSGD with majority vote, arXiv 1810.05291): the mean gradient "  \
      "is 1 or -1, as most ranks have it; zeros vote, and ties end, + and - by turns.",                                \
      "Gradients lose all magnitudes: lr is the size of a step of sgd, and gradient_clipping sees a norm that "        \
      "depends on the number of parameters alone.")                                                                    \
  ROW(SignFeedbackConfig, "sign_feedback",                                                                             \
      "Ranks send the signs of gradients, and of each 256 neighbours the mean magnitude (EF-signSGD, arXiv "           \
      "1901.09847). What is not sent is kept.",                                                                        \
      not_exact("4 bytes for each gradient."))                                                                         \
  ROW(OneBitConfig, "one_bit",                                                                                         \
      "Ranks send one bit a gradient and a scale for each 256, and get sums in the same form. That is the "            \
      "compression of 1-bit Adam (arXiv 2102.02888), which this is with momentum, start_step and "                     \
      "optimizer.freeze_step; by itself it is one of gradients, of which the optimizer moves all its moments. What "   \
      "is not sent is kept.",                                                                                          \
      not_exact("4 bytes for each gradient, and for each whose sum a rank makes."),                                    \
      TESSERA_METHOD_KEY(OneBitConfig, momentum, .range = {0, 0.999}, .default_json = "0.0", .example_json = "0.9",    \
          .doc = "Above 0: what ranks send is momentum, which this multiplies each step, as 1-bit Adam does; the "     \
                 "optimizer gets the gradients that move its own momentum in the same way. Give it the optimizer's: "  \
                 "betas[0] of adamw, with freeze_step and start_step alike.",                                          \
          .cost = "Memory: 4 bytes more for each gradient. A single gradient is wrong by up to 1 / (1 - this) times "  \
                  "as much. The optimizer's momentum takes that back, but gradient_clipping sees it. Parameters that " \
                  "have had fewer than freeze_step updates when it begins make second moments of such gradients."))    \
  ROW(QsgdConfig, "qsgd",                                                                                              \
      "Ranks send gradients as levels of the norm of 256 neighbours, with their signs, rounded stochastically (QSGD, " \
      "arXiv 1610.02132): the mean of what is sent is the gradient, and nothing is kept.",                             \
      "Gradients are noisy.",                                                                                          \
      TESSERA_METHOD_KEY(QsgdConfig, levels, .range = {1, 127}, .default_json = "7", .example_json = "1",              \
          .doc = "How many levels there are. A gradient takes 2 bits (1 level), 4 (up to 7) or 8.",                    \
          .cost = "More bytes, and less noise."),                                                                      \
      TESSERA_METHOD_KEY(QsgdConfig, seed, .range = {0, kMany}, .default_json = "0", .example_json = "1",              \
          .doc = "What is drawn depends on it, the unit and the step, and on the rank.",                               \
          .cost = "None."))                                                                                            \
  ROW(TernGradConfig, "terngrad",                                                                                      \
      "Ranks send gradients as -1, 0 or 1 times the largest magnitude of 256 neighbours, rounded stochastically "      \
      "(TernGrad, arXiv 1705.07878), in 2 bits each; nothing is kept.",                                                \
      "Gradients are noisy.",                                                                                          \
      TESSERA_METHOD_KEY(TernGradConfig, seed, .range = {0, kMany}, .default_json = "0", .example_json = "1",          \
          .doc = "What is drawn depends on it, the unit and the step, and on the rank.",                               \
          .cost = "None."))                                                                                            \
  ROW(CommHookConfig, "hook",                                                                                          \
      "A rule of the program's own sums gradients over ranks (tessera/comm_hook.h), between ranks of one host too. "   \
      "What it keeps from step to step, no checkpoint has.",                                                           \
      "It costs what the rule does.")
// clang-format on

#define TESSERA_ALTERNATIVE(Config, ...) , Config
/// Ways to sum gradients over a network.
using CompressionMethod = std::variant<NoMethodConfig TESSERA_COMPRESSION_METHODS(TESSERA_ALTERNATIVE)>;
#undef TESSERA_ALTERNATIVE

}  // namespace tessera
