#pragma once

// See docs/glossary.md: unit.

#include <string>

#include "tessera/error.h"

namespace tessera {

/// Calls a rule that the program defines. If the rule throws an Error, the name of the unit or parameter is put in
/// front of its text: "unit blocks.3: ". An exception of another type comes from the program, and is passed on
/// unchanged.
template <class Call>
auto naming(const char* kind, const std::string& name, const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    throw Error(error.exit_code(), std::string(kind) + " " + name + ": " + error.message());
  }
}

}  // namespace tessera
