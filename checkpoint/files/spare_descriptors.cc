#include "checkpoint/files/spare_descriptors.h"

#include <sys/eventfd.h>

#include <cerrno>

namespace tessera {

int SpareDescriptors::take() {
  for (OwnedFd& descriptor : descriptors_) {
    if (descriptor.is_open()) continue;
    descriptor = OwnedFd(::eventfd(0, EFD_CLOEXEC));  // it stands for no file
    if (!descriptor.is_open()) return -errno;
  }
  return 0;
}

void SpareDescriptors::give_back() {
  for (OwnedFd& descriptor : descriptors_) descriptor.reset();
}

}  // namespace tessera
