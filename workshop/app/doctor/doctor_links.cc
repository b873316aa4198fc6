#include <cstdio>
#include <string>

#include "runtime/base/bytes.h"
#include "runtime/base/text.h"
#include "runtime/base/text_table.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/config/strategy_names.h"
#include "runtime/config/transport_rows.h"
#include "tessera/init.h"
#include "tessera/run.h"
#include "workshop/app/commands.h"
#include "workshop/app/output_files.h"
#include "workshop/bench/link_speed.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

std::string table_of(const LinkSpeed& speed) {
  TextTable table({left_column("operation"), right_column("a rank sends"), right_column("ms"),
                   right_column("by the fit"), right_column("beside compute")});
  for (const MeasuredOperation& operation : speed.operations) {
    const AlphaBeta fit{operation.fit.alpha_s, operation.fit.beta_s_per_byte};
    for (std::size_t i = 0; i < operation.points.size(); ++i) {
      const TimedBytes& point = operation.points[i];
      const bool has_busy = i < operation.busy_points.size();
      table.add_row({operation.name, format_bytes(point.bytes), number_text(1e3 * point.seconds, "%.3f"),
                     number_text(1e3 * fit.seconds_of(1, point.bytes), "%.3f"),
                     has_busy ? number_text(1e3 * operation.busy_points[i].seconds, "%.3f") : ""});
    }
  }
  return table.to_string();
}

/// Returns a table with two times for each codec of "compression", both for a GB of fp32. One is the time on the wire
/// that the codec saves. The other is the time that the codec takes to encode and decode.
std::string table_of_forms(const LinkSpeed& speed) {
  TextTable table({left_column("compression"), right_column("of fp32's bytes"),
                   right_column("s a GB, written and read"), right_column("s a GB, saved on the wire")});
  for (const CodecSpeed& codec : speed.codecs) {
    table.add_row({name_of(codec.form), number_text(codec.share, "%.3f"),
                   number_text(1e9 * codec.seconds_per_byte, "%.3f"),
                   number_text(1e9 * speed.links.all_gather.beta_s_per_byte * (1 - codec.share), "%.3f")});
  }
  return table.to_string();
}

std::string text_of(const LinkSpeed& speed) {
  const Links& links = speed.links;
  std::string text = links.transport + ", " + std::to_string(links.ranks) + " ranks on " +
                     counted(links.hosts, "host") + "\n" + table_of(speed) + "a message of few bytes takes " +
                     number_text(1e6 * links.small.alpha_s, "%.0f") + " us";
  if (links.reduces_in_background)
    text += "; a GB on the wire takes " + number_text(1e9 * links.cpu_s_per_byte, "%.2f") +
            " s from compute beside it, where cores are busy, and one that is added up " +
            number_text(1e9 * links.sum_s_per_byte, "%.2f") + " s more";
  text += "\n";
  const bool is_network = links.transport.find("gloo") != std::string::npos || links.transport == "mpi";
  return is_network ? text + table_of_forms(speed) : text;
}

}  // namespace

int run_doctor_links(const DoctorCommand& command) {
  return run([&] {
    Strategy strategy;
    strategy.comm.transport = transport_named(command.transport);
    strategy.comm.network_fit = CommConfig::kDirectNetwork;  // plans assume direct calls
    const Mesh mesh = init(strategy);
    if (mesh.world_size() == 1)
      throw Error(ExitCode::kUsage,
                  "doctor: --links measures between ranks, and this is one. [T0014] hint: tessera launch -n 2 -- "
                  "tessera doctor --links " +
                      command.links + ", or start it as training is started, on all hosts");
    if (!mesh.topology().has_equal_hosts())
      throw Error(
          ExitCode::kUsage,
          "doctor: --links measures between hosts with the same number of ranks, and here they differ. [T0987] hint: "
          "start as many ranks on each host");
    const bool speaks = mesh.rank() == 0;
    const Existing existing = command.overwrite ? Existing::kReplaced : Existing::kKept;
    if (speaks) throw_if_error(check_outputs({{"--links", command.links, {}}}, {}, existing));
    const MeshAxes axes = value_or_throw(groups_of(mesh).axes(1, mesh.world_size()));
    const LinkSpeed speed =
        value_or_throw(measure_links(*axes.gather, *axes.reduce, {.hosts = mesh.topology().num_hosts()}));
    if (!speaks) return;
    std::fputs(text_of(speed).c_str(), stdout);
    throw_if_error(write_output(command.links, to_json(speed.links), existing, "doctor"));
  });
}

}  // namespace tessera::app
