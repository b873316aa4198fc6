#include <pthread.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "engine/asynchronous/servers/parameter_server.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/status.h"
#include "workshop/app/commands.h"

namespace tessera::app {

// `tessera serve` is a parameter server. It runs until a signal ends it. `tessera launch --servers` starts such
// servers.

int run_serve(const ServeCommand& command) {
  take_process_limits();
  sigset_t ends;
  sigemptyset(&ends);
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&ends, signal);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);  // before threads start, since they inherit this mask
  const char* const secret = std::getenv("TESSERA_SERVERS_SECRET");
  std::optional<KeepOptions> keep;
  if (!command.state.empty()) keep = KeepOptions{command.state, command.lose};
  auto server = ParameterServer::start(command.listen, secret == nullptr ? "" : secret, keep, command.offload);
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", message_of(server.status()).c_str());
    return static_cast<int>(exit_code_of(server.status()));
  }
  std::printf("parameter server at %s\n", (*server)->address().c_str());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&ends, &signal);
  const timespec pause{0, 50'000'000};
  // After SIGUSR1, the server waits until its workers have finished. Another signal ends the server at once.
  while (signal == SIGUSR1 && !(*server)->may_end() && sigtimedwait(&ends, nullptr, &pause) < 0) {
  }
  server->reset();  // saves the shards that were not saved yet
  return 0;
}

}  // namespace tessera::app
