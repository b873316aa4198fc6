// This file has the main function of a program whose tests are several entries of ctest (tessera_test(... IN program),
// cmake/TesseraLayers.cmake):
//
//   program                       runs all tests
//   program --of=units_test.cc    runs the tests of this file; commas separate several files
//   TESTS_OF=units_test.cc program    the same
//
// A filter of GoogleTest's, as an option or as GTEST_FILTER, chooses among the tests of these files.
#include <fnmatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace {

using Words = std::set<std::string, std::less<>>;

Words split(std::string_view list, char between) {
  Words parts;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(between), list.size());
    parts.emplace(list.substr(0, end));
    list.remove_prefix(std::min(list.size(), end + 1));
  }
  return parts;
}

bool matches(const std::string& name, const Words& patterns) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
}

/// Returns a GoogleTest filter for the tests of these files that the filter `chosen` accepts.
std::string filter_of(const Words& files, const std::string& chosen) {
  const std::size_t minus = std::min(chosen.find('-'), chosen.size());
  const Words wanted = split(chosen.substr(0, minus), ':');
  const Words unwanted = split(std::string_view(chosen).substr(std::min(minus + 1, chosen.size())), ':');
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string filter;
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string_view path = test.file();
      if (!files.contains(path.substr(path.rfind('/') + 1))) continue;
      const std::string name = std::string(suite.name()) + "." + test.name();
      if (matches(name, unwanted) || !(wanted.empty() || matches(name, wanted))) continue;
      filter += (filter.empty() ? "" : ":") + name;
    }
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  constexpr std::string_view kOption = "--of=";
  std::optional<std::string> files;
  if (const char* const named = std::getenv("TESTS_OF"); named != nullptr) files = named;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (!word.starts_with(kOption)) {
      std::cerr << "unknown option " << word << "; see tests/support/tests_by_file.cc\n";
      return 64;
    }
    files = word.substr(kOption.size());
  }
  if (files) {
    const std::string filter = filter_of(split(*files, ','), GTEST_FLAG_GET(filter));
    if (filter.empty()) {
      std::cerr << *files << ": this program has no such test\n";
      return 64;
    }
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
