#pragma once

// See docs/glossary.md: unit.

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// Tensors by name, in order.
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

/// Returns the parameters that UnitsConfig::ignored leaves to the program, by first name, each once. If one name of a
/// tied parameter fits a pattern, the parameter is left out of units. Throws tessera::Error (78) for a pattern that
/// fits no parameter.
NamedTensors ignored_parameters(const torch::nn::Module& module, const UnitsConfig& units);

/// Returns the tensors that every rank holds whole: first the module's defined buffers, then the ignored parameters.
NamedTensors whole_tensors(const torch::nn::Module& module, const UnitsConfig& units);

}  // namespace tessera
