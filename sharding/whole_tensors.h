#pragma once

// See docs/glossary.md: unit.

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// Tensors by name, in order.
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

/// The parameters that UnitsConfig::ignored leaves to the program, by first name, each once. A tied one is left out of
/// units under all of its names if one of them fits. Throws tessera::Error (78) for a pattern that fits no parameter.
NamedTensors ignored_parameters(const torch::nn::Module& module, const UnitsConfig& units);

/// Returns the tensors that every rank has whole: the module's buffers that are defined, and behind them the ignored
/// parameters.
NamedTensors whole_tensors(const torch::nn::Module& module, const UnitsConfig& units);

}  // namespace tessera
