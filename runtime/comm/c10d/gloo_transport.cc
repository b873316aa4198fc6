#include "runtime/comm/c10d/gloo_transport.h"

#include <algorithm>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>  // this header includes gloo_stubs/
#include <utility>
#include <vector>

#include "runtime/base/errno_hint.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_collectives.h"
#include "runtime/comm/c10d/failure_report.h"
#include "runtime/comm/c10d/strangers.h"
#include "runtime/comm/meet_in_store.h"

namespace tessera {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

/// Finds Gloo's listening sockets, since Gloo has no function that returns them.
class NewListeners {
 public:
  void watch() {
    for (const int socket : listening_sockets()) {
      if (std::find(known_.begin(), known_.end(), socket) != known_.end()) continue;
      known_.push_back(socket);
      watch_for_strangers(socket);
    }
  }

 private:
  std::vector<int> known_ = listening_sockets();
};

c10::intrusive_ptr<c10d::ProcessGroupGloo> connect(const Group& group, const std::string& address,
                                                   const c10::intrusive_ptr<c10d::Store>& store) {
  auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(group.init_timeout_s));
  NewListeners listeners;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                                       : c10d::ProcessGroupGloo::createDeviceForHostname(address));
  listeners.watch();
  // One call of a group runs at a time, so one thread serves it.
  options->threads = 1;
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, group.rank, group.size(), options);
  listeners.watch();
  backend->setTimeout(milliseconds(group.timeout_s));
  return backend;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Collectives>> gloo_collectives(const Group& group, const std::string& address,
                                                              std::shared_ptr<C10dStore> store,
                                                              ChooseAlgorithm choose) {
  turn_pipe_signal_into_error();
  FailureReport report(group, store);
  report.publish_arrival();
  const auto cannot_connect = [&](const std::string& why) {
    return report.explain_arrival(group.self() + ": group " + group.key() + " cannot connect over " + address + ": " +
                                  why + "; GLOO_SOCKET_IFNAME names the network interface to use");
  };
  // Gloo would wait for a rank that never joins, and would not notice that this rank has given up.
  const absl::Status met = meet_in_store(group, "met/gloo", *store);
  if (!met.ok()) return absl::IsDeadlineExceeded(met) ? cannot_connect(kNotAllHaveCome) : met;
  try {
    const auto own_keys = c10::make_intrusive<c10d::PrefixStore>("gloo/" + group.key(), store->c10d_store());
    return c10d_collectives(group, TransportKind::kGloo, connect(group, address, own_keys), std::move(store),
                            std::move(choose));
  } catch (const std::exception& error) {
    const std::string text = text_of_c10_exception(error);
    if (const int limit = limit_in(text))
      return make_error(exit_code_of_errno(limit),
                        group.self() + ": group " + group.key() + " cannot connect: " + reason_of(limit));
    return cannot_connect(text);
  }
}

}  // namespace tessera
