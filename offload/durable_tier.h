#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// Records that outlive the process, as of the last commit. What a commit is, its maker decides and writes down:
///
///     tier.end_writes();  commit.records = tier.where();
///     tier.sync();  ... the commit is on the disk of every rank ...  tier.committed();
///
/// Between the two lines and the last call nothing is put: what training has stays what the commit says. Records may be read meanwhile.
///
/// and in the next process, before anything is put:
///
///     tier.protect(commit.records);     // whatever is put now, the commit stays as it is
///     tier.return_to(commit.records);   // the records are the commit's
class DurableTier {
 public:
  virtual ~DurableTier() = default;

  /// Waits until all that was put was written. Errors: those of a write, and of a `sync` before.
  virtual absl::Status end_writes() = 0;
  /// What was written is on the disk itself. May run on another thread, while records are read. Errors: 74 the disk failed.
  virtual absl::Status sync() = 0;
  /// Where the latest values are, and their checksums: of records on disk only (see `in_memory`).
  virtual std::string where() const = 0;
  /// What `where` told of last is the commit from now on.
  virtual void committed() = 0;
  /// Errors: 65 of other records.
  virtual absl::Status protect(std::string_view where) = 0;
  /// REQUIRES: no record is held, and no copy under way. Errors likewise, and those of a read.
  virtual absl::Status return_to(std::string_view where) = 0;
  /// Records that are never on disk, which are for the maker of the commit to save and to bring back.
  virtual std::span<std::byte> in_memory() = 0;
};

}  // namespace tessera
