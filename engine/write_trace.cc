#include <fstream>
#include <vector>

#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/trace.h"

namespace tessera {
namespace {

std::string name_event(int rank) {
  const std::string number = std::to_string(rank);
  return R"({"name":"process_name","ph":"M","pid":)" + number + R"(,"args":{"name":"rank )" + number + "\"}}";
}

bool write_file(const std::string& path, const std::vector<std::string>& texts) {
  std::ofstream file(path, std::ios::trunc);
  file << "{\"traceEvents\":[\n";
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    file << (rank ? ",\n" : "") << name_event(static_cast<int>(rank));
    if (!texts[rank].empty()) file << ",\n" << texts[rank];
  }
  file << "\n]}\n";
  return static_cast<bool>(file.flush());
}

}  // namespace

void write_trace(const std::string& path, const Mesh& mesh) {
  Trace::stop();
  const MeshAxes axes = value_or_throw(groups_of(mesh).axes(1, mesh.world_size()));
  Collectives& world = *axes.control;
  const auto texts = value_or_throw(gather_strings(world, "traces", Trace::events_as_json(mesh.rank())));
  char written = 1;
  if (mesh.rank() == 0) written = write_file(path, texts) ? 1 : 0;
  throw_if_error(world.broadcast("trace written", &written, 1, 0).wait());
  if (!written)
    throw Error(ExitCode::kCannotCreate,
                path + ": the trace cannot be written. [T0352] hint: its folder must exist and be writable");
}

}  // namespace tessera
