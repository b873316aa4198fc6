#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace tessera {

/// A storage whose memory may be away: while it is, whoever asks for its data pointer gets a c10::Error with a text of
/// ours. LibTorch can make a storage refuse access for good; these two lines let it be allowed again.
///
/// Sets the text. Takes from the heap, so it is called once, not at every release.
void set_refusal(c10::StorageImpl& storage, const std::string& text);
/// REQUIRES of `refused`: set_refusal was called.
void refuse_access(c10::StorageImpl& storage, bool refused);

}  // namespace tessera
