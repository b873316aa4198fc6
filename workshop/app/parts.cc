#include "workshop/app/parts.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "tessera/exit_code.h"

namespace tessera::app {
namespace {

constexpr Part kParts[] = {
    {"train", "tessera-train", "train a model; one process a rank"},
    {"replay", "tessera-train",
     "make a step of a reproducible run again, on any number of ranks, and find what went wrong"},
    {"serve", "tessera-train",
     "own parameters for ranks that train without waiting (\"sync\": {\"owners\": \"servers\"})"},
    {"sample", "tessera-train", "continue a text with saved weights"},
    {"tokenize", "tessera-train", "turn text into tokens on disk, in Megatron's format"},
    {"plan", "tessera-train", "memory, traffic and time of every rank, without running anything"},
    {"simulate", "tessera-train", "steps of many ranks that are not alike, from measurements of few"},
    {"checkpoint", "tessera-train", "look at checkpoints and export them, without a model"},
    {"bench", "tessera-bench",
     "measure steps, memory, buckets, and collectives and optimizer steps beside this machine's limits"},
    {"doctor", "tessera-bench", "what this machine offers, and how to mend what it lacks"},
    {"import-config", nullptr,
     "python -m tessera.import_config: a configuration of DeepSpeed, Accelerate or FSDP as a strategy file",
     "tessera.import_config"},
    {"report", nullptr, "python -m tessera.report: one HTML page of runs, side by side", "tessera.report"},
};

int say_module(const Part& part) {
  std::fprintf(stderr, "tessera: `%s` is a module of the Python package. [T0027] hint: python -m %s --help\n",
               part.command, part.module);
  return static_cast<int>(ExitCode::kUsage);
}

}  // namespace

std::span<const Part> parts() { return kParts; }

const Part* part_with(std::string_view command) {
  const auto found = std::ranges::find(kParts, command, &Part::command);
  return found == std::end(kParts) ? nullptr : &*found;
}

int run_part(const Part& part, char** argv) {
  if (part.module != nullptr) return say_module(part);
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  const std::string program = (folder / part.program).string();
  if (!error) execv(program.c_str(), argv);
  const int why = error ? error.value() : errno;
  const bool is_missing = why == ENOENT;
  std::string text = std::string("tessera: `") + part.command + "` is a program of its own, and " + program + ": " +
                     std::strerror(why);
  text += is_missing ? std::string(". [T0028] hint: cmake --build BUILD --target ") + part.program + " builds it"
                     : ". [T0029] hint: it must be executable";
  std::fprintf(stderr, "%s\n", text.c_str());
  return static_cast<int>(is_missing ? ExitCode::kUnavailable : ExitCode::kPermission);
}

}  // namespace tessera::app
