#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace tessera {

/// Parts of a commit: their bytes, by name.
using CommitParts = std::map<std::string, std::string>;

/// The data, in addition to records, that one rank writes when its part of a step is on the disk (DurableConfig).
struct Commit {
  std::int64_t generation = 0;  ///< number of the commit in its folder, from 1
  std::uint64_t run = 0;        ///< random number that rank 0 drew for the run that made the commit
  std::int64_t step = 0;        ///< StepResult::step
  /// Hash of the layout. (The layout says to what each byte belongs.) A commit with another hash cannot be used.
  std::uint64_t layout = 0;
  CommitParts parts = {};
};

/// Returns the bytes of a commit's file. They begin with "TESSCMT1". Then come generation, run, step, layout and the
/// number of parts, each in 8 bytes, lowest byte first. Each part consists of the length of its name, the name, the
/// part's length and its bytes. The last 8 bytes are the XXH3 (checkpoint_hash) of all bytes before them.
std::string write_commit(const Commit& commit);

/// Reads the bytes of a commit's file. `file` is the prefix of messages. Error: 65 if `bytes` are not the bytes of a
/// commit's file.
absl::StatusOr<Commit> read_commit(const std::string& file, std::string_view bytes);

/// Returns the bytes of a list of parts, for a part that itself consists of parts: their number, and then each part as
/// in a commit.
std::string write_parts(const CommitParts& parts);
/// Reads the bytes that `write_parts` returned. Returns false if `write_parts` cannot have returned `bytes`.
bool read_parts(std::string_view bytes, CommitParts& parts);

}  // namespace tessera
