#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "runtime/base/text.h"
#include "workshop/app/doctor/doctor_probes.h"

namespace tessera::app {
namespace {

namespace fs = std::filesystem;

/// Returns the link of a device's first port: "RoCE" if the kernel names it "Ethernet", or else the kernel's name, such
/// as "InfiniBand". The text is empty if the kernel names no link (EFA).
std::string link_of(const fs::path& device) {
  std::ifstream file(device / "ports" / "1" / "link_layer");
  std::string word;
  file >> word;
  return word == "Ethernet" ? "RoCE" : word;
}

/// Returns texts such as "mlx5_0 (InfiniBand)", sorted by name.
std::vector<std::string> devices_in(const std::string& folder) {
  std::vector<std::string> devices;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string link = link_of(at->path());
    devices.push_back(at->path().filename().string() + (link.empty() ? "" : " (" + link + ")"));
  }
  std::ranges::sort(devices);
  return devices;
}

/// Returns the first of `libraries` that the loader finds, or an empty text if it finds none.
std::string first_of(const std::vector<std::string>& libraries, const RdmaPlaces& places) {
  const auto found = std::ranges::find_if(libraries, places.loads);
  return found == libraries.end() ? "" : *found;
}

/// Returns NCCL's net plug-in, if the loader finds one of the names under which NCCL looks for it.
std::string net_plugin(const RdmaPlaces& places) {
  if (places.net_plugin == "none") return "";
  if (places.net_plugin.empty()) return first_of({"libnccl-net.so"}, places);
  return first_of({places.net_plugin, "libnccl-net-" + places.net_plugin + ".so"}, places);
}

/// Returns the libraries that can use devices for RDMA, each with the name of the interface through which it reaches
/// them.
std::vector<std::string> users_of(const RdmaPlaces& places) {
  std::vector<std::string> users;
  const std::string plugin = net_plugin(places);
  if (!first_of({"libnccl.so.2"}, places).empty()) {
    const std::string way = plugin.empty() ? first_of({"libibverbs.so.1", "libibverbs.so"}, places) : plugin;
    if (!way.empty()) users.push_back("NCCL by " + way);
  }
  const std::string mpi = first_of({"libmpi.so.40", "libmpi.so.12", "libmpi.so"}, places);  // Open MPI, MPICH, others
  const std::string way = mpi.empty() ? "" : first_of({"libucp.so.0", "libfabric.so.1"}, places);
  if (!way.empty()) users.push_back("MPI (" + mpi + ") by " + way);
  return users;
}

bool loader_finds(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle) dlclose(handle);
  return handle != nullptr;
}

}  // namespace

RdmaPlaces RdmaPlaces::of_this_machine() {
  const char* const plugin = std::getenv("NCCL_NET_PLUGIN");
  return {"/sys/class/infiniband", &loader_finds, plugin ? plugin : ""};
}

Finding probe_rdma(const RdmaPlaces& places) {
  const std::string name = "RDMA between hosts";
  const std::vector<std::string> devices = devices_in(places.devices);
  if (devices.empty()) {
    const std::string plugin = net_plugin(places);
    const std::string beside = plugin.empty() ? "" : "; NCCL has a net plug-in, " + plugin + ", for devices of its own";
    return {name, Health::kWarn, "none found: no device in " + places.devices + beside,
            "hosts talk over TCP; a network card for RDMA shows in that folder once its driver is loaded (rdma-core), "
            "and in a container where its devices are passed on (--device /dev/infiniband)"};
  }
  const std::vector<std::string> users = users_of(places);
  if (users.empty()) {
    return {name, Health::kWarn, joined(devices) + ", but neither NCCL nor an MPI can use it",
            "NCCL takes libibverbs (libibverbs1 of rdma-core) or a net plug-in, an MPI takes UCX or libfabric"};
  }
  return {name, Health::kOk, joined(devices) + ": " + joined(users), ""};
}

}  // namespace tessera::app
