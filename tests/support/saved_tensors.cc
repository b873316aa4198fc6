#include "tests/support/saved_tensors.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <span>

#include "checkpoint/saved_checkpoint.h"

namespace tessera::testing {

std::map<std::string, std::string> tensors_of(const std::string& path) {
  auto checkpoint = SavedCheckpoint::open(path, "test");
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::map<std::string, std::string> tensors;
  const auto add = [&](const std::string& what, const std::string& name) {
    for (const auto& place : (*checkpoint)->pieces(what, name)) {
      std::string bytes(static_cast<std::size_t>(place.piece.bytes()), '\0');
      EXPECT_TRUE((*checkpoint)->read(what, name, place.piece.offset, std::as_writable_bytes(std::span(bytes))).ok());
      tensors[what + "|" + name] += bytes;
    }
  };
  for (const SavedParameter& parameter : (*checkpoint)->manifest().parameters) {
    for (const char* what : {kMaster, kValue}) add(what, parameter.name);
    for (const SavedState& state : (*checkpoint)->manifest().states) {
      add(state.name, parameter.name);
      add(state.name + kScales, parameter.name);
    }
  }
  return tensors;
}

}  // namespace tessera::testing
