#include "runtime/comm/collectives.h"

#include "runtime/base/status.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<CommBuffer>> Collectives::allocate_common(std::size_t) {
  return make_error(ExitCode::kUnavailable, "ranks joined by " + transport() +
                                                " cannot share memory; common memory is for the ranks of one host. "
                                                "[T0449] hint: take comm.transport \"host\", which joins those");
}

}  // namespace tessera
