// Tests how tables are printed.

#include "runtime/base/text_table.h"

#include <gtest/gtest.h>

#include <sstream>
#include <stdexcept>

#include "runtime/base/text.h"

namespace tessera {
namespace {

using Align = TextTable::Align;

TEST(TextTable, AlignsWordsLeftAndNumbersRight) {
  TextTable table({{"category"}, {"per rank", Align::kRight}, {"note"}});
  table.add_row({"parameters", "112.00 MiB", "bf16"});
  table.add_row({"gradients", "5 B"});
  table.add_rule();
  table.add_row({"sum", "112.00 MiB"});
  EXPECT_EQ(table.to_string(),
            "category      per rank  note\n"
            "----------  ----------  ----\n"
            "parameters  112.00 MiB  bf16\n"
            "gradients          5 B\n"
            "----------  ----------  ----\n"
            "sum         112.00 MiB\n");
}

TEST(TextTable, CountsCharactersNotBytes) {
  TextTable table({{"t", Align::kRight}, {"x", Align::kRight}});
  table.add_row({"5 \xC2\xB5s", "1"});
  table.add_row({"5 ms", "22"});
  std::istringstream lines(table.to_string());
  for (std::string line; std::getline(lines, line);) EXPECT_EQ(text_width(line), 8u) << line;
}

TEST(TextTable, IndentsEveryLine) {
  TextTable table({{"a"}});
  table.add_row({"b"});
  EXPECT_EQ(table.to_string(2), "  a\n  -\n  b\n");
}

TEST(TextTable, RefusesCellsWithoutAColumn) {
  TextTable table({{"a"}});
  EXPECT_THROW(table.add_row({"b", "c"}), std::invalid_argument);
  EXPECT_THROW(TextTable({}), std::invalid_argument);
}

}  // namespace
}  // namespace tessera
