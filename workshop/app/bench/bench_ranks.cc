#include "workshop/app/bench/bench_ranks.h"

#include "runtime/border/throw.h"
#include "runtime/comm/resolve_topology.h"
#include "runtime/config/transport_rows.h"
#include "tessera/init.h"
#include "workshop/app/output_files.h"
#include "workshop/launch/launcher.h"

namespace tessera::app {
namespace {

Existing existing_of(const BenchCommand& command) { return command.overwrite ? Existing::kReplaced : Existing::kKept; }

}  // namespace

bool starts_ranks(const BenchCommand& command) {
  const auto topology = resolve_topology();
  return topology.ok() && topology->launcher == "single" && command.ranks > 1;
}

int launch_ranks(const std::string& section, const BenchCommand& command) {
  LaunchOptions launching;
  launching.ranks = command.ranks;
  launching.prefix = false;
  launching.command = {"/proc/self/exe", "bench", section};
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) launching.command.insert(launching.command.end(), {option, value});
  };
  if (command.fit) launching.command.push_back("--fit");
  if (command.quick) launching.command.push_back("--quick");
  if (command.overwrite) launching.command.push_back("--overwrite");
  add("--fit-file", command.fit_file);
  add("--dir", command.directory);
  add("--json", command.json);
  add("--csv", command.csv);
  add("--cifar10", command.cifar10);
  add("--transport", command.transport);
  if (section == "overlap") {
    add("--compute", std::to_string(command.compute_s));
    add("--units", std::to_string(command.units));
  }
  return launch(launching);
}

Mesh join_ranks(const BenchCommand& command) {
  CommConfig comm;
  comm.transport = transport_named(command.transport);
  return init(comm);
}

void check_outputs(const BenchCommand& command) {
  throw_if_error(check_outputs({{"--json", command.json}, {"--csv", command.csv}, {"--fit-file", command.fit_file}},
                               {{"--cifar10", command.cifar10}}, existing_of(command)));
}

void write_text(const std::string& text, const std::string& path, const BenchCommand& command) {
  if (!path.empty()) throw_if_error(write_output(path, text, existing_of(command), "bench"));
}

}  // namespace tessera::app
