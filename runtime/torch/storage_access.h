#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace tessera {

/// Makes a storage's memory inaccessible for a while: code that then asks for its data pointer gets a c10::Error with
/// Tessera's text. LibTorch itself can only make a storage refuse access permanently; these two functions can allow
/// access again.
///
/// Sets the text of the error for a refused access. The function allocates memory, so call it once for each storage,
/// and not at every release.
void set_refusal(c10::StorageImpl& storage, const std::string& text);
/// Refuses or allows access. REQUIRES for `refused`: set_refusal was called.
void refuse_access(c10::StorageImpl& storage, bool refused);

}  // namespace tessera
