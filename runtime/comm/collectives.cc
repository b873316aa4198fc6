#include "runtime/comm/collectives.h"

#include <algorithm>

#include "runtime/base/status.h"
#include "runtime/comm/call.h"
#include "runtime/config/transport_rows.h"

namespace tessera {

TransportKind kind_of(TransportChoice choice) {
  switch (choice) {
#define TESSERA_CASE(enumerator, ...) \
  case TransportChoice::enumerator:   \
    return TransportKind::enumerator;
    TESSERA_TRANSPORTS(TESSERA_CASE)
#undef TESSERA_CASE
    case TransportChoice::kAuto:
      break;
  }
  return TransportKind::kOwn;
}

bool is_of_gpus(TransportKind kind) {
  return std::ranges::any_of(transport_rows(), [kind](const TransportRow& row) {
    return kind_of(row.choice) == kind && (row.traits & transport_traits::kOnGpu) != 0;
  });
}

Operation ReduceCall::operation() const { return scatters ? Operation::kReduceScatter : Operation::kAllReduce; }

absl::StatusOr<std::unique_ptr<CommBuffer>> Collectives::allocate_common(std::size_t) {
  return make_error(ExitCode::kUnavailable, "ranks joined by " + transport() +
                                                " cannot share memory; common memory is for the ranks of one host. "
                                                "[T0449] hint: take comm.transport \"host\", which joins those");
}

}  // namespace tessera
