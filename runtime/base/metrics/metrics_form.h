#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/metric.h"

namespace tessera {

/// Turns metrics into the bytes of a file. One object belongs to one file, and may remember what it wrote before.
/// MetricsWriter is its only caller. Errors have exit code 64, without the file's name.
class MetricsForm {
 public:
  virtual ~MetricsForm() = default;

  /// Takes the first line of a file to which metrics are appended. It does nothing by default. Error: 73 if the line
  /// does not fit.
  virtual absl::Status go_on_after(std::string_view /*first_line*/) { return absl::OkStatus(); }
  /// Returns the beginning of the file, as far as it is known. A table without columns gets them with its first row.
  virtual std::string beginning() const { return ""; }
  /// Returns the bytes of one row of `metrics`. Names differ and are not empty.
  virtual absl::StatusOr<std::string> bytes_of(const std::vector<Metric>& metrics) = 0;
  /// Returns whether an incomplete row must be cut off because it would spoil the next row. (An incomplete line of JSON
  /// is not cut off, but ended.)
  virtual bool drops_halves() const { return true; }
};

/// Returns the form with one object per line, as MetricsWriter describes it.
std::unique_ptr<MetricsForm> json_lines_form();

/// Returns the form of a table (RFC 4180, lines end with "\n") whose first line names `columns`. If `columns` is empty,
/// the table has the columns of the file to which it is appended, or else the columns of the first row. A file of an
/// earlier or later version may have fewer or more columns than `columns`. Such a file keeps its own columns, and
/// values for other columns are not written. A row may lack columns; their cells are then empty. A metric without a
/// column in the table is an error (64). Numbers read back to the same bits, "nan" and "inf" among them; flags are
/// written as true and false.
std::unique_ptr<MetricsForm> csv_form(std::vector<std::string> columns);

/// Returns the form of an event file of TensorBoard: framed records of Event messages. The metric "step" becomes the
/// step of these messages. Numbers and flags become 32-bit scalars under their names, and text values are left out. If
/// `goes_on` is true, the run continues an earlier one: the first event then makes TensorBoard forget everything that
/// earlier files of the folder have for the step of that event and for later steps.
std::unique_ptr<MetricsForm> event_form(bool goes_on);

/// Returns a name such as "events.out.tfevents.1795444800.host.4711.0". No other file of any run has this name, and
/// names sort by time.
std::string event_file_name();

}  // namespace tessera
