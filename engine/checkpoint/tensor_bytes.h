#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "tessera/dtype.h"

namespace tessera {

/// safetensors' word for an element type: "F32". Throws tessera::Error (64) naming `who` for types that it does not have.
std::string safetensors_word(c10::ScalarType type, const std::string& who);
std::string safetensors_word(DType dtype);
/// The reverse; nothing for other words.
std::optional<c10::ScalarType> type_of_word(const std::string& word);

/// A copy in host memory, its elements one behind the other.
at::Tensor host_copy(const at::Tensor& tensor);
/// The memory of such a copy.
std::span<std::byte> bytes_of(const at::Tensor& host);

}  // namespace tessera
