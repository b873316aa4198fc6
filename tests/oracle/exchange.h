#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace tessera::oracle {

/// Tensors and their names, in order.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Writes tensors so that exchange.py can read them. The folder gets a file of raw little-endian elements, row-major,
/// for each tensor. It also gets `index.json`, a list of {"name": ..., "dtype": "float32" or "int64", "shape": [...],
/// "file": "0.bin"}. The folder is made if it does not exist. Floating types other than fp32 are refused, so that
/// writing rounds no value.
absl::Status write_tensors(const std::filesystem::path& folder, const NamedTensors& tensors);

/// Reads tensors that write_tensors or exchange.py wrote.
absl::StatusOr<NamedTensors> read_tensors(const std::filesystem::path& folder);

}  // namespace tessera::oracle
