#include "engine/device/pinned_memory.h"

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <stdexcept>

#include "runtime/base/bytes.h"
#include "tessera/error.h"

namespace tessera {

AlignedMemory::Give pinned_memory_of(DeviceKernels& kernels, int rank, const std::string& what,
                                     const std::string& hint) {
  return [&kernels, rank, what, hint](std::size_t bytes) {
    try {
      return kernels.pinned_memory(bytes);
    } catch (const std::runtime_error& error) {
      throw Error(ExitCode::kOsResource,
                  c10::str("rank ", rank, ": wanted ", format_bytes(static_cast<std::int64_t>(bytes)),
                           " of pinned memory of the host for ", what, ": ", error.what(), ". ", hint));
    }
  };
}

}  // namespace tessera
