#include "engine/job/processor.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/util/StringUtil.h>

#include <cstdlib>
#include <string_view>
#include <vector>

#include "optim/arithmetic/instruction_set.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"

namespace tessera {
namespace {

constexpr const char* kProcessorPart = "processor";  // the name of the part of a commit

SavedProcessor this_processor(const Accelerator& accelerator) {
  SavedProcessor processor{
      .libtorch = at::get_cpu_capability(), .tessera = std::string(name_of(best_instruction_set())), .gpu = {}};
  if (accelerator.device.is_queued)
    processor.gpu = accelerator.name.empty() ? "GPU" : accelerator.name;
  else
    processor.threads = at::get_num_threads();
  return processor;
}

/// Returns a text that names the differences, such as "threads 2, rank 0 has 1". `whose` is the owner of `other`. The
/// result is empty if nothing differs.
std::string differences_between(const SavedProcessor& own, const SavedProcessor& other, const std::string& whose) {
  std::string text;
  const auto compare = [&](const char* what, const std::string& here, const std::string& there) {
    if (here == there) return;
    text += c10::str(text.empty() ? "" : "; ", what, " ", here, ", ", whose, " has ", there);
  };
  const auto device = [](const SavedProcessor& processor) { return processor.gpu.empty() ? "CPU" : processor.gpu; };
  compare("device", device(own), device(other));
  if (own.gpu.empty() == other.gpu.empty())
    compare("threads", std::to_string(own.threads), std::to_string(other.threads));
  compare("LibTorch's instruction set", own.libtorch, other.libtorch);
  compare("Tessera's instruction set", own.tessera, other.tessera);
  return text;
}

bool other_processor_is_allowed() {
  const char* const allowed = std::getenv("TESSERA_ALLOW_OTHER_PROCESSOR");
  return allowed && std::string_view(allowed) == "1";
}

}  // namespace

std::optional<SavedProcessor> processor_to_save(const Job& job) {
  if (!job.strategy.reproducible) return std::nullopt;
  return this_processor(job.accelerator);
}

void expect_same_processor(const Job& job) {
  Collectives& control = *job.axes.control;
  const std::optional<SavedProcessor> own = processor_to_save(job);
  if (!own || control.size() == 1) return;
  const std::vector<std::string> ranks = value_or_throw(gather_strings(control, "processors", to_json(*own)));
  const SavedProcessor first = read_processor(ranks[0]);
  std::string text;
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const std::string differs = differences_between(read_processor(ranks[rank]), first, "rank 0");
    if (!differs.empty()) text += c10::str(" rank ", rank, ": ", differs, ".");
  }
  if (text.empty()) return;
  throw Error(ExitCode::kConfig,
              "/reproducible: ranks compute with different processors, so a microbatch has other bits on each:" + text +
                  " [T1083] hint: set one OMP_NUM_THREADS for all ranks, and take hosts with the same instructions; "
                  "ATEN_CPU_CAPABILITY chooses fewer of them for LibTorch");
}

absl::StatusOr<std::optional<std::string>> other_processor(const std::optional<SavedProcessor>& saved, const Job& job,
                                                           const std::string& from) {
  const std::optional<SavedProcessor> own = processor_to_save(job);
  if (!own) return std::nullopt;
  if (!saved) {
    if (job.mesh.rank() == 0)
      log_info(from +
               " does not say with how many threads and with which instruction set its run computed, so nobody knows "
               "whether the bits go on");
    return std::nullopt;
  }
  const std::string differs = differences_between(*own, *saved, "the run before");
  if (differs.empty()) return std::nullopt;
  const std::string text = "this run computes with another processor: " + differs;
  if (other_processor_is_allowed()) return text + ". Its bits are others from here on";
  return make_error(
      ExitCode::kConfig,
      from + ": /reproducible: " + text +
          ". [T1084] hint: set OMP_NUM_THREADS to the threads of the run before, and take a processor with its "
          "instructions, of which ATEN_CPU_CAPABILITY chooses fewer for LibTorch; or go on with other "
          "bits by --allow-other-processor, in a program by TESSERA_ALLOW_OTHER_PROCESSOR=1");
}

void add_processor(const Job& job, CommitParts& parts) {
  if (const auto processor = processor_to_save(job)) parts[kProcessorPart] = to_json(*processor);
}

std::optional<SavedProcessor> processor_in(const CommitParts& parts) {
  const auto part = parts.find(kProcessorPart);
  if (part == parts.end()) return std::nullopt;
  return read_processor(part->second);
}

}  // namespace tessera
