#pragma once

#include <atomic>
#include <ostream>
#include <string>

namespace tessera {

/// A phrase of an error text, such as the name of a call, for programs in C++ and for programs in Python. Every error
/// that tells its reader to make a call takes the name from here (tests/layers/check_phrases.py), so an error in a
/// Python program never names a C++ call.
struct Phrase {
  const char* in_cpp;
  const char* in_python;
};

/// Whether the program is written in Python. The Python package sets it once, when the package is imported.
inline std::atomic<bool> speaks_python = false;

/// Returns the phrase in the language of the program.
inline std::string say(const Phrase& phrase) { return speaks_python ? phrase.in_python : phrase.in_cpp; }
/// Writes a phrase without allocating. Use it for texts that are only put together when they are needed; `say`
/// allocates immediately.
inline std::ostream& operator<<(std::ostream& stream, const Phrase& phrase) {
  return stream << (speaks_python ? phrase.in_python : phrase.in_cpp);
}

/// The phrases of the error texts. Most of them name a call.
namespace phrases {

inline constexpr Phrase kGuard = {"tessera::Gathered(engine)", "engine.gathered()"};
inline constexpr Phrase kWriteGuard = {"tessera::Gathered(engine, tessera::Gathered::kWrite)",
                                       "engine.gathered(write=True)"};
inline constexpr Phrase kAverages = {"EmaWeights or Gathered(kEma)",
                                     "engine.ema_weights() or engine.gathered(ema=True)"};
inline constexpr Phrase kEma = {"EmaWeights", "engine.ema_weights()"};
inline constexpr Phrase kSamples = {"MicrobatchInfo::samples", "samples=..."};
inline constexpr Phrase kEndEngine = {"destroy that Engine first, with engine.reset() before std::make_unique",
                                      "call close() of that Engine first"};
inline constexpr Phrase kInit = {"tessera::init(strategy)", "tessera.init(strategy)"};
inline constexpr Phrase kBackwardOfSeveral = {"tessera::backward(loss, {&a, &b})", "tessera.backward(loss, [a, b])"};
inline constexpr Phrase kBackward = {"tessera::backward", "tessera.backward"};
inline constexpr Phrase kOptimizer = {"a torch::optim optimizer", "a torch.optim optimizer"};
inline constexpr Phrase kMemoryOf = {"data_ptr, accessors, torch::save", "data_ptr, numpy, DLPack, torch.save"};
inline constexpr Phrase kOtherMemory = {"torch::load, Module::to, set_data, share_memory",
                                        "Module.to, .data = ..., share_memory_"};
inline constexpr Phrase kTied = {R"(b->weight = b->register_parameter("weight", a->weight))", "b.weight = a.weight"};
inline constexpr Phrase kGradNorm = {"StepResult::grad_norm", "the grad_norm of step()'s result"};

inline constexpr Phrase kPartialStep = {"step(partial = true)", "step(partial=True)"};
inline constexpr Phrase kTrue = {"true", "True"};
inline constexpr Phrase kNoGrad = {"torch::NoGradGuard", "torch.no_grad()"};
inline constexpr Phrase kBringHook = {"give the Engine a CommHook (tessera/comm_hook.h)",
                                      "give the Engine a tessera.CommHook"};
inline constexpr Phrase kBringElements = {"give the Engine an ElementwiseOptimizer (tessera/elementwise_optimizer.h)",
                                          "give the Engine a tessera.ElementwiseOptimizer"};
inline constexpr Phrase kBringMatrices = {"give the Engine a MatrixOptimizer (tessera/matrix_optimizer.h)",
                                          "give the Engine a tessera.MatrixOptimizer"};
inline constexpr Phrase kPart = {"LoadOptions::part (--weights-part of tessera)", "part=..."};
inline constexpr Phrase kWithout = {"LoadOptions::without (--weights-without of tessera)", "without=[...]"};
inline constexpr Phrase kIgnored = {"LoadOptions::ignored", "ignored=[...]"};

inline constexpr Phrase kDeferred = {"tessera::deferred_init", "tessera.deferred_init()"};
inline constexpr Phrase kInferenceMode = {"c10::InferenceMode", "torch.inference_mode()"};

}  // namespace phrases
}  // namespace tessera
