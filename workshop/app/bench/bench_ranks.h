#pragma once

#include <string>

#include "tessera/mesh.h"
#include "workshop/app/commands.h"

namespace tessera::app {

/// Returns whether this process is alone although the command wants more ranks. If so, the command starts the ranks.
bool starts_ranks(const BenchCommand& command);

/// Runs `tessera bench <section>` again, with the command's options, as `command.ranks` local processes. Returns the
/// result of launch.
int launch_ranks(const std::string& section, const BenchCommand& command);

/// Joins the other ranks, over the transport that the command names ("host", "gloo", "mpi"; empty: the best one).
Mesh join_ranks(const BenchCommand& command);

/// Checks the output files of the command before anything is measured. Each file must be writable, and must not replace
/// a file that has to stay. Throws tessera::Error with the codes of check_outputs (workshop/app/output_files.h).
void check_outputs(const BenchCommand& command);

/// Writes `text` to the file `path`, unless `path` is empty. Throws tessera::Error: 73 if the file cannot be created,
/// 77 if permission is missing, 74 if it cannot be written.
void write_text(const std::string& text, const std::string& path, const BenchCommand& command);

}  // namespace tessera::app
