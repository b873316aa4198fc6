#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/metric.h"

namespace tessera {

/// How metrics become the bytes of a file. One belongs to one file; it may know what was written before. Errors have exit
/// code 70, without the file's name.
class MetricsForm {
 public:
  virtual ~MetricsForm() = default;

  /// The file that is appended to has this first line. Nothing by default. Errors: 73, it does not fit.
  virtual absl::Status go_on_after(std::string_view /*first_line*/) { return absl::OkStatus(); }
  /// What stands before all else, as far as it is known: a table without columns gets them with its first row.
  virtual std::string beginning() const { return ""; }
  /// What `metrics` add behind it. Names differ and are not empty.
  virtual absl::StatusOr<std::string> bytes_of(const std::vector<Metric>& metrics) = 0;
  /// Half of what `bytes_of` gave would spoil what comes behind it, so it is cut off; a line of JSON is ended instead.
  virtual bool drops_halves() const { return true; }
};

/// An object a line, as MetricsWriter shows.
std::unique_ptr<MetricsForm> json_lines_form();

/// A table (RFC 4180, lines end with "\n") whose first line names `columns`. Without columns those of the file that is gone
/// on with, or else of the first row. A row may lack columns, which are empty then, and has none beside them (70). Numbers
/// read back to the same bits, "nan" and "inf" among them; flags are true and false.
std::unique_ptr<MetricsForm> csv_form(std::vector<std::string> columns);

/// An event file of TensorBoard: framed records of Event messages. The metric "step" is their step; numbers and flags are
/// scalars of 32 bits under their names, and words are left out. `goes_on`: the first event has TensorBoard forget what
/// earlier files of the folder have of its step and of later ones.
std::unique_ptr<MetricsForm> event_form(bool goes_on);

/// "events.out.tfevents.1795444800.host.4711.0": a name that no other file of any run has, in the order of time.
std::string event_file_name();

}  // namespace tessera
