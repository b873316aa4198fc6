#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "tessera/dtype.h"

namespace tessera {

/// Returns the name that safetensors has for an element type, such as "F32". Throws tessera::Error (64), which names
/// `who`, for types that checkpoints do not have.
std::string safetensors_word(c10::ScalarType type, const std::string& who);
std::string safetensors_word(DType dtype);
/// Returns the element type that safetensors calls `word`, such as "F32"; nothing if no type has this name.
std::optional<c10::ScalarType> type_of_word(const std::string& word);

/// Copies a tensor to host memory; the copy is contiguous.
at::Tensor host_copy(const at::Tensor& tensor);
/// Returns the memory of a tensor that host_copy returned.
std::span<std::byte> bytes_of(const at::Tensor& host);

}  // namespace tessera
