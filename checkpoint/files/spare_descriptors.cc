#include "checkpoint/files/spare_descriptors.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace tessera {

int SpareDescriptors::take() {
  for (int& descriptor : descriptors_) {
    if (descriptor >= 0) continue;
    descriptor = ::eventfd(0, EFD_CLOEXEC);  // it stands for no file
    if (descriptor < 0) return -errno;
  }
  return 0;
}

void SpareDescriptors::give_back() {
  for (int& descriptor : descriptors_) {
    if (descriptor >= 0) ::close(std::exchange(descriptor, -1));
  }
}

}  // namespace tessera
