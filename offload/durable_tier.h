#pragma once

// See docs/glossary.md: tier.

#include <absl/status/status.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// Records that outlive the process, with the values of the last commit. The code that makes commits decides when a
/// commit is valid, and stores the text that `where` returns:
///
///     tier.end_writes();  commit.records = tier.where();
///     tier.sync();  ... the commit is on the disk of every rank ...  tier.committed();
///
/// No record may be put between `end_writes` and `committed`, so that the records keep the values of the commit.
/// Records may be read during this time.
///
/// The next process calls these functions before it puts any record:
///
///     tier.protect(commit.records);     // records that are put from now on do not change the commit
///     tier.return_to(commit.records);   // the records have the values of the commit
class DurableTier {
 public:
  virtual ~DurableTier() = default;

  /// Waits until all records that were put are written. Errors: those of the writes, and of an earlier `sync`.
  virtual absl::Status end_writes() = 0;
  /// Syncs the files, so that all writes are on the disk itself. Another thread may call it while records are read.
  /// Errors: 74 if the disk failed.
  virtual absl::Status sync() = 0;
  /// Returns a text with the positions of the latest values, and their checksums. It covers only records on disk (see
  /// `in_memory`).
  virtual std::string where() const = 0;
  /// From now on, the commit has the values that the last `where` described.
  virtual void committed() = 0;
  /// Keeps the commit's values from being overwritten. Errors: 65 if `where` describes other records.
  virtual absl::Status protect(std::string_view where) = 0;
  /// Takes the records back to the commit's values. REQUIRES: no record is held, and no copy is under way. Errors: 65
  /// if `where` describes other records; and the errors of a read.
  virtual absl::Status return_to(std::string_view where) = 0;
  /// Returns the memory of the records that are never on disk. The code that makes the commit must save and restore
  /// them.
  virtual std::span<std::byte> in_memory() = 0;
};

}  // namespace tessera
