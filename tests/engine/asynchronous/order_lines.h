#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::testing {

/// A line of the file that sync.record_order names.
struct OrderLine {
  std::int64_t event = 0, step = 0, version = 0;
  int rank = 0, owner = 0;
  std::size_t group = 0;
  std::string unit;
  bool is_push = false;
};

/// Returns the lines of a recorded order, in the order of their events.
std::vector<OrderLine> read_lines(const std::string& path);
/// Writes lines as a recorded order. Events are numbered anew in the order of the lines.
void write_lines(const std::string& path, int ranks, const std::vector<OrderLine>& lines);
/// Returns the lines in a random order, in which each rank keeps its own order.
std::vector<OrderLine> shuffled(const std::vector<OrderLine>& lines, int ranks, std::uint64_t seed);

/// Returns the lines with versions counted anew, as if the events happened in the order of the lines.
std::vector<OrderLine> counted(std::vector<OrderLine> lines);

/// Returns base^exponent by repeated squaring, as bias corrections are computed.
double power_of(double base, std::int64_t exponent);

}  // namespace tessera::testing
