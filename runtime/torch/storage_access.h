#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace tessera {

/// Makes a storage's memory inaccessible for a while: code that then asks for its data pointer gets a c10::Error with
/// Tessera's text. LibTorch can make a storage refuse access for good; these two functions can allow it again.
///
/// Sets the text of the error for a refused access. It allocates memory, so call it once, and not at every release.
void set_refusal(c10::StorageImpl& storage, const std::string& text);
/// Refuses or allows access. REQUIRES for `refused`: set_refusal was called.
void refuse_access(c10::StorageImpl& storage, bool refused);

}  // namespace tessera
