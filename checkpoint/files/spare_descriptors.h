#pragma once

#include <array>

#include "runtime/base/process/owned_fd.h"

namespace tessera {

/// Two descriptors of this process that a save takes before it writes anything, and gives back when it commits. The
/// commit opens files and folders, and needs at most two at a time. Other parts of the program may have used up the
/// limit of open files by then. A save without free descriptors thus ends before it writes, and not at its end. The
/// destructor gives them back too. An object belongs to one thread.
class SpareDescriptors {
 public:
  /// Takes the descriptors. Returns 0, or a negative errno: -EMFILE or -ENFILE if a limit is reached.
  int take();
  /// Gives back what `take` has taken. The next files that any thread of the process opens may get it.
  void give_back();

 private:
  std::array<OwnedFd, 2> descriptors_;
};

}  // namespace tessera
