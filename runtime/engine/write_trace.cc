#include <algorithm>
#include <fstream>
#include <vector>

#include "tessera/error.h"
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
  const std::string own = Trace::events_as_json(mesh.rank());
  const auto ranks = static_cast<std::size_t>(mesh.world_size());
  const MeshAxes axes = value_or_throw(mesh.axes(1, mesh.world_size()));
  Collectives& world = *axes.world;
  const std::uint64_t bytes = own.size();
  std::vector<std::uint64_t> sizes(ranks);
  throw_if_error(world.all_gather("sizes of traces", &bytes, sizes.data(), sizeof bytes).wait());
  const std::size_t longest = std::max<std::uint64_t>(1, *std::max_element(sizes.begin(), sizes.end()));
  std::string padded = own, all(ranks * longest, '\0');
  padded.resize(longest);
  throw_if_error(world.all_gather("traces", padded.data(), all.data(), longest).wait());

  char written = 1;
  if (mesh.rank() == 0) {
    std::vector<std::string> texts;
    for (std::size_t rank = 0; rank < ranks; ++rank) texts.push_back(all.substr(rank * longest, sizes[rank]));
    written = write_file(path, texts) ? 1 : 0;
  }
  throw_if_error(world.broadcast("trace written", &written, 1, 0).wait());
  if (!written) throw Error(ExitCode::kCannotCreate, path + ": the trace cannot be written");
}

}  // namespace tessera
