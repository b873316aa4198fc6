#pragma once

#include <string>
#include <vector>

#include "tessera/mesh.h"
#include "workshop/app/commands.h"

namespace tessera::app {

/// Whether this process is alone though the command wants more ranks: then it starts them.
bool starts_ranks(const BenchCommand& command);

/// `tessera bench <section>` again, with the command's options, as `command.ranks` local processes. Returns what
/// launch does.
int launch_ranks(const std::string& section, const BenchCommand& command);

/// Joins the other ranks, over the transport that the command names ("host", "gloo"; empty: what is best).
Mesh join_ranks(const BenchCommand& command);

/// Before anything is measured: the files that the command names can be written, and nothing is lost by it. Throws
/// tessera::Error (workshop/app/output_files.h).
void check_outputs(const BenchCommand& command);

/// Writes `text` where `path` names a file; an empty path is none. Throws tessera::Error (73, 74).
void write_text(const std::string& text, const std::string& path, const BenchCommand& command);

}  // namespace tessera::app
