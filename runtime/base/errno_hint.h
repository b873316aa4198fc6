#pragma once

#include <string>

namespace tessera {

/// What a user does about a file that could not be opened or read, behind reason_of (runtime/base/process_limits.h): ". hint: ...". Empty
/// where reason_of gives the remedy, that of a limit, and where nobody can say more than the system. `error` is an errno.
std::string hint_of_reading(int error);

/// The same of a file or folder that could not be made or written.
std::string hint_of_writing(int error);

}  // namespace tessera
