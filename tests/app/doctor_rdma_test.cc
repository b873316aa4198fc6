// Tests the report of `tessera doctor` about RDMA. A folder of devices and a list of libraries replace the devices and
// the libraries of a machine.

#include <gmock/gmock.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/support/test_folder.h"
#include "workshop/app/doctor/doctor_probes.h"

namespace tessera::app {
namespace {

using ::testing::HasSubstr;

using Libraries = std::set<std::string>;

class Rdma : public ::testing::Test {
 protected:
  void add_device(const std::string& name, const std::string& link) {
    if (link.empty()) std::filesystem::create_directory(folder_ / name);
    if (!link.empty()) folder_.write(name + "/ports/1/link_layer", link + "\n");
  }

  std::string path() const { return folder_.path().string(); }

  Finding probe(const Libraries& libraries, const std::string& net_plugin = "") const {
    return probe_rdma({path(), [=](const std::string& library) { return libraries.contains(library); }, net_plugin});
  }

  TestFolder folder_;
};

TEST_F(Rdma, MissingDeviceIsReportedAsNoneFound) {
  for (const Libraries& libraries :
       std::vector<Libraries>{{}, {"libnccl.so.2", "libibverbs.so.1", "libmpi.so.40", "libucp.so.0"}}) {
    const Finding finding = probe(libraries);
    EXPECT_EQ(finding.health, Health::kWarn);
    EXPECT_EQ(finding.found, "none found: no device in " + path());
    EXPECT_THAT(finding.fix, HasSubstr("TCP"));
  }
}

TEST_F(Rdma, MissingFolderIsReportedAsNoneFound) {
  EXPECT_THAT(probe_rdma({path() + "/none", [](const std::string&) { return true; }, "none"}).found,
              HasSubstr("none found: no device in " + path() + "/none"));
}

TEST_F(Rdma, PluginWithoutADeviceIsReported) {
  EXPECT_THAT(probe({"libnccl.so.2", "libnccl-net.so"}).found, HasSubstr("NCCL has a net plug-in, libnccl-net.so"));
}

TEST_F(Rdma, DevicesAreReportedWithTheirUsers) {
  add_device("mlx5_1", "Ethernet");
  add_device("mlx5_0", "InfiniBand");
  const Finding finding = probe({"libnccl.so.2", "libibverbs.so.1", "libmpi.so.40", "libucp.so.0"});
  EXPECT_EQ(finding.health, Health::kOk);
  EXPECT_EQ(finding.found,
            "mlx5_0 (InfiniBand), mlx5_1 (RoCE): NCCL by libibverbs.so.1, MPI (libmpi.so.40) by libucp.so.0");
}

TEST_F(Rdma, PluginNamedInTheEnvironmentIsUsedByNccl) {
  add_device("efa_0", "");
  EXPECT_EQ(probe({"libnccl.so.2", "libnccl-net-ofi.so", "libibverbs.so.1"}, "ofi").found,
            "efa_0: NCCL by libnccl-net-ofi.so");
  EXPECT_EQ(probe({"libnccl.so.2", "libnccl-net.so", "libibverbs.so.1"}, "none").found,
            "efa_0: NCCL by libibverbs.so.1");
}

TEST_F(Rdma, UnusableDevicesAreAWarning) {
  add_device("mlx5_0", "InfiniBand");
  for (const Libraries& libraries :
       std::vector<Libraries>{{"libibverbs.so.1"}, {"libnccl.so.2"}, {"libmpi.so.40"}, {"libucp.so.0"}}) {
    const Finding finding = probe(libraries);
    EXPECT_EQ(finding.health, Health::kWarn);
    EXPECT_EQ(finding.found, "mlx5_0 (InfiniBand), but neither NCCL nor an MPI can use it");
    EXPECT_THAT(finding.fix, HasSubstr("libibverbs"));
  }
}

}  // namespace
}  // namespace tessera::app
