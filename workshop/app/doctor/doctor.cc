#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/text_table.h"
#include "workshop/app/commands.h"
#include "workshop/app/doctor/doctor_probes.h"

namespace tessera::app {
namespace {

const char* word_for(Health health) {
  switch (health) {
    case Health::kOk:
      return "OK";
    case Health::kWarn:
      return "warn";
    case Health::kMissing:
      return "MISSING";
  }
  return "?";
}

}  // namespace

int run_doctor(const DoctorCommand& command) {
  if (!command.links.empty()) return run_doctor_links(command);
  std::vector<Finding> findings = {
      {"Tessera", Health::kOk, TESSERA_VERSION, ""},
      {"LibTorch", Health::kOk, TORCH_VERSION, ""},
      probe_cores(),
      probe_instruction_set(),
      probe_transparent_huge_pages(),
      probe_locked_memory(),
      probe_shared_memory_size(),
      probe_shared_segment(),
      probe_pidfd(),
      probe_loopback(),
      probe_io_uring(),
      probe_cuda_toolkit(),
      probe_cuda_driver(),
      probe_rdma(),
  };
  for (const std::string& directory : command.disks) findings.push_back(probe_disk(directory));
  TextTable table({{"what"}, {""}, {"found"}});
  std::string fixes;
  for (const Finding& finding : findings) {
    table.add_row({finding.name, word_for(finding.health), finding.found});
    if (finding.health != Health::kOk) fixes += "  " + finding.name + ": " + finding.fix + "\n";
  }
  std::fputs(table.to_string().c_str(), stdout);
  if (!fixes.empty()) std::printf("\nhow to mend it\n%s", fixes.c_str());
  const bool missing = std::any_of(findings.begin(), findings.end(),
                                   [](const Finding& finding) { return finding.health == Health::kMissing; });
  return static_cast<int>(missing ? ExitCode::kUnavailable : ExitCode::kOk);
}

}  // namespace tessera::app
